"""The contract between the gateway and its knowledge of an engine.

A backend describes one kind of engine: where its routes are, what its answers mean, what a request
must look like. It holds no state and opens no sockets, so the same object serves every replica.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Final, Protocol

import orjson

from backends import cards
from backends.failures import Failure, read_failure

JSON = dict[str, Any]


class Operation(StrEnum):
    """What a client can ask for; also the value of the `operation` metric label."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    TRANSCRIPTIONS = "transcriptions"
    TRANSLATIONS = "translations"
    SPEECH = "speech"

    @property
    def generates(self) -> bool:
        """Whether the answer costs completion tokens."""
        return self is Operation.CHAT or self is Operation.COMPLETIONS

    @property
    def takes_form(self) -> bool:
        """Whether the request is multipart/form-data, with a file in it, and not JSON."""
        return self is Operation.TRANSCRIPTIONS or self is Operation.TRANSLATIONS

    @property
    def passes(self) -> bool:
        """Whether the answer may be anything, text or sound, and goes to the client as the engine sent it."""
        return self in _AUDIO


_AUDIO: Final = frozenset({Operation.TRANSCRIPTIONS, Operation.TRANSLATIONS, Operation.SPEECH})


class Capability(StrEnum):
    """What an engine can honour in a request. A capability that is missing is known to be missing."""

    TOOLS = "tools"
    TOOL_CHOICE = "tool_choice"  # `required` or a named function; every engine takes auto and none
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    VISION = "vision"
    LOGPROBS = "logprobs"
    LOGIT_BIAS = "logit_bias"
    N = "n"
    ECHO = "echo"
    SUFFIX = "suffix"
    TOKEN_PROMPTS = "token_prompts"  # prompts and inputs as token numbers or several at once
    CHAT_TOKENISE = "chat_tokenise"  # /v1/tokenize with messages
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    TOKENISE = "tokenise"


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A request that an engine would take and not honour, or could not take at all."""

    field: str
    why: str


class ModelFormat(StrEnum):
    """How weights are stored, as far as it decides which engine can load them."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"  # unquantised, or quantised by a method that has no member of its own
    AWQ = "awq"
    GPTQ = "gptq"
    FP8 = "fp8"
    COMPRESSED_TENSORS = "compressed-tensors"
    BITSANDBYTES = "bitsandbytes"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    EXL2 = "exl2"
    EXL3 = "exl3"
    MLX = "mlx"
    TENSORRT = "tensorrt"
    ONNX = "onnx"
    LORA = "lora"  # a PEFT adapter


class Remove:
    """Marks a top-level request field that an adapter takes out."""


REMOVE: Final = Remove()
# Text that an engine mixes into the keys of its prefix cache: prompts are reused among requests with the same one only.
SALT_FIELD: Final = "cache_salt"
Edits = Mapping[str, Any]  # top-level request field -> its new value, or REMOVE


@dataclass(frozen=True, slots=True)
class Probes:
    """Paths asked with GET; None where the engine has nothing to ask. None of them may load a model or generate."""

    health: str | None = "/health"
    models: str | None = "/v1/models"
    load: str | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's own word on its load. None means it did not say, which is never the same as zero."""

    running: int | None = None  # requests being generated
    waiting: int | None = None  # requests queued inside the engine
    kv_used: float | None = None  # share of the KV cache in use, 0.0-1.0
    prefix_hits: float | None = None  # share of prompt tokens found in its prefix cache, over whatever time it counts


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model as the engine lists it."""

    id: str
    context_length: int | None = None  # tokens
    details: JSON = field(default_factory=dict)  # the engine's own entry
    format: str | None = None  # as in ModelFormat, where the engine says so
    quantization: str | None = None
    capabilities: tuple[str, ...] = ()


class ChunkFixer(Protocol):
    """Rewrites the chunks of one stream, for engines whose streams are not quite OpenAI's. One object a stream."""

    def fix(self, chunk: JSON) -> Sequence[JSON]:
        """What the client gets instead of `chunk`, which may be changed in place. Raises: nothing, whatever comes."""


