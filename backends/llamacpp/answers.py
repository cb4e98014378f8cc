"""OpenAI response bodies, whole and streamed. Pure."""

from __future__ import annotations

import base64
import secrets
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Piece:
    """News of one choice: text that became safe to send, possibly empty; `finish` on its last piece only."""

    index: int
    text: str
    tokens: int  # generated so far for this choice
    finish: str | None = None


@dataclass(slots=True)
class Choice:
    """One choice while it grows."""

    text: list[str] = field(default_factory=list)
    tokens: int = 0
    finish: str | None = None


class Answer:
    """One id and one `created` for everything that is said about a request."""

    def __init__(
        self, *, chat: bool, model: str, choices: int, prompt_tokens: int, include_usage: bool = False
    ) -> None:
        self._chat = chat
        self._model = model
        self._id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self._created = int(time.time())
        self._prompt_tokens = prompt_tokens
        self._choices = [Choice() for _ in range(choices)]
        self._include_usage = include_usage

    def add(self, piece: Piece) -> None:
        """Take a piece into the whole answer."""
        choice = self._choices[piece.index]
        choice.text.append(piece.text)
        choice.tokens, choice.finish = piece.tokens, piece.finish

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason."""
        return all(choice.finish for choice in self._choices)

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""
        kind = "chat.completion" if self._chat else "text_completion"
        return orjson.dumps(
            {
                **self._head(kind),
                "choices": [self._whole_choice(i) for i in range(len(self._choices))],
                "usage": self.usage(),
            }
        )

    def events(self, piece: Piece) -> bytes:
        """The events of one piece: the role once, text if there is any, the finish reason once. Calls `add`."""
        first = not self._choices[piece.index].tokens
        self.add(piece)
        events = []
        if first and self._chat:
            events.append(self._event(piece.index, {"role": "assistant", "content": ""}, None))
        if piece.text:
            events.append(self._event(piece.index, {"content": piece.text}, None))
        if piece.finish:
            events.append(self._event(piece.index, {}, piece.finish))
        return b"".join(events)

    def end(self) -> bytes:
        """Usage, when it was asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return sse({**self._head(kind), "choices": [], "usage": self.usage()}) + DONE

    def usage(self) -> dict[str, Any]:
        """Tokens; no prompt is ever reused, so none is cached."""
        completion = sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _whole_choice(self, index: int) -> dict[str, Any]:
        choice, text = self._choices[index], "".join(self._choices[index].text)
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}
        return {"index": index, **said, "logprobs": None, "finish_reason": choice.finish}

    def _event(self, index: int, delta: dict[str, str], finish: str | None) -> bytes:
        said: dict[str, Any] = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        chunk = {
            **self._head(kind),
            "choices": [{"index": index, **said, "logprobs": None, "finish_reason": finish}],
        }
        if self._include_usage:
            chunk["usage"] = None
        return sse(chunk)


def sse(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def embeddings_body(vectors: Sequence[Sequence[float]], model: str, tokens: int, *, as_base64: bool) -> bytes:
    """vectors: one per input, in order. as_base64: little-endian float32, as OpenAI's clients expect."""
    data = [
        {"object": "embedding", "index": i, "embedding": _base64(vector) if as_base64 else list(vector)}
        for i, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return orjson.dumps({"object": "list", "data": data, "model": model, "usage": usage})


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
