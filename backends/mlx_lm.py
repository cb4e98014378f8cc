"""`mlx_lm.server`, the small server that comes with mlx-lm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backends.base import (
    CHAT_AND_TEXT,
    CONSTRAINTS,
    JSON,
    REMOVE,
    Capability,
    ChunkFixer,
    Edits,
    ModelFormat,
    OpenAICompatible,
    Operation,
    Probes,
    Unsupported,
)
from backends.failures import Failure, FailureKind, classify
from backends.shaping import ToolIndexes, choice_index

# Repositories to download, and files to read from the server's disk.
REFUSED = frozenset({"adapters", "draft_model"}) | CONSTRAINTS
DROPPED = frozenset({"role_mapping", "num_draft_tokens"})
FINGERPRINT = "system_fingerprint"  # tells the server's operating system and kernel
# A whole number for one of these is of the wrong type: a 400, and before 0.32 the end of the connection.
_FRACTIONS = ("xtc_probability", "xtc_threshold")


@dataclass(frozen=True)
class MlxLm(OpenAICompatible):
    """Every failure of its own is a 404; before 0.32 a field of the wrong type ended the connection without a word."""

    kind: str = "mlx_lm"
    formats: frozenset[ModelFormat] = frozenset({ModelFormat.MLX, ModelFormat.SAFETENSORS})
    paths: Mapping[Operation, str] = field(
        default_factory=lambda: {
            Operation.CHAT: "/v1/chat/completions",
            Operation.COMPLETIONS: "/v1/completions",
        }
    )
    probes: Probes = Probes(health="/health")
    capabilities: frozenset[Capability] = frozenset({Capability.TOOLS, Capability.LOGPROBS, Capability.LOGIT_BIAS})
    refused: frozenset[str] = REFUSED
    dropped: frozenset[str] = DROPPED
    fixes: frozenset[Operation] = CHAT_AND_TEXT

    def refuse(self, operation: Operation, body: JSON) -> Unsupported | None:
        if not isinstance(body.get("logprobs"), bool | None):
            return Unsupported("logprobs", "it takes true or false, and the number as 'top_logprobs'")
        return super().refuse(operation, body)

    def edits(self, operation: Operation, body: JSON) -> Edits:
        edits: dict[str, Any] = dict(super().edits(operation, body))
        for name, value in body.items():
            if value is None:  # it takes a null for a value of the wrong type
                edits[name] = REMOVE
        for name in _FRACTIONS:
            if isinstance(body.get(name), int) and not isinstance(body[name], bool):
                edits[name] = float(body[name])
        if body.get("tool_choice") == "none" and "tools" in body:
            edits["tools"] = REMOVE  # it knows no tool_choice: without tools there is nothing to call
        return edits

    def fix_answer(self, operation: Operation, answer: Any, body: JSON) -> Any:
        if not isinstance(answer, dict) or FINGERPRINT not in answer:
            return answer
        return {name: value for name, value in answer.items() if name != FINGERPRINT}

    def stream_fixer(self, operation: Operation) -> ChunkFixer | None:
        return _Fixer("chat.completion.chunk" if operation is Operation.CHAT else "text_completion")

    def read_failure(self, status: int, body: bytes) -> Failure:
        failure = super().read_failure(status, body)
        if status == 404 and failure.kind is FailureKind.UNSUPPORTED and failure.message.lower() != "not found":
            return replace(failure, kind=classify(500, failure.message))
        return failure


class _Fixer:
    """The role once for each choice, not in every delta; the right name on every chunk; indexes of tool calls."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun: set[int] = set()
        self._tools = ToolIndexes()

    def fix(self, chunk: JSON) -> Sequence[JSON]:
        chunk["object"] = self._name
        chunk.pop(FINGERPRINT, None)
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            delta = choice.get("delta") if isinstance(choice, dict) else None
            if not isinstance(delta, dict):
                continue
            index = choice_index(choice)
            if index in self._begun:
                delta.pop("role", None)
            self._begun.add(index)
            if delta.get("tool_calls"):
                self._tools.fix(index, delta["tool_calls"])
        return (chunk,)


BACKEND = MlxLm()
