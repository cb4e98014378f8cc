"""llama.cpp's own HTTP server, `llama-server`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from backends import cards, promtext
from backends.base import (
    ALL,
    AUDIO_PATHS,
    CONSTRAINTS,
    JSON,
    REMOVE,
    TEXT_PATHS,
    Capability,
    Edits,
    EngineLoad,
    ModelCard,
    ModelFormat,
    OpenAICompatible,
    Operation,
    Probes,
    positive,
)
from backends.failures import Failure, FailureKind
from backends.shaping import rerank_answer, tokens_answer

RUNNING = "llamacpp:requests_processing"
WAITING = "llamacpp:requests_deferred"
KV_USED = "llamacpp:kv_cache_usage_ratio"

# id_slot aims at another caller's slot and its cache; the rest turns on debugging output, or changes the framing and
# the fields of answers that the gateway has to read.
DROPPED = frozenset(
    "id_slot sse_ping_interval verbose return_tokens response_fields n_probs post_sampling_probs timings_per_token"
    " return_progress".split()
)
# `lora` scales adapters of the operator's; the others are constraints that this engine ignores.
REFUSED = frozenset({"lora"}) | (CONSTRAINTS - {"grammar", "json_schema"})

# Faults of the caller that it answers with 500, because its code throws a plain runtime error.
_NOT_ABLE = re.compile(r"(image|audio|video) input is not supported|mmproj", re.IGNORECASE)
_TOO_LONG = re.compile(r"input is too large to process|input \(\d+ tokens\) is too large", re.IGNORECASE)
_CALLERS_FAULT = re.compile(
    r"json\.exception|parse error|failed to parse|invalid (type|value|base64|grammar)|type must be"
    r"|unable to generate parser",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class LlamaServer(OpenAICompatible):
    """`/metrics` answers 501 unless the server was started with `--metrics`: then the load stays unknown."""

    kind: str = "llama_server"
    formats: frozenset[ModelFormat] = frozenset({ModelFormat.GGUF})
    paths: Mapping[Operation, str] = field(
        default_factory=lambda: {
            **TEXT_PATHS,
            Operation.TRANSCRIPTIONS: AUDIO_PATHS[Operation.TRANSCRIPTIONS],
        }
    )
    probes: Probes = Probes(health="/health", load="/metrics")
    capabilities: frozenset[Capability] = ALL - {Capability.ECHO, Capability.SUFFIX, Capability.CHAT_TOKENISE}
    tells: frozenset[Capability] = frozenset({Capability.VISION})
    dropped: frozenset[str] = DROPPED
    refused: frozenset[str] = REFUSED
    fixes: frozenset[Operation] = frozenset({Operation.RERANK, Operation.TOKENIZE, Operation.DETOKENIZE})

    def edits(self, operation: Operation, body: JSON) -> Edits:
        if operation is Operation.TOKENIZE:
            special = body.get("add_special_tokens")
            return {"prompt": REMOVE, "content": body.get("prompt"), "add_special": special is not False}
        return super().edits(operation, body)

    def fix_answer(self, operation: Operation, answer: Any, body: JSON) -> Any:
        if not isinstance(answer, dict):
            return answer
        if operation is Operation.TOKENIZE and isinstance(answer.get("tokens"), list):
            return tokens_answer([one.get("id") if isinstance(one, dict) else one for one in answer["tokens"]])
        if operation is Operation.DETOKENIZE and "content" in answer:
            return {"prompt": answer["content"]}
        if operation is Operation.RERANK and isinstance(answer.get("results"), list):
            rows = [row for row in answer["results"] if isinstance(row, dict)]
            pairs = [(row.get("index", place), row.get("relevance_score", 0.0)) for place, row in enumerate(rows)]
            usage = answer.get("usage")
            tokens = positive(usage.get("prompt_tokens")) if isinstance(usage, dict) else None
            return rerank_answer(pairs, body, tokens)  # its own has neither id nor documents
        return answer

    def read_models(self, body: bytes) -> tuple[ModelCard, ...]:
        """One model, or in router mode every one the router may load. A second list, in Ollama's form, knows more of
        what they can do."""
        found = super().read_models(body)
        beside = orjson.loads(body).get("models")
        said = {
            one.get("name") or one.get("model"): one.get("capabilities")
            for one in (beside if isinstance(beside, list) else ())
            if isinstance(one, dict) and isinstance(one.get("name") or one.get("model"), str)
        }
        return tuple(_card(card, said.get(card.id)) for card in found)

    def read_load(self, body: bytes) -> EngineLoad:
        numbers = promtext.read(body, (RUNNING, WAITING, KV_USED))
        running, waiting = numbers.get(RUNNING), numbers.get(WAITING)
        return EngineLoad(
            running=None if running is None else int(running),
            waiting=None if waiting is None else int(waiting),
            kv_used=numbers.get(KV_USED),
        )

    def read_failure(self, status: int, body: bytes) -> Failure:
        failure = super().read_failure(status, body)
        if failure.kind is not FailureKind.BROKEN or status != 500:
            return failure
        for pattern, kind in (
            (_TOO_LONG, FailureKind.CONTEXT_LENGTH),
            (_NOT_ABLE, FailureKind.UNSUPPORTED),
            (_CALLERS_FAULT, FailureKind.BAD_REQUEST),
        ):
            if pattern.search(failure.message):
                return replace(failure, kind=kind)
        return failure


def _card(card: ModelCard, said: object) -> ModelCard:
    entry = card.details
    meta = cards.mapping(entry.get("meta"))
    modalities = cards.mapping(entry.get("architecture")).get("input_modalities")
    inputs = [name for name in modalities if name != "text"] if isinstance(modalities, list) else []
    arguments = cards.mapping(entry.get("status")).get("args")
    embeds = isinstance(arguments, list) and ("--embedding" in arguments or "--embeddings" in arguments)
    return replace(
        card,
        # What one request may have, where it says so; else what the model was made for.
        context_length=positive(meta.get("n_ctx")) or positive(meta.get("n_ctx_train")) or card.context_length,
        format=card.format or str(ModelFormat.GGUF),
        quantization=card.quantization or cards.quantisation(meta.get("ftype")),
        capabilities=("embeddings",) if embeds else cards.capabilities(entry.get("capabilities"), said, inputs),
    )


BACKEND = LlamaServer()
