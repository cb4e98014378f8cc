"""vLLM's OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import dataclass

from backends import promtext
from backends.base import EngineLoad, ModelFormat, OpenAICompatible, Probes

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USED = "vllm:kv_cache_usage_perc"
KV_USED_BEFORE_0_10 = "vllm:gpu_cache_usage_perc"


@dataclass(frozen=True)
class Vllm(OpenAICompatible):
    """Load comes from /metrics, where every gauge is labelled by data-parallel rank."""

    kind: str = "vllm"
    formats: frozenset[ModelFormat] = frozenset({ModelFormat.SAFETENSORS})
    probes: Probes = Probes(health="/health", load="/metrics")

    def read_load(self, body: bytes) -> EngineLoad:
        numbers = promtext.read(body, (RUNNING, WAITING, KV_USED, KV_USED_BEFORE_0_10))
        ranks = max(1, body.count(b"\n" + RUNNING.encode() + b"{") + body.startswith(RUNNING.encode() + b"{"))
        running, waiting = numbers.get(RUNNING), numbers.get(WAITING)
        used = numbers.get(KV_USED, numbers.get(KV_USED_BEFORE_0_10))
        return EngineLoad(
            running=None if running is None else int(running),
            waiting=None if waiting is None else int(waiting),
            kv_used=None if used is None else used / ranks,  # a share: the mean over ranks, not the sum
        )


BACKEND = Vllm()
