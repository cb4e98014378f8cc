"""One request on a hot route and its answer: what `serve` reads from, and what it writes to.

Stands in the place of uvicorn's request cycle: `body`, `more_body`, `disconnected`, `response_complete`, `keep_alive`
and `message_event` are what uvicorn's protocol looks at.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable
from itertools import count
from secrets import token_hex
from typing import Protocol

from backends.base import Operation
from gateway import errors
from gateway.errors import GatewayError

COMMENT = b": keep-alive\n\n"
MOST_PIECES = 1024
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in http.HTTPStatus
}
STATUS_LINES[499] = b"HTTP/1.1 499 Client Closed Request\r\n"
_STREAM_HEAD = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
_ID_CHARACTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")
_ids = count(1)
_id_prefix = "req_" + token_hex(8)


class Connection(Protocol):
    """What a cycle needs of the connection it came on; `edge.EdgeProtocol` is one."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    peer: str | None
    certificate: tuple[str, ...]

    def date_header(self) -> bytes: ...
    def is_paused(self) -> bool: ...
    def finished(self, cycle: HotCycle) -> None: ...


class HotCycle:
    """One exchange. Defaults live on the class: an instance stores only what differs, most of what making it costs."""

    more_body = True
    disconnected = False
    response_complete = False
    started = False  # the head of the answer is on its way
    task: asyncio.Task[None] | None = None
    refused: GatewayError | None = None  # the body broke a limit
    extra_headers = b""  # header lines for the answer, gathered by `serve`
    route_headers = b""  # and those that say who gave it
    origin_headers = b""  # and those that let a page of another origin read it
    most_pieces = MOST_PIECES  # of the body before they are put together
    raw = False  # the body is the engine's own: nothing of ours can be said in it
    keepalives = False  # comments are sent while there is nothing else to send
    writes = 0
    on_paused: Callable[[], None] | None = None
    on_resumed: Callable[[], None] | None = None
    _waiter: asyncio.Future[None] | None = None

    def __init__(
        self, connection: Connection, operation: Operation, headers: dict[bytes, bytes], keep_alive: bool, chunked: bool
    ) -> None:
        self._connection = connection
        self._send = connection.transport.write
        self._chunked = chunked  # HTTP/1.1: the answer's length need not be known
        self.operation, self.headers, self.keep_alive = operation, headers, keep_alive  # header names in lower case
        self.body: list[bytes] = []
        self.request_id = _request_id(headers.get(b"x-request-id"))

    # --- the connection's side
    @property
    def message_event(self) -> HotCycle:
        """uvicorn calls `message_event.set()` when the state of the connection has changed."""
        return self

    def set(self) -> None:
        """More body, the end of it, or the end of the connection."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if self.disconnected and self.task is not None and not self.response_complete:
            self.task.cancel()

    # --- what `serve` reads
    @property
    def peer(self) -> str | None:
        """The address at the other end of the connection."""
        return self._connection.peer

    @property
    def certificate(self) -> tuple[str, ...]:
        """Names in the client certificate of the connection, as `certificates.names` has them."""
        return self._connection.certificate

    async def body_complete(self) -> None:
        """Waits for the end of the body.

        Raises: BodyTooLarge, RequestTimeout, as soon as it is known, without reading on.
        """
        if self.headers.get(b"expect", b"").lower() == b"100-continue" and self.more_body:
            self._send(CONTINUE)
        while self.more_body and self.refused is None:
            self._waiter = self._connection.loop.create_future()
            await self._waiter
        if self.refused is not None:
            raise self.refused

    def take_body(self) -> list[bytes]:
        """The pieces of the body once all of it is here."""
        pieces, self.body = self.body, []
        return pieces

    def fold_body(self) -> None:
        """Puts the last pieces together: a body in pieces of two bytes takes thirty times its size."""
        self.body[-MOST_PIECES:] = [b"".join(self.body[-MOST_PIECES:])]
        self.most_pieces = len(self.body) + MOST_PIECES

    # --- what `serve` writes
    def attach(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Lets a slow client slow down its source."""
        self.on_paused, self.on_resumed = pause, resume
        if self._connection.is_paused():
            pause()

    def detach(self) -> None:
        self.on_paused = self.on_resumed = None

    def begin(self) -> None:
        """Sends the head of a stream."""
        self._write(self._stream_head())

    def begin_raw(self, content_type: bytes, length: int | None, *, events: bool) -> None:
        """Sends the head of an answer that is passed on byte for byte. `length`: of its body, where it is known."""
        self.started, self.raw = True, not events
        if length is not None:
            self._chunked, framing = False, b"content-length: %d\r\n" % length
        elif self._chunked:
            framing = b"transfer-encoding: chunked\r\n"
        else:
            self.keep_alive, framing = False, b""
        self._write(
            b"%bx-request-id: %b\r\n%b%b%b%bcontent-type: %b\r\n%b\r\n"
            % (
                STATUS_LINES[200],
                self.request_id.encode(),
                self._connection.date_header() + self.origin_headers,
                b"" if self.keep_alive else b"connection: close\r\n",
                self.extra_headers + self.route_headers,
                b"cache-control: no-cache\r\nx-accel-buffering: no\r\n" if events else b"",
                content_type,
                framing,
            )
        )

    def received(self, data: bytes) -> None:
        """Sends a piece of a stream, with its head in front if that is still due."""
        if not self._chunked:
            out = data
        else:
            out = b"%x\r\n%b\r\n" % (len(data), data)
        self._write(out if self.started else self._stream_head() + out)

    def end(self, data: bytes = b"") -> None:
        """Sends the last piece of a stream."""
        out = b"" if self.started else self._stream_head()
        if data:
            out += b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
        self._write(out + b"0\r\n\r\n" if self._chunked else out)
        self._finish()

    def comment(self) -> None:
        """A comment that keeps intermediaries and clients from taking a long prefill for a dead connection."""
        self.received(COMMENT)

    def answer(
        self, status: int, body: bytes, headers: bytes = b"", content_type: bytes = b"application/json"
    ) -> None:
        """Sends a whole answer."""
        self.started = True
        self._write(
            b"%bx-request-id: %b\r\n%b%b%b%bcontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"
            % (
                STATUS_LINES[status],
                self.request_id.encode(),
                self._connection.date_header() + self.origin_headers,
                b"" if self.keep_alive else b"connection: close\r\n",
                self.extra_headers,
                headers + self.route_headers,
                content_type,
                len(body),
                body,
            )
        )
        self._finish()

    def fail(self, error: GatewayError) -> None:
        """Sends an error: as JSON with its status while nothing was sent, else as the last event of the stream."""
        if self.response_complete or self.disconnected:
            return
        if self.started:
            if self.raw:  # an answer that stops early is all that can be seen of the failure
                self.keep_alive = False
                self._connection.transport.abort()
                self._finish()
            else:
                self.end(errors.event(error))
            return
        if self.more_body:
            self.keep_alive = False  # whatever of the body is still to come is not worth reading
        self.answer(error.status, errors.body(error), errors.header_lines(error))

    def _stream_head(self) -> bytes:
        self.started = True
        if not self._chunked:
            self.keep_alive = False
        return b"%bx-request-id: %b\r\n%b%b%b%b%b\r\n" % (
            STATUS_LINES[200],
            self.request_id.encode(),
            self._connection.date_header() + self.origin_headers,
            b"" if self.keep_alive else b"connection: close\r\n",
            self.extra_headers + self.route_headers,
            _STREAM_HEAD,
            b"transfer-encoding: chunked\r\n" if self._chunked else b"",
        )

    def _write(self, data: bytes) -> None:
        if not self.disconnected:
            self._send(data)
            self.writes += 1

    def _finish(self) -> None:
        self.response_complete = True
        self._connection.finished(self)


def new_request_id() -> str:
    return f"{_id_prefix}{next(_ids):08x}"


def _request_id(given: bytes | None) -> str:
    """The client's own id when it is harmless, else a new one."""
    if given is not None and 0 < len(given) <= 128 and _ID_CHARACTERS.issuperset(given):
        return given.decode()
    return new_request_id()
