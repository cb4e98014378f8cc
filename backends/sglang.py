"""SGLang's OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from backends import promtext
from backends.base import (
    ALL,
    AUDIO_PATHS,
    CHAT_AND_TEXT,
    CONSTRAINTS,
    JSON,
    REMOVE,
    Capability,
    Edits,
    EngineLoad,
    ModelFormat,
    OpenAICompatible,
    Operation,
    Probes,
    positive,
    share,
)
from backends.shaping import rerank_answer

RUNNING = "sglang:num_running_reqs"
WAITING = "sglang:num_queue_reqs"
KV_USED = "sglang:token_usage"

# Wiring between engines (bootstrap_*: which host to fetch a KV cache from), ids and sessions of other callers, the
# salts that keep the radix caches of tenants apart, and internals that are large and of no use to a client.
DROPPED = frozenset(
    "bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key data_parallel_rank routed_dp_rank"
    " disagg_prefill_dp_rank rid cache_salt extra_key session_params session_id return_hidden_states"
    " return_routed_experts priority".split()
)
# Code to run inside the engine, files to load from its disk, input past the template; and others' constraints.
UNDERSTOOD = frozenset({"regex", "ebnf", "json_schema", "guided_json", "guided_regex", "guided_grammar"})
REFUSED = frozenset(
    "custom_logit_processor custom_params lora_path input_ids input_embeds image_data audio_data video_data".split()
) | (CONSTRAINTS - UNDERSTOOD)
LEGACY = {"guided_regex": "regex", "guided_grammar": "ebnf"}


@dataclass(frozen=True)
class Sglang(OpenAICompatible):
    """Streams need no change. `/health` may generate a token and takes a second or more: models are asked instead."""

    kind: str = "sglang"
    formats: frozenset[ModelFormat] = frozenset({ModelFormat.SAFETENSORS})
    paths: Mapping[Operation, str] = field(
        default_factory=lambda: {
            Operation.CHAT: "/v1/chat/completions",
            Operation.COMPLETIONS: "/v1/completions",
            Operation.EMBEDDINGS: "/v1/embeddings",
            Operation.RERANK: "/v1/rerank",
            Operation.TOKENIZE: "/v1/tokenize",
            Operation.DETOKENIZE: "/v1/detokenize",
            Operation.TRANSCRIPTIONS: AUDIO_PATHS[Operation.TRANSCRIPTIONS],
        }
    )
    probes: Probes = Probes(health="/v1/models", load="/v1/loads?include=core")
    capabilities: frozenset[Capability] = ALL - {Capability.CHAT_TOKENISE, Capability.SUFFIX}
    dropped: frozenset[str] = DROPPED
    refused: frozenset[str] = REFUSED
    fixes: frozenset[Operation] = frozenset({Operation.RERANK, Operation.DETOKENIZE})
    salted: frozenset[Operation] = CHAT_AND_TEXT  # the only request models with the field

    def edits(self, operation: Operation, body: JSON) -> Edits:
        edits = super().edits(operation, body)
        if body.get("guided_json") is not None and operation.generates:
            schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": body["guided_json"]}}
            edits = {**edits, "guided_json": REMOVE, "response_format": schema}
        for old, new in LEGACY.items():
            if body.get(old) is not None:
                edits = {**edits, old: REMOVE, new: body[old]}
        return edits

    def fix_answer(self, operation: Operation, answer: Any, body: JSON) -> Any:
        if operation is Operation.DETOKENIZE and isinstance(answer, dict) and "text" in answer:
            return {"prompt": answer["text"]}
        if operation is Operation.RERANK and isinstance(answer, list):
            rows = [row for row in answer if isinstance(row, dict) and isinstance(row.get("score"), int | float)]
            counts = [count for row in rows if (count := _prompt_tokens(row)) is not None]
            tokens = sum(counts) if len(counts) == len(rows) else None
            pairs = [(row.get("index", place), row["score"]) for place, row in enumerate(rows)]
            return rerank_answer(pairs, body, tokens)
        return answer

    def read_load(self, body: bytes) -> EngineLoad:
        """`/v1/loads`, `/get_load` of older versions, or the metrics page: whichever the path was pointed at."""
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            return _from_metrics(body)
        rows = answer.get("loads") if isinstance(answer, dict) else answer
        if not isinstance(rows, list):
            return EngineLoad()
        ranks = [row for row in rows if isinstance(row, dict)]
        used = [row["token_usage"] for row in ranks if isinstance(row.get("token_usage"), int | float)]
        hits = [found for row in ranks if (found := share(row.get("cache_hit_rate"))) is not None]
        return EngineLoad(
            running=_sum(ranks, "num_running_reqs"),
            waiting=_sum(ranks, "num_waiting_reqs"),
            kv_used=sum(used) / len(used) if used else None,
            prefix_hits=sum(hits) / len(hits) if hits else None,
        )


def _prompt_tokens(row: JSON) -> int | None:
    about = row.get("meta_info")
    return positive(about.get("prompt_tokens")) if isinstance(about, dict) else None


def _sum(ranks: list[JSON], name: str) -> int | None:
    counts = [row[name] for row in ranks if isinstance(row.get(name), int) and row[name] >= 0]
    return sum(counts) if counts else None


def _from_metrics(body: bytes) -> EngineLoad:
    numbers = promtext.read(body, (RUNNING, WAITING))
    running, waiting = numbers.get(RUNNING), numbers.get(WAITING)
    return EngineLoad(
        running=None if running is None or running < 0 else int(running),
        waiting=None if waiting is None or waiting < 0 else int(waiting),
    )


BACKEND = Sglang()
