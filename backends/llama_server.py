"""llama.cpp's own HTTP server, `llama-server`."""

from __future__ import annotations

from dataclasses import dataclass

from backends import promtext
from backends.base import EngineLoad, ModelCard, ModelFormat, OpenAICompatible, Probes

RUNNING = "llamacpp:requests_processing"
WAITING = "llamacpp:requests_deferred"
KV_USED = "llamacpp:kv_cache_usage_ratio"


@dataclass(frozen=True)
class LlamaServer(OpenAICompatible):
    """`/metrics` answers 501 unless the server was started with `--metrics`: then the load stays unknown."""

    kind: str = "llama_server"
    formats: frozenset[ModelFormat] = frozenset({ModelFormat.GGUF})
    probes: Probes = Probes(health="/health", load="/metrics")

    def read_models(self, body: bytes) -> tuple[ModelCard, ...]:
        cards = super().read_models(body)
        return tuple(ModelCard(card.id, _trained_context(card), card.details) for card in cards)

    def read_load(self, body: bytes) -> EngineLoad:
        numbers = promtext.read(body, (RUNNING, WAITING, KV_USED))
        running, waiting = numbers.get(RUNNING), numbers.get(WAITING)
        return EngineLoad(
            running=None if running is None else int(running),
            waiting=None if waiting is None else int(waiting),
            kv_used=numbers.get(KV_USED),
        )


def _trained_context(card: ModelCard) -> int | None:
    meta = card.details.get("meta")
    context = meta.get("n_ctx_train") if isinstance(meta, dict) else None
    return context if isinstance(context, int) else card.context_length


BACKEND = LlamaServer()
