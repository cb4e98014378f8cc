"""The contract between the gateway and its knowledge of an engine.

A backend describes one kind of engine: where its routes are, what its answers mean, what a request
must look like. It holds no state and opens no sockets, so the same object serves every replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

import orjson

from backends.failures import Failure, read_failure

JSON = dict[str, Any]


class Operation(StrEnum):
    """What a client can ask for; also the value of the `operation` metric label."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"

    @property
    def generates(self) -> bool:
        """Whether the answer costs completion tokens."""
        return self is not Operation.EMBEDDINGS


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


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model as the engine lists it."""

    id: str
    context_length: int | None = None  # tokens
    details: JSON = field(default_factory=dict)


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


@dataclass(frozen=True)
class OpenAICompatible:
    """What most engines share; an adapter is this with its differences stated."""

    kind: str = "openai_compatible"
    formats: frozenset[ModelFormat] = frozenset()
    paths: Mapping[Operation, str] = field(
        default_factory=lambda: {
            Operation.CHAT: "/v1/chat/completions",
            Operation.COMPLETIONS: "/v1/completions",
            Operation.EMBEDDINGS: "/v1/embeddings",
        }
    )
    # Nothing is known of its health path, and listing models is what every such server can do.
    probes: Probes = Probes(health="/v1/models")

    def edits(self, operation: Operation, body: JSON) -> Edits:
        return {}

    def is_ready(self, status: int, body: bytes) -> bool:
        # A 401 or 404 is still a server that answers; only its own "not now" means not ready.
        return status < 500

    def read_models(self, body: bytes) -> tuple[ModelCard, ...]:
        listing = orjson.loads(body)
        if not isinstance(listing, dict) or not isinstance(listing.get("data"), list):
            raise ValueError("not a model list")
        return tuple(
            ModelCard(entry["id"], _positive(entry.get("max_model_len")), entry)
            for entry in listing["data"]
            if isinstance(entry, dict) and isinstance(entry.get("id"), str)
        )

    def read_load(self, body: bytes) -> EngineLoad:
        return EngineLoad()

    def read_failure(self, status: int, body: bytes) -> Failure:
        return read_failure(status, body)


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
