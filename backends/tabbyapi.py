"""TabbyAPI, which serves ExLlamaV3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from backends import cards
from backends.base import (
    ALL,
    CHAT_AND_TEXT,
    CONSTRAINTS,
    JSON,
    REMOVE,
    Capability,
    ChunkFixer,
    Edits,
    ModelCard,
    ModelFormat,
    OpenAICompatible,
    Operation,
    Probes,
    positive,
)
from backends.shaping import ToolIndexes, choice_index, tokens_answer

# Constraints of other engines: it ignores what it does not know and answers in any form.
REFUSED = CONSTRAINTS - {"json_schema", "regex_pattern", "grammar_string"}
# Raises its log level for one request, or reaches for another model's or template's files on the server.
DROPPED = frozenset({"logging", "preset", "adapters"})
_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class TabbyApi(OpenAICompatible):
    """`/v1/model` is asked for readiness: `/health` is 200 without a model, and 503 for good after one error."""

    kind: str = "tabbyapi"
    formats: frozenset[ModelFormat] = frozenset({ModelFormat.EXL3, ModelFormat.SAFETENSORS})
    paths: Mapping[Operation, str] = field(
        default_factory=lambda: {
            Operation.CHAT: "/v1/chat/completions",
            Operation.COMPLETIONS: "/v1/completions",
            Operation.EMBEDDINGS: "/v1/embeddings",
            Operation.TOKENIZE: "/v1/token/encode",
            Operation.DETOKENIZE: "/v1/token/decode",
        }
    )
    # Its list of models names every folder on its disk; requests for any of them go to the one that is loaded.
    probes: Probes = Probes(health="/v1/model", models="/v1/model")
    capabilities: frozenset[Capability] = ALL - {Capability.ECHO, Capability.SUFFIX, Capability.RERANK}
    refused: frozenset[str] = REFUSED
    dropped: frozenset[str] = DROPPED
    fixes: frozenset[Operation] = CHAT_AND_TEXT | {Operation.TOKENIZE, Operation.DETOKENIZE}

    def edits(self, operation: Operation, body: JSON) -> Edits:
        if operation is Operation.TOKENIZE:
            given = body.get("prompt") if body.get("messages") is None else body["messages"]
            begins = body.get("add_special_tokens") is not False
            return {"prompt": REMOVE, "messages": REMOVE, "text": given, "add_bos_token": begins}
        edits: dict[str, Any] = dict(super().edits(operation, body))
        if operation.generates and body.get("stream") is not True:
            edits["stream_options"] = {"include_usage": True}  # it counts whole answers only when asked, too
        wanted = body.get("response_format")
        if isinstance(wanted, dict) and wanted.get("type") == "json_object":
            edits["response_format"] = {**wanted, "type": "json"}  # OpenAI's name for it is ignored
        if isinstance(body.get("tools"), list):
            tools = [_complete(tool) for tool in body["tools"]]
            if tools != body["tools"]:
                edits["tools"] = tools
        return edits

    def fix_answer(self, operation: Operation, answer: Any, body: JSON) -> Any:
        if isinstance(answer, dict):
            if operation is Operation.TOKENIZE and isinstance(answer.get("tokens"), list):
                return tokens_answer(answer["tokens"])
            if operation is Operation.DETOKENIZE and "text" in answer:
                return {"prompt": answer["text"]}
        return answer

    def read_models(self, body: bytes) -> tuple[ModelCard, ...]:
        """The loaded model; or a list, of servers that stand in for TabbyAPI."""
        entry = orjson.loads(body)
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            return (self.card(entry),)
        return super().read_models(body)

    def card(self, entry: JSON) -> ModelCard:
        parameters = cards.mapping(entry.get("parameters"))
        sees = ("vision",) if parameters.get("use_vision") is True else ()
        return ModelCard(entry["id"], positive(parameters.get("max_seq_len")), entry, capabilities=sees)

    def stream_fixer(self, operation: Operation) -> ChunkFixer | None:
        return _Fixer(chat=operation is Operation.CHAT) if operation.generates else None


class _Fixer:
    """A role at the start of each choice, an index for each tool call, and usage in an event of its own."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._begun: set[int] = set()
        self._tools = ToolIndexes()

    def fix(self, chunk: JSON) -> Sequence[JSON]:
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not choices:
            return (chunk,)
        if self._chat:
            for choice in choices:
                self._fix_choice(choice)
        usage = chunk.pop("usage", None)
        if usage is None:
            return (chunk,)
        head = {name: value for name, value in chunk.items() if name != "choices"}
        return chunk, {**head, "choices": [], "usage": usage}

    def _fix_choice(self, choice: object) -> None:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(delta, dict):
            return
        index = choice_index(choice)
        if index not in self._begun:
            self._begun.add(index)
            choice["delta"] = {"role": "assistant", **delta}
        if delta.get("tool_calls"):
            self._tools.fix(index, delta["tool_calls"])


def _complete(tool: Any) -> Any:
    """It answers 422 to a function without description or parameters, which OpenAI's form leaves open."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    full = {"description": "", "parameters": _PARAMETERS} | {k: v for k, v in function.items() if v is not None}
    return tool if full == function else {**tool, "function": full}


BACKEND = TabbyApi()
