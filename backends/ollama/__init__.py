"""Ollama, over its own API.

Its OpenAI routes cannot set the context window, cut a prompt that is too long without a word, do not read
`max_completion_tokens`, and lose the text of errors in streams. The native routes do none of that: requests are
translated to them and answers back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backends import cards
from backends.base import (
    ALL,
    AUDIO_PATHS,
    CHAT_AND_TEXT,
    CONSTRAINTS,
    JSON,
    Capability,
    ChunkFixer,
    ModelCard,
    ModelFormat,
    OpenAICompatible,
    Operation,
    Probes,
    Unsupported,
    positive,
)
from backends.ollama import answers, asking
from backends.shaping import json_object

# Its own fields that replace what the operator has set up, and other engines' constraints, which would be ignored.
REFUSED = frozenset({"template", "raw", "system", "context", "adapters"}) | CONSTRAINTS


@dataclass(frozen=True)
class Ollama(OpenAICompatible):
    """The replica's `context_length` becomes `num_ctx`; a prompt that does not fit it is an error, never cut."""

    kind: str = "ollama"
    formats: frozenset[ModelFormat] = frozenset({ModelFormat.GGUF})
    paths: Mapping[Operation, str] = field(
        default_factory=lambda: {
            Operation.CHAT: "/api/chat",
            Operation.COMPLETIONS: "/api/generate",
            Operation.EMBEDDINGS: "/api/embed",
            Operation.TRANSCRIPTIONS: AUDIO_PATHS[Operation.TRANSCRIPTIONS],
        }
    )
    probes: Probes = Probes(health="/api/version", models="/api/tags")
    capabilities: frozenset[Capability] = ALL - {
        Capability.N, Capability.TOOL_CHOICE, Capability.LOGIT_BIAS, Capability.ECHO, Capability.TOKEN_PROMPTS,
        Capability.RERANK, Capability.TOKENISE, Capability.CHAT_TOKENISE,
    }  # fmt: skip
    tells: frozenset[Capability] = frozenset({Capability.TOOLS, Capability.VISION})
    refused: frozenset[str] = REFUSED
    fixes: frozenset[Operation] = CHAT_AND_TEXT | {Operation.EMBEDDINGS}
    translates: bool = True
    stream_type: bytes = b"application/x-ndjson"
    cuts_prompts: bool = True  # versions before `truncate` still do

    def refuse(self, operation: Operation, body: JSON) -> Unsupported | None:
        if operation.takes_form:  # goes to its OpenAI route as it is
            return None
        return super().refuse(operation, body) or asking.refuse(operation, body)

    def translate(self, operation: Operation, body: JSON, context_length: int | None) -> JSON:
        return body if operation.takes_form else asking.translate(operation, body, context_length)

    def fix_answer(self, operation: Operation, answer: Any, body: JSON) -> Any:
        if not isinstance(answer, dict):
            return answer
        if operation is Operation.EMBEDDINGS:
            return answers.embeddings(answer)
        return answers.whole(operation, answer)

    def stream_fixer(self, operation: Operation) -> ChunkFixer | None:
        return answers.Stream(operation)

    def read_models(self, body: bytes) -> tuple[ModelCard, ...]:
        """`/api/tags`; or OpenAI's list, of servers that stand in for Ollama.

        Models that it would forward to its maker's computers are left out.
        """
        entries = json_object(body).get("models")
        if not isinstance(entries, list):
            return super().read_models(body)
        return tuple(
            _card(entry)
            for entry in entries
            if isinstance(entry, dict) and isinstance(entry.get("name"), str) and not entry.get("remote_host")
        )


def _card(entry: JSON) -> ModelCard:
    details = cards.mapping(entry.get("details"))
    return ModelCard(
        entry["name"],
        positive(details.get("context_length")),
        entry,
        cards.word(details.get("format")),
        cards.quantisation(details.get("quantization_level")),
        cards.capabilities(entry.get("capabilities")),
    )


BACKEND = Ollama()