class Backend(Protocol):
    """Everything the gateway knows about one kind of engine."""

    @property
    def kind(self) -> str:
        """The module's name, which is also the YAML value."""

    @property
    def formats(self) -> frozenset[ModelFormat]:
        """Weights the engine can load; empty when it cannot be told from outside."""

    @property
    def paths(self) -> Mapping[Operation, str]:
        """Where each operation lives. A missing one is an operation the engine cannot do."""

    @property
    def probes(self) -> Probes: ...

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What the engine itself can do. Whether a model can is another matter."""

    @property
    def tells(self) -> frozenset[Capability]:
        """Which capabilities of a model its list names wherever the model has them, so that silence means no."""

    @property
    def fixes(self) -> frozenset[Operation]:
        """Operations whose answers need `fix_answer` and `stream_fixer`. Answers to all others pass untouched."""

    @property
    def translates(self) -> bool:
        """Whether requests are written anew by `translate`, because the engine speaks another language."""

    @property
    def stream_type(self) -> bytes:
        """Content type of the engine's streams: server-sent events, or one JSON document a line."""

    @property
    def cuts_prompts(self) -> bool:
        """Whether the engine may shorten a prompt that is too long without saying so."""

    @property
    def salted(self) -> frozenset[Operation]:
        """Operations whose requests take `SALT_FIELD`. The gateway sets it; `edits` take out what a client has set."""

    def refuse(self, operation: Operation, body: JSON) -> Unsupported | None:
        """The first thing in the request that this engine would not honour, although the answer depends on it."""

    def translate(self, operation: Operation, body: JSON, context_length: int | None) -> JSON:
        """The request in the engine's own language, without the model's name. Only where `translates`, and only for
        what `refuse` lets through."""

    def fix_answer(self, operation: Operation, answer: Any, body: JSON) -> Any:
        """A whole answer in OpenAI's form, or vLLM's where OpenAI has none; `answer` itself when nothing changes."""

    def stream_fixer(self, operation: Operation) -> ChunkFixer | None: ...

    def edits(self, operation: Operation, body: JSON) -> Edits:
        """What must change in the client's request for this engine; empty when nothing has to.

        The model's name and the request for usage in streams are the gateway's business and not included.
        """

    def is_ready(self, status: int, body: bytes) -> bool:
        """Whether an answer of the health path means that requests can be sent."""

    def read_models(self, body: bytes) -> tuple[ModelCard, ...]:
        """Raises: ValueError when the answer is not a model list."""

    def read_load(self, body: bytes) -> EngineLoad: ...

    def read_failure(self, status: int, body: bytes) -> Failure:
        """What an answer that is not a success means, in the gateway's terms."""


# Fields that force the answer into a form. Engines that do not know one of them ignore it and answer in any form.
CONSTRAINTS: Final = frozenset(
    "guided_json guided_regex guided_choice guided_grammar structured_outputs grammar json_schema regex ebnf"
    " regex_pattern grammar_string".split()
)
CHAT_AND_TEXT: Final = frozenset({Operation.CHAT, Operation.COMPLETIONS})
ALL: Final = frozenset(Capability)

_UNTOLD = (None, "auto", "none")


def _format(body: JSON) -> object:
    wanted = body.get("response_format")
    return wanted.get("type") if isinstance(wanted, dict) else None


def _is_plain_text(prompt: object) -> bool:
    return isinstance(prompt, str)


def _is_texts(given: object) -> bool:
    return isinstance(given, str) or (isinstance(given, list) and all(isinstance(one, str) for one in given))


