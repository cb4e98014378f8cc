"""TensorRT-LLM's `trtllm-serve`, which answers 400 to any field it does not know."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from backends import promtext
from backends.base import (
    ALL,
    JSON,
    REMOVE,
    Capability,
    Edits,
    EngineLoad,
    ModelFormat,
    OpenAICompatible,
    Operation,
    Probes,
    Unsupported,
    share,
)
from backends.failures import Failure, FailureKind
from backends.shaping import as_max_tokens

RUNNING = "trtllm_num_requests_running"
WAITING = "trtllm_num_requests_waiting"
KV_USED = "trtllm_kv_cache_utilization"
HITS = "trtllm_kv_cache_hit_rate"

# The fields of its request models (serve/openai_protocol.py) that a client may set: sampling, form, tools. Not among
# them: lora_request (a path), prompt_token_ids, disaggregated_params, chat_template, cache_salt: all of it wiring.
_SAMPLING = frozenset(
    "model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream"
    " stream_options temperature top_p user best_of use_beam_search top_k top_p_min min_p repetition_penalty"
    " length_penalty early_stopping stop_token_ids include_stop_str_in_output ignore_eos min_tokens"
    " skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens thinking_token_budget"
    " add_special_tokens echo".split()
)
_CHAT = _SAMPLING | frozenset(
    "messages top_logprobs tools tool_choice reasoning_effort add_generation_prompt documents"
    " chat_template_kwargs".split()
)
KNOWN: Mapping[Operation, frozenset[str]] = {
    Operation.CHAT: _CHAT,
    Operation.COMPLETIONS: _SAMPLING | {"prompt"},
    Operation.EMBEDDINGS: frozenset("model input encoding_format dimensions user add_special_tokens".split()),
}
# Fields that say nothing about the answer's text or form: book-keeping of OpenAI's platform, hints to schedulers and
# caches, and what the gateway has read itself. Everything else unknown is a 400: dropped, it would change the answer.
HARMLESS = frozenset(
    "metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention parallel_tool_calls"
    " max_completion_tokens cache_salt priority request_id session_id rid keep_alive verbosity stream_interval"
    " cache_prompt id_slot timings_per_token return_progress include_reasoning separate_reasoning stream_reasoning"
    " conversation_params agent_hierarchy".split()
)
_ENGINE_FAULT = re.compile(r"cuda|out of memory|executor|internal|cublas|nccl|assert", re.IGNORECASE)


@dataclass(frozen=True)
class TensorRtLlm(OpenAICompatible):
    """Streams need no change. Its own `/metrics` hands out each figure once, so it is not read."""

    kind: str = "tensorrt_llm"
    formats: frozenset[ModelFormat] = frozenset({ModelFormat.TENSORRT, ModelFormat.SAFETENSORS})
    paths: Mapping[Operation, str] = field(
        default_factory=lambda: {
            Operation.CHAT: "/v1/chat/completions",
            Operation.COMPLETIONS: "/v1/completions",
            Operation.EMBEDDINGS: "/v1/embeddings",
        }
    )
    probes: Probes = Probes(health="/health", load="/prometheus/metrics")
    capabilities: frozenset[Capability] = ALL - {
        Capability.SUFFIX, Capability.CHAT_TOKENISE, Capability.TOKENISE, Capability.RERANK,
    }  # fmt: skip
    salted: frozenset[Operation] = frozenset({Operation.CHAT})  # to all others the field is unknown, which is a 400

    def refuse(self, operation: Operation, body: JSON) -> Unsupported | None:
        known = KNOWN[operation]
        if not known.issuperset(body):
            for name, value in body.items():
                if name not in known and name not in HARMLESS and value is not None:
                    return Unsupported(name, "it refuses fields it does not know")
        return super().refuse(operation, body)

    def edits(self, operation: Operation, body: JSON) -> Edits:
        known = KNOWN[operation]
        edits: dict[str, object] = {}
        if not known.issuperset(body):
            edits = {name: REMOVE for name in body if name not in known} | as_max_tokens(body)
        if "stream_options" in body and body.get("stream") is not True:
            edits["stream_options"] = REMOVE  # without a stream they are a 400 too
        return edits

    def read_load(self, body: bytes) -> EngineLoad:
        numbers = promtext.read(body, (RUNNING, WAITING, KV_USED, HITS))
        running, waiting = numbers.get(RUNNING), numbers.get(WAITING)
        return EngineLoad(
            running=None if running is None else int(running),
            waiting=None if waiting is None else int(waiting),
            kv_used=numbers.get(KV_USED),
            prefix_hits=share(numbers.get(HITS)),
        )

    def read_failure(self, status: int, body: bytes) -> Failure:
        """Nearly every exception is its 400, the engine's own ones too; its words are all there is to tell them by."""
        failure = super().read_failure(status, body)
        if failure.kind is FailureKind.BAD_REQUEST and _ENGINE_FAULT.search(failure.message):
            return replace(failure, kind=FailureKind.BROKEN)
        return failure


BACKEND = TensorRtLlm()
