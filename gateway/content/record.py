"""One finished request to one line of the log. Pure; it runs in the child process."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any, Final

import orjson

from gateway.content.answered import answered
from gateway.content.asked import asked
from gateway.content.frames import Frame, Header
from gateway.content.shown import Shown

JSON = dict[str, Any]

_CONTROLS: Final = re.compile("[\x7f-\x9f\u2028\u2029]")  # what JSON lets pass, and terminals and line readers act on


def line(frame: Frame) -> tuple[bytes, bool]:
    """The line, and whether it holds the content. When that could not be read or masked, it says only so."""
    try:
        return _rendered(frame.header, _facts(frame.header) | _content(frame)), True
    except Exception as problem:
        return failure(frame.header, type(problem).__name__), False


def failure(header: Header, reason: str) -> bytes:
    return _rendered(header, _facts(header) | {"not_written": f"reading or masking it failed ({reason})"})


def _content(frame: Frame) -> JSON:
    header = frame.header
    counts: Counter[str] | None = Counter() if header.mode == "masked" else None
    question, answer = Shown(header.limit, counts), Shown(header.limit, counts)
    body = orjson.loads(frame.asked)
    found: JSON = {"asked": asked(body, question)}
    if header.asked_type != "application/json":
        found["asked"] |= {"file": {"media": header.asked_type, "bytes": header.asked_size}}
    found["answered"] = {}
    if header.status == 200 or header.aborted:  # else it was an error, whose code is in the record
        found["answered"] = answered(
            header.operation, header.answered_type, frame.answered, header.answered_size, answer
        )
    found["asked_left_out"], found["answered_left_out"] = question.left_out, answer.left_out
    unread = header.answered_size - header.answered_kept
    if unread and "bytes" not in found["answered"]:
        found["answered_unread"] = unread
    return found if counts is None else found | {"masked": dict(counts)}


def _facts(header: Header) -> JSON:
    found: JSON = {
        "time": round(header.time, 3),
        "event": "content",
        "request_id": header.request_id,
        "operation": header.operation,
        "status": header.status,
        "tenant": header.tenant,
        "key": header.key,
        "model": header.model,
        "stream": header.stream,
        "content": header.mode,
        "aborted": header.aborted,
    }
    return found | {"error": header.error} if header.error else found


def _rendered(header: Header, record: JSON) -> bytes:
    if header.style == "json":
        return _dumped(record) + b"\n"
    clock = time.strftime("%H:%M:%S", time.localtime(record.pop("time")))
    words = [f"{name}={_word(value)}" for name, value in record.items() if value is not None]
    return f"{clock} {' '.join(words)}\n".encode()


def _word(value: Any) -> str:
    return value if isinstance(value, str) and re.fullmatch(r"[\w.:/@-]+", value) else _dumped(value).decode()


def _dumped(value: Any) -> bytes:
    text = orjson.dumps(value).decode()
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()