def _shows_media(body: JSON) -> bool:
    messages = body.get("messages")
    return isinstance(messages, list) and any(
        isinstance(part, dict) and part.get("type", "text") != "text"
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


# What a request needs: (capability, the field that asks for it, whether it does). Looked at only where one is missing.
Need = tuple[Capability, str, Callable[[JSON], bool]]
_NEEDS: tuple[Need, ...] = (
    (Capability.N, "n", lambda body: body.get("n") not in (None, 1)),
    (Capability.N, "best_of", lambda body: body.get("best_of") not in (None, 1)),
    (Capability.TOOLS, "tools", lambda body: bool(body.get("tools"))),
    (Capability.TOOL_CHOICE, "tool_choice", lambda body: body.get("tool_choice") not in _UNTOLD),
    (Capability.JSON_OBJECT, "response_format", lambda body: _format(body) == "json_object"),
    (Capability.JSON_SCHEMA, "response_format", lambda body: _format(body) == "json_schema"),
    (Capability.VISION, "messages", _shows_media),
    (Capability.LOGPROBS, "logprobs", lambda body: body.get("logprobs") not in (None, False)),
    (Capability.LOGIT_BIAS, "logit_bias", lambda body: bool(body.get("logit_bias"))),
    (Capability.ECHO, "echo", lambda body: bool(body.get("echo"))),
    (Capability.SUFFIX, "suffix", lambda body: bool(body.get("suffix"))),
    (Capability.TOKEN_PROMPTS, "prompt", lambda body: "prompt" in body and not _is_plain_text(body["prompt"])),
    (Capability.TOKEN_PROMPTS, "input", lambda body: "input" in body and not _is_texts(body["input"])),
)
_WHAT = {
    Capability.TOOL_CHOICE: "it takes 'auto' and 'none' only",
    Capability.N: "it gives one answer a request",
    Capability.VISION: "it takes text only",
    Capability.TOKEN_PROMPTS: "it takes text, one prompt a request",
    Capability.CHAT_TOKENISE: "it counts plain text only; send 'prompt'",
}
# Fields by which a request asks for more than text.
ASKING: Final = frozenset(name for _, name, _ in _NEEDS)


def needs_of(missing: Collection[Capability]) -> tuple[Need, ...]:
    """What to look for in requests to an engine, or a model, that lacks these."""
    return tuple(need for need in _NEEDS if need[0] in missing)


def first_unmet(needs: Sequence[Need], body: JSON) -> Unsupported | None:
    """The first of the needs that the request has."""
    for capability, name, asks in needs:
        if asks(body):
            return Unsupported(name, _WHAT.get(capability, "it would answer as if it were not there"))
    return None


# What every server that speaks OpenAI's language may have. Audio is for adapters to add.
TEXT_PATHS: Final[Mapping[Operation, str]] = {
    Operation.CHAT: "/v1/chat/completions",
    Operation.COMPLETIONS: "/v1/completions",
    Operation.EMBEDDINGS: "/v1/embeddings",
    Operation.RERANK: "/v1/rerank",
    Operation.TOKENIZE: "/tokenize",
    Operation.DETOKENIZE: "/detokenize",
}
AUDIO_PATHS: Final[Mapping[Operation, str]] = {
    Operation.TRANSCRIPTIONS: "/v1/audio/transcriptions",
    Operation.TRANSLATIONS: "/v1/audio/translations",
    Operation.SPEECH: "/v1/audio/speech",
}


@dataclass(frozen=True)
class OpenAICompatible:
    """What most engines share; an adapter is this with its differences stated."""

    kind: str = "openai_compatible"
    formats: frozenset[ModelFormat] = frozenset()
    paths: Mapping[Operation, str] = field(default_factory=lambda: {**TEXT_PATHS, **AUDIO_PATHS})
    # Nothing is known of its health path, and listing models is what every such server can do.
    probes: Probes = Probes(health="/v1/models")
    capabilities: frozenset[Capability] = ALL
    tells: frozenset[Capability] = frozenset()
    dropped: frozenset[str] = frozenset()  # fields that never reach the engine; the answer is the same without them
    refused: frozenset[str] = frozenset()  # fields that are a 400, since dropping them would change the answer
    fixes: frozenset[Operation] = frozenset()
    translates: bool = False
    stream_type: bytes = b"text/event-stream"
    cuts_prompts: bool = False
    salted: frozenset[Operation] = frozenset()

    @cached_property
    def _missing(self) -> tuple[Need, ...]:
        return needs_of(ALL - self.capabilities)

    def refuse(self, operation: Operation, body: JSON) -> Unsupported | None:
        if not self.refused.isdisjoint(body):
            for name in body:
                if name in self.refused and body[name] is not None:
                    return Unsupported(name, "it does not know it, or must not be asked for it")
        if operation.generates or operation is Operation.EMBEDDINGS:
            return first_unmet(self._missing, body)
        if operation is Operation.TOKENIZE and Capability.CHAT_TOKENISE not in self.capabilities:
            if body.get("messages") is not None:
                return Unsupported("messages", _WHAT[Capability.CHAT_TOKENISE])
            if not _is_plain_text(body.get("prompt")):
                return Unsupported("prompt", "it counts one text a request")
        return None

    def edits(self, operation: Operation, body: JSON) -> Edits:
        if self.dropped.isdisjoint(body):
            return {}
        return {name: REMOVE for name in body if name in self.dropped}

    def translate(self, operation: Operation, body: JSON, context_length: int | None) -> JSON:
        return body

    def fix_answer(self, operation: Operation, answer: Any, body: JSON) -> Any:
        return answer

    def stream_fixer(self, operation: Operation) -> ChunkFixer | None:
        return None

    def is_ready(self, status: int, body: bytes) -> bool:
        # A 401 or 404 is still a server that answers; only its own "not now" means not ready.
        return status < 500

    def read_models(self, body: bytes) -> tuple[ModelCard, ...]:
        listing = orjson.loads(body)
        if not isinstance(listing, dict) or not isinstance(listing.get("data"), list):
            raise ValueError("not a model list")
        return tuple(
            self.card(entry)
            for entry in listing["data"]
            if isinstance(entry, dict) and isinstance(entry.get("id"), str)
        )

    def card(self, entry: JSON) -> ModelCard:
        """One entry of OpenAI's list, with what many servers add to it; another gateway's entries have all of it."""
        return ModelCard(
            entry["id"],
            positive(entry.get("max_model_len")) or positive(entry.get("context_length")),
            entry,
            cards.word(entry.get("format")),
            cards.quantisation(entry.get("quantization")),
            cards.capabilities(entry.get("capabilities")),
        )

    def read_load(self, body: bytes) -> EngineLoad:
        return EngineLoad()

    def read_failure(self, status: int, body: bytes) -> Failure:
        return read_failure(status, body)


def share(value: object) -> float | None:
    """A number between 0 and 1; anything else says nothing."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1 else None


def positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
