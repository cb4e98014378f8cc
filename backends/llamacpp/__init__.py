"""The embedded engine: llama.cpp in a child process that answers like any other engine.

Only the adapter lives in this file, and it imports nothing heavy: the gateway loads it without loading llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import orjson

from backends import cards
from backends.base import (
    ALL,
    CONSTRAINTS,
    JSON,
    Capability,
    EngineLoad,
    ModelCard,
    ModelFormat,
    OpenAICompatible,
    Operation,
    Probes,
)


@dataclass(frozen=True)
class LlamaCpp(OpenAICompatible):
    """Speaks OpenAI's dialect natively, since it is ours."""

    kind: str = "llamacpp"
    formats: frozenset[ModelFormat] = frozenset({ModelFormat.GGUF})
    paths: Mapping[Operation, str] = field(
        default_factory=lambda: {
            Operation.CHAT: "/v1/chat/completions",
            Operation.COMPLETIONS: "/v1/completions",
            Operation.EMBEDDINGS: "/v1/embeddings",
        }
    )
    probes: Probes = Probes(health="/health", load="/load")
    # What the child refuses for its part is told here too, so that a replica of another kind can be chosen at once.
    capabilities: frozenset[Capability] = ALL - {
        Capability.TOOLS, Capability.TOOL_CHOICE, Capability.VISION, Capability.LOGPROBS, Capability.ECHO,
        Capability.SUFFIX,
    }  # fmt: skip
    refused: frozenset[str] = CONSTRAINTS

    def card(self, entry: JSON) -> ModelCard:
        meta = cards.mapping(entry.get("meta"))
        return replace(
            super().card(entry),
            format=str(ModelFormat.GGUF),
            quantization=cards.quantisation(meta.get("quantization")),
        )

    def read_load(self, body: bytes) -> EngineLoad:
        try:
            numbers = orjson.loads(body)
        except orjson.JSONDecodeError:
            numbers = None
        if not isinstance(numbers, dict):
            return EngineLoad()
        running, waiting, used = (numbers.get(name) for name in ("running", "waiting", "kv_used"))
        return EngineLoad(
            running=running if isinstance(running, int) else None,
            waiting=waiting if isinstance(waiting, int) else None,
            kv_used=used if isinstance(used, int | float) else None,
        )


BACKEND = LlamaCpp()
