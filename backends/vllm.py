"""vLLM's OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from backends import promtext
from backends.base import (
    AUDIO_PATHS,
    CHAT_AND_TEXT,
    CONSTRAINTS,
    JSON,
    REMOVE,
    TEXT_PATHS,
    Edits,
    EngineLoad,
    ModelCard,
    ModelFormat,
    OpenAICompatible,
    Operation,
    Probes,
    Unsupported,
    share,
)

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USED = "vllm:kv_cache_usage_perc"
KV_USED_BEFORE_0_10 = "vllm:gpu_cache_usage_perc"
HITS = "vllm:prefix_cache_hits_total"
LOOKED_UP = "vllm:prefix_cache_queries_total"

# Wiring between engines (whose KV cache to fetch, which rank to use), other callers' request ids and sessions, and the
# salt that keeps the prefix caches of tenants apart: none of a client's business, and an answer is the same without.
DROPPED = frozenset(
    "kv_transfer_params ec_transfer_params cache_salt request_id session_id data_parallel_rank priority".split()
)
# Code and templates to run inside the engine, tensors to unpickle; and other engines' constraints, which it ignores.
UNDERSTOOD = frozenset("guided_json guided_regex guided_choice guided_grammar structured_outputs".split())
REFUSED = frozenset({"chat_template", "logits_processors", "prompt_embeds"}) | (CONSTRAINTS - UNDERSTOOD)
# vLLM up to 0.11 read these; later ones ignore them with a line in the log.
LEGACY = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


@dataclass(frozen=True)
class Vllm(OpenAICompatible):
    """Load comes from /metrics, where every gauge is labelled by data-parallel rank."""

    kind: str = "vllm"
    formats: frozenset[ModelFormat] = frozenset({ModelFormat.SAFETENSORS})
    paths: Mapping[Operation, str] = field(
        default_factory=lambda: {
            **TEXT_PATHS,
            Operation.TRANSCRIPTIONS: AUDIO_PATHS[Operation.TRANSCRIPTIONS],
            Operation.TRANSLATIONS: AUDIO_PATHS[Operation.TRANSLATIONS],
        }
    )
    probes: Probes = Probes(health="/health", load="/metrics")
    dropped: frozenset[str] = DROPPED
    refused: frozenset[str] = REFUSED
    # Versions whose pooling requests do not have the field ignore it.
    salted: frozenset[Operation] = CHAT_AND_TEXT | {Operation.EMBEDDINGS, Operation.RERANK}

    def refuse(self, operation: Operation, body: JSON) -> Unsupported | None:
        if operation is Operation.CHAT:
            for message in body.get("messages", ()):
                content = message.get("content")
                if isinstance(content, list) and any(map(_names_media, content)):
                    return Unsupported("messages", "the 'uuid' of a part would stand for media that anybody has sent")
        return OpenAICompatible.refuse(self, operation, body)

    def edits(self, operation: Operation, body: JSON) -> Edits:
        edits = super().edits(operation, body)
        if not LEGACY.keys().isdisjoint(body):
            edits = {**edits, **_structured(body)}
        return edits

    def read_models(self, body: bytes) -> tuple[ModelCard, ...]:
        """The model, its other names, and the adapters on top of it, which have its window."""
        found = super().read_models(body)
        windows = {card.id: card.context_length for card in found}
        return tuple(
            card if card.context_length else replace(card, context_length=windows.get(str(card.details.get("parent"))))
            for card in found
        )

    def read_load(self, body: bytes) -> EngineLoad:
        numbers = promtext.read(body, (RUNNING, WAITING, KV_USED, KV_USED_BEFORE_0_10, HITS, LOOKED_UP))
        ranks = max(1, body.count(b"\n" + RUNNING.encode() + b"{") + body.startswith(RUNNING.encode() + b"{"))
        running, waiting = numbers.get(RUNNING), numbers.get(WAITING)
        used = numbers.get(KV_USED, numbers.get(KV_USED_BEFORE_0_10))
        hits, looked_up = numbers.get(HITS), numbers.get(LOOKED_UP)
        return EngineLoad(
            running=None if running is None else int(running),
            waiting=None if waiting is None else int(waiting),
            kv_used=None if used is None else used / ranks,  # a share: the mean over ranks, not the sum
            prefix_hits=share(hits / looked_up) if hits is not None and looked_up else None,  # tokens since its start
        )


def _names_media(part: object) -> bool:
    """Whether a message's part has a name in the media cache, which knows no salt: who guesses another caller's name
    sees that caller's picture, and who sends a picture under it shows them this one."""
    return isinstance(part, dict) and part.get("uuid") is not None


def _structured(body: JSON) -> dict[str, Any]:
    """The old names of constraints as `structured_outputs`; one that is there already says it better."""
    edits: dict[str, Any] = {name: REMOVE for name in LEGACY if name in body}
    found = {new: body[old] for old, new in LEGACY.items() if body.get(old) is not None}
    if found and not body.get("structured_outputs"):
        edits["structured_outputs"] = found
    return edits


BACKEND = Vllm()
