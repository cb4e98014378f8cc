"""Logs: events through structlog, and one access line a request, formatted in batches off the hot path.

Nothing here is given a body, a key or a header. A key's *id* and the request id are what a line can be traced by.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import orjson
import structlog

from gateway.errors import AuthError
from gateway.outcome import Outcome

_MOST_WAITING = 50_000  # outcomes kept while the log cannot be written; beyond it lines are dropped and counted
_MOST_BYTES = 64 * 1024 * 1024  # of other lines kept meanwhile


def setup(level: str, style: str, stream: IO[str] | None = None) -> None:
    """Configures structlog and the standard library's loggers to write `style` (json or text) to `stream` or stderr."""
    output = stream or sys.stderr
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: Any = (
        structlog.processors.JSONRenderer(serializer=lambda event, **_: orjson.dumps(event, default=str).decode())
        if style == "json"
        else structlog.dev.ConsoleRenderer(colors=output.isatty())
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                renderer,
            ],
            foreign_pre_chain=shared,
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "asyncio", "uvicorn", "alembic", "aiosqlite"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


class AccessLog:
    """One line a request. A thread of its own writes them, so that a stuck log stalls no request.

    Lines are put together where `add` is called: in a thread beside the event loop the two would fight for the
    interpreter.
    """

    def __init__(self, style: str, stream: IO[bytes], lock: Path | None = None) -> None:
        """`lock`: a file that several processes lock in turn, so that lines they write to one stream stay whole."""
        self._lock = lock.open("wb") if lock is not None else None
        self._render = _json_line if style == "json" else _text_line
        self._stream = stream
        self._queue: SimpleQueue[tuple[int, bytes, bool] | None] = SimpleQueue()  # lines, their text, whether ours
        self._taken = self._written = 0  # lines; each is changed by one thread only
        self._waiting = 0  # bytes of other lines, changed under `_counting`
        self._counting = threading.Lock()
        self.dropped = 0
        # Steady clock to wall clock, once: an outcome knows only the former.
        self._offset = time.time() - time.monotonic()
        self._thread = threading.Thread(target=self._write, name="access-log", daemon=True)
        self._thread.start()

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Lines for finished requests; dropped and counted when too many wait to be written."""
        if not outcomes:
            return
        if self._taken - self._written > _MOST_WAITING:
            self.dropped += len(outcomes)
            return
        self._taken += len(outcomes)
        offset = self._offset
        self._queue.put((len(outcomes), b"".join([self._render(outcome, offset) for outcome in outcomes]), True))

    def write(self, data: bytes, lines: int) -> bool:
        """Whole lines of somebody else's, from any thread, between those of requests. False when too much waits to be
        written: they are dropped and counted."""
        with self._counting:
            if self._waiting + len(data) > _MOST_BYTES:
                self.dropped += lines
                return False
            self._waiting += len(data)
        self._queue.put((lines, data, False))
        return True

    def close(self) -> None:
        """Writes what is left, for at most two seconds."""
        self._queue.put(None)
        self._thread.join(2)

    def _write(self) -> None:
        while (batch := self._queue.get()) is not None:
            lines, data, own = batch
            try:
                with _locked(self._lock):
                    self._stream.write(data)
                    self._stream.flush()
            except (OSError, ValueError):
                self.dropped += lines
            if own:
                self._written += lines
            else:
                with self._counting:
                    self._waiting -= len(data)


@contextlib.contextmanager
def _locked(file: IO[bytes] | None) -> Iterator[None]:
    """A process that dies lets go of its lock."""
    if file is None:
        yield
        return
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def fields(outcome: Outcome, offset: float) -> dict[str, Any]:
    """What an access line says. Times in milliseconds."""
    usage, error, principal = outcome.usage, outcome.error, outcome.principal
    line: dict[str, Any] = {
        "time": round(outcome.ended + offset, 3),
        "event": "request",
        "request_id": outcome.request_id,
        "operation": outcome.operation,
        "status": outcome.status,
        "tenant": outcome.tenant_name,
        "key": principal.key if principal else None,
        "model": outcome.model_name,
        "asked": outcome.asked if outcome.model and outcome.asked != outcome.model.name else None,
        "replica": outcome.replica.id if outcome.replica else None,
        "stream": outcome.stream,
        "attempts": outcome.attempts,
        "duration_ms": round((outcome.ended - outcome.started) * 1000, 2),
    }
    if outcome.first_token:
        line["ttft_ms"] = round((outcome.first_token - outcome.started) * 1000, 2)
    if usage is not None:
        line |= {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion, "usage": usage.source}
        if usage.cached:
            line["cached_tokens"] = usage.cached
        if usage.reasoning:
            line["reasoning_tokens"] = usage.reasoning
    if outcome.tools_stripped:
        line["tools_stripped"] = outcome.tools_stripped
    if outcome.trace is not None:
        line["trace_id"] = outcome.trace.trace_id
    if error is not None:
        line["error"] = error.code or error.type
        if isinstance(error, AuthError) and error.reason:
            line["reason"] = error.reason.encode(errors="replace").decode()  # it may repeat what a stranger wrote
    return line


_labels: dict[tuple[int, int, int], tuple[Outcome, str]] = {}  # the part of a line that its key and replica decide
_MOST_LABELS = 4096


def _json_line(outcome: Outcome, offset: float) -> bytes:
    """The line of `fields` as JSON, put together by hand: it is made for every request, and a dictionary and a
    serialiser take four times as long."""
    usage, error = outcome.usage, outcome.error
    line = (
        f'{{"time":{outcome.ended + offset:.3f},"event":"request","request_id":"{outcome.request_id}"'
        f',"operation":"{outcome.operation}","status":{outcome.status},{_label(outcome)}'
        f',"stream":{"true" if outcome.stream else "false"},"attempts":{outcome.attempts}'
        f',"duration_ms":{(outcome.ended - outcome.started) * 1000:.2f}'
    )
    if outcome.model is not None and outcome.asked != outcome.model.name:
        line += f',"asked":{_quoted(outcome.asked)}'
    if outcome.first_token:
        line += f',"ttft_ms":{(outcome.first_token - outcome.started) * 1000:.2f}'
    if usage is not None:
        line += f',"prompt_tokens":{usage.prompt},"completion_tokens":{usage.completion},"usage":"{usage.source}"'
        if usage.cached:
            line += f',"cached_tokens":{usage.cached}'
        if usage.reasoning:
            line += f',"reasoning_tokens":{usage.reasoning}'
    if outcome.tools_stripped:
        line += f',"tools_stripped":{outcome.tools_stripped}'
    if outcome.trace is not None:
        line += f',"trace_id":"{outcome.trace.trace_id}"'
    if error is not None:
        line += f',"error":"{error.code or error.type}"'
        if isinstance(error, AuthError) and error.reason:
            line += f',"reason":{_quoted(fields(outcome, offset)["reason"])}'
    return (line + "}\n").encode()


def _label(outcome: Outcome) -> str:
    key = id(outcome.principal), id(outcome.model), id(outcome.replica)
    found = _labels.get(key)
    # An id may be used again once its object is gone: the entry keeps an outcome, and with it the objects, alive.
    if found is not None:
        return found[1]
    line = fields(outcome, 0.0)
    text = ",".join(f'"{name}":{_quoted(line[name])}' for name in ("tenant", "key", "model", "replica"))
    if len(_labels) >= _MOST_LABELS:
        _labels.clear()
    _labels[key] = outcome, text
    return text


def _quoted(value: object) -> str:
    return orjson.dumps(value).decode()


def _text_line(outcome: Outcome, offset: float) -> bytes:
    line = fields(outcome, offset)
    clock = time.strftime("%H:%M:%S", time.localtime(line.pop("time")))
    line.pop("event")
    if "reason" in line:
        line["reason"] = _quoted(line["reason"])  # a sentence
    words = " ".join(f"{name}={value}" for name, value in line.items() if value is not None)
    return f"{clock} {words}\n".encode()
