"""LM Studio's local server; Jan's answers in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backends import cards
from backends.base import (
    ALL,
    CONSTRAINTS,
    JSON,
    Capability,
    Edits,
    ModelCard,
    ModelFormat,
    OpenAICompatible,
    Operation,
    Probes,
    positive,
)
from backends.shaping import as_max_tokens, json_object

# How long a model stays in memory is the operator's decision, not that of whoever asked last.
DROPPED = frozenset({"ttl"})
# Loading options of the native API and other engines' constraints.
REFUSED = frozenset({"draft_model", "context_length"}) | CONSTRAINTS
_ANY_OBJECT = {"name": "object", "schema": {"type": "object"}}


@dataclass(frozen=True)
class LmStudio(OpenAICompatible):
    """Models load when they are asked for, so a listed model may take minutes to answer for the first time."""

    kind: str = "lmstudio"
    formats: frozenset[ModelFormat] = frozenset({ModelFormat.GGUF, ModelFormat.MLX})
    paths: Mapping[Operation, str] = field(
        default_factory=lambda: {
            Operation.CHAT: "/v1/chat/completions",
            Operation.COMPLETIONS: "/v1/completions",
            Operation.EMBEDDINGS: "/v1/embeddings",
        }
    )
    probes: Probes = Probes(health="/v1/models", models="/api/v1/models")
    capabilities: frozenset[Capability] = ALL - {
        Capability.N, Capability.LOGPROBS, Capability.ECHO, Capability.SUFFIX, Capability.TOKEN_PROMPTS,
        Capability.RERANK, Capability.TOKENISE, Capability.CHAT_TOKENISE,
    }  # fmt: skip
    tells: frozenset[Capability] = frozenset({Capability.VISION})  # any model gets tools, trained for them or not
    dropped: frozenset[str] = DROPPED
    refused: frozenset[str] = REFUSED
    cuts_prompts: bool = True

    def edits(self, operation: Operation, body: JSON) -> Edits:
        edits: dict[str, Any] = {**super().edits(operation, body), **as_max_tokens(body)}
        wanted = body.get("response_format")
        if isinstance(wanted, dict) and wanted.get("type") == "json_object":  # it knows text and json_schema only
            edits["response_format"] = {"type": "json_schema", "json_schema": _ANY_OBJECT}
        return edits

    def read_models(self, body: bytes) -> tuple[ModelCard, ...]:
        """Its own list, which knows format and context; or OpenAI's, of older versions and of Jan."""
        entries = json_object(body).get("models")
        if not isinstance(entries, list):
            return super().read_models(body)
        return tuple(
            _card(entry)
            for entry in entries
            if isinstance(entry, dict) and isinstance(entry.get("key"), str)
        )


def _card(entry: JSON) -> ModelCard:
    embeds = entry.get("type") in ("embedding", "embeddings")
    return ModelCard(
        entry["key"],
        _window(entry),
        entry,
        cards.word(entry.get("format")),
        cards.quantisation(cards.mapping(entry.get("quantization")).get("name")),
        ("embeddings",) if embeds else cards.capabilities(entry.get("capabilities")),
    )


def _window(entry: JSON) -> int | None:
    """The smallest window it is loaded with, since longer prompts would be cut; else what the model allows."""
    loaded = entry.get("loaded_instances")
    given = [
        positive(cards.mapping(cards.mapping(one).get("config")).get("context_length"))
        for one in (loaded if isinstance(loaded, list) else ())
    ]
    return min((one for one in given if one), default=None) or positive(entry.get("max_context_length"))


BACKEND = LmStudio()
