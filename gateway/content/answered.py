"""What was answered, out of the bytes the client got: a document, events, or text. Streams are put together again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from gateway.content.asked import JSON, message
from gateway.content.shown import Shown

_MOST_CHOICES, _MOST_CALLS = 128, 1024
_BY_SIZE = ("embeddings", "rerank", "tokenize")  # numbers


def answered(operation: str, kind: str, body: bytes, size: int, shown: Shown) -> JSON:
    """`kind`: media type. `size`: bytes of the whole answer, of which `body` may be a part or nothing."""
    if kind == "text/event-stream":
        return _streamed(body, shown)
    if operation in _BY_SIZE or kind.startswith("audio/") or kind == "application/octet-stream":
        return {"media": kind, "bytes": size}
    if kind == "application/json":
        document = _parsed(body)
        return _document(document, shown) if isinstance(document, dict) else {}
    return {"text": shown.text(body.decode(errors="replace"))}


def _document(given: JSON, shown: Shown) -> JSON:
    if isinstance(choices := given.get("choices"), list):
        return {"choices": [_choice(choice, shown) for choice in shown.entries(choices)]}
    found = {name: shown.text(given[name]) for name in ("text", "prompt") if isinstance(given.get(name), str)}
    return found or {"bytes": len(orjson.dumps(given))}


def _choice(given: object, shown: Shown) -> JSON:
    if not isinstance(given, dict):
        return {}
    found: JSON = {"index": given["index"]} if isinstance(given.get("index"), int) else {}
    if isinstance(given.get("text"), str):
        found["text"] = shown.text(given["text"])
    found |= message(given.get("message"), shown)
    found.pop("role", None)
    if isinstance(given.get("finish_reason"), str):
        found["finish_reason"] = shown.word(given["finish_reason"])
    return found


# --- streams
class _Choice:
    """One choice of a stream, piece by piece."""

    def __init__(self) -> None:
        self.pieces: dict[str, list[str]] = {}
        self.calls: dict[int, dict[str, list[str]]] = {}
        self.finish: str | None = None

    def add(self, choice: JSON) -> None:
        self._take("text", choice.get("text"))
        if isinstance(choice.get("finish_reason"), str):
            self.finish = choice["finish_reason"]
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return
        self._take("content", delta.get("content"))
        self._take("reasoning", delta.get("reasoning") or delta.get("reasoning_content"))
        self._take("refusal", delta.get("refusal"))
        old = delta.get("function_call")
        calls = delta.get("tool_calls")
        for call in [*(calls if isinstance(calls, list) else ()), *([{"function": old}] if old else ())]:
            if isinstance(call, dict) and isinstance(call.get("function"), dict):
                self._call(call.get("index"), call["function"])

    def whole(self, index: int) -> JSON:
        """As a choice of an answer that was not streamed."""
        found: JSON = {name: "".join(pieces) for name, pieces in self.pieces.items()}
        calls = [{"function": {key: "".join(parts) for key, parts in call.items()}} for call in self.calls.values()]
        text = {"text": found.pop("text")} if "text" in found else {}
        return {"index": index, **text, "message": found | {"tool_calls": calls}, "finish_reason": self.finish}

    def _take(self, name: str, piece: object) -> None:
        if isinstance(piece, str) and piece:
            self.pieces.setdefault(name, []).append(piece)

    def _call(self, index: object, function: JSON) -> None:
        place = index if isinstance(index, int) else 0
        if place in self.calls or len(self.calls) < _MOST_CALLS:
            call = self.calls.setdefault(place, {})
            for name in ("name", "arguments"):
                if isinstance(function.get(name), str):
                    call.setdefault(name, []).append(function[name])


def _streamed(body: bytes, shown: Shown) -> JSON:
    choices: dict[int, _Choice] = {}
    text: list[str] = []  # of transcriptions
    for event in _events(body):
        given = event.get("choices")
        for choice in given if isinstance(given, list) else ():
            if isinstance(choice, dict):
                index = choice["index"] if isinstance(choice.get("index"), int) else 0
                if index in choices or len(choices) < _MOST_CHOICES:
                    choices.setdefault(index, _Choice()).add(choice)
        if isinstance(event.get("type"), str) and event["type"].endswith("text.delta"):
            text.append(event["delta"] if isinstance(event.get("delta"), str) else "")
    if text:
        return {"text": shown.text("".join(text))}
    whole = [choices[index].whole(index) for index in sorted(choices)]
    return {"choices": [_choice(choice, shown) for choice in shown.entries(whole)]}


def _events(body: bytes) -> Iterator[JSON]:
    """What was kept may stop in the middle of an event."""
    for line in body.split(b"\n"):
        if line.startswith(b"data:"):
            event = _parsed(line[5:])
            if isinstance(event, dict):
                yield event


def _parsed(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
