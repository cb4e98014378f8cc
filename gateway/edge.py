"""The client's side of the wire: uvicorn's httptools protocol, with our own cycle on the hot routes.

uvicorn stays the server: it accepts, terminates TLS, pipelines and stops gracefully. On the few routes that carry
inference its request cycle is replaced by `HotCycle`, which runs `serve` in one task and writes to the transport
itself, without ASGI's messages; every other route goes on to FastAPI. `serve` sees only the methods of `HotCycle`, so
the edge can change without it. Relies on the attributes of uvicorn 0.54's `HttpToolsProtocol`, pinned and tested in
tests/unit/test_edge.py.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable, Coroutine
from itertools import count
from secrets import token_hex
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from backends.base import Operation
from gateway import errors
from gateway.errors import BadRequest, BodyTooLarge, GatewayError, RequestTimeout

HOT_ROUTES = {
    b"/v1/chat/completions": Operation.CHAT,
    b"/v1/completions": Operation.COMPLETIONS,
    b"/v1/embeddings": Operation.EMBEDDINGS,
}
LINGER = 2.0  # seconds a refused body is still read and thrown away, so that the client gets to see the answer
STUCK_READER = 120.0  # seconds a client may take nothing while there is something to take
COMMENT = b": keep-alive\n\n"

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in http.HTTPStatus
}
_STATUS_LINES[499] = b"HTTP/1.1 499 Client Closed Request\r\n"
_STREAM_HEAD = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
_ID_CHARACTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")
_ids = count(1)
_id_prefix = "req_" + token_hex(8)

Serve = Callable[["HotCycle"], Coroutine[Any, Any, None]]


class EdgeSettings:
    """What the protocol needs of the configuration; a reload replaces all of it. Sizes in bytes, times in seconds."""

    __slots__ = (
        "body_timeout",
        "header_timeout",
        "idle_timeout",
        "keepalive_interval",
        "max_body",
        "max_connections",
        "max_header",
    )

    def __init__(
        self, *, max_body: int, max_header: int, max_connections: int,
        header_timeout: float, body_timeout: float, idle_timeout: float, keepalive_interval: float,
    ) -> None:  # fmt: skip
        self.max_body, self.max_header, self.max_connections = max_body, max_header, max_connections
        self.header_timeout, self.body_timeout, self.idle_timeout = header_timeout, body_timeout, idle_timeout
        self.keepalive_interval = keepalive_interval


class Edge:
    """What all connections of the process share."""

    def __init__(self, serve: Serve, settings: EdgeSettings) -> None:
        self.serve = serve
        self.settings = settings
        self.connections: set[EdgeProtocol] = set()
        self.draining = False

    def protocol(self, *args: Any, **kwargs: Any) -> EdgeProtocol:
        """What uvicorn calls for every accepted connection."""
        return EdgeProtocol(self, *args, **kwargs)

    @property
    def running(self) -> int:
        """Hot requests whose answer is not complete."""
        return sum(1 for connection in self.connections if connection.is_busy())

    def cancel_all(self) -> None:
        """Ends what still runs; `serve` turns the cancellation into an error the client can read."""
        for connection in list(self.connections):
            connection.cancel()

    def sweep(self, now: float) -> None:
        """Called a few times a second: time limits of clients, and comments for those who wait on a stream."""
        for connection in list(self.connections):
            connection.look_after(now)


class HotCycle:
    """One request on a hot route and its answer.

    `body`, `more_body`, `disconnected`, `response_complete`, `keep_alive` and `message_event` are what uvicorn's
    protocol expects of a cycle; the methods are what `serve` uses.
    """

    __slots__ = (
        "_body_waiter", "_chunked", "_protocol", "body", "body_deadline", "disconnected", "extra_headers", "headers",
        "keep_alive", "keepalives", "last_write", "message_event", "more_body", "on_paused", "on_resumed", "operation",
        "refused", "request_id", "response_complete", "started", "task", "waiting_for_100",
    )  # fmt: skip

    def __init__(
        self, protocol: EdgeProtocol, operation: Operation, headers: list[tuple[bytes, bytes]], keep_alive: bool
    ) -> None:
        self._protocol = protocol
        self.operation, self.headers, self.keep_alive = operation, headers, keep_alive
        self.body = bytearray()
        self.more_body = True
        self.disconnected = False
        self.response_complete = False
        self.message_event = self  # uvicorn calls message_event.set() when the state of the connection has changed
        self.started = False  # the head of the answer is on its way
        self.task: asyncio.Task[None] | None = None
        self.waiting_for_100 = protocol.expect_100_continue
        self.refused: GatewayError | None = None  # the body broke a limit
        self.body_deadline = 0.0
        self.last_write = protocol.loop.time()
        self.keepalives = False
        self.extra_headers = b""  # header lines for the answer, gathered by `serve`
        self.on_paused: Callable[[], None] | None = None
        self.on_resumed: Callable[[], None] | None = None
        self._body_waiter: asyncio.Future[None] | None = None
        self._chunked = protocol.parser.get_http_version() == "1.1"
        self.request_id = _request_id(headers)

    # --- uvicorn's side
    def set(self) -> None:
        """`message_event.set()`: more body, the end of it, or the end of the connection."""
        waiter = self._body_waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if self.disconnected and self.task is not None and not self.response_complete:
            self.task.cancel()

    # --- Inbound
    async def read_body(self) -> bytes:
        """The whole body.

        Raises: BodyTooLarge, RequestTimeout, as soon as it is known, without reading on.
        """
        if self.waiting_for_100:
            self._protocol.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100 = False
        while self.more_body and self.refused is None:
            if not self.body_deadline:
                self.body_deadline = self._protocol.loop.time() + self._protocol.edge.settings.body_timeout
            self._body_waiter = self._protocol.loop.create_future()
            await self._body_waiter
        if self.refused is not None:
            raise self.refused
        body, self.body = bytes(self.body), bytearray()
        return body

    def header(self, wanted: bytes) -> bytes | None:
        for name, value in self.headers:
            if name == wanted:
                return value
        return None

    # --- Responder
    def attach(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Lets a slow client slow down its source."""
        self.on_paused, self.on_resumed = pause, resume
        if self._protocol.is_paused():
            pause()

    def begin(self) -> None:
        """Sends the head of a stream."""
        self._write(self._stream_head())

    def received(self, data: bytes) -> None:
        """Sends a piece of a stream, with its head in front if that is still due."""
        head = b"" if self.started else self._stream_head()
        self._write(head + (b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data))

    def end(self, data: bytes = b"") -> None:
        """Sends the last piece of a stream."""
        out = b"" if self.started else self._stream_head()
        if data:
            out += b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
        if self._chunked:
            out += b"0\r\n\r\n"
        self._write(out)
        self._finish()

    def comment(self) -> None:
        """A comment that keeps intermediaries and clients from taking a long prefill for a dead connection."""
        self.received(COMMENT)

    def answer(self, status: int, body: bytes, headers: bytes = b"") -> None:
        """Sends a whole answer: JSON."""
        self.started = True
        self._write(
            b"%b%b%b%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (_STATUS_LINES[status], self._common_head(), self.extra_headers, headers, len(body), body)
        )
        self._finish()

    def fail(self, error: GatewayError) -> None:
        """Sends an error: as JSON with its status while nothing was sent, else as the last event of the stream."""
        if self.response_complete or self.disconnected:
            return
        if self.started:
            self.end(errors.event(error))
            return
        if self.more_body:
            self.keep_alive = False  # whatever of the body is still to come is not worth reading
        lines = b"".join(b"%b: %b\r\n" % line for line in errors.headers(error))
        self.answer(error.status, errors.body(error), lines)

    def _stream_head(self) -> bytes:
        self.started = True
        if not self._chunked:
            self.keep_alive = False
        framing = b"transfer-encoding: chunked\r\n" if self._chunked else b""
        return b"%b%b%b%b%b\r\n" % (_STATUS_LINES[200], self._common_head(), self.extra_headers, _STREAM_HEAD, framing)

    def _common_head(self) -> bytes:
        connection = b"" if self.keep_alive else b"connection: close\r\n"
        return b"x-request-id: %b\r\n%b%b" % (self.request_id.encode(), connection, self._protocol.date_header())

    def _write(self, data: bytes) -> None:
        if not self.disconnected:
            self._protocol.transport.write(data)
            self.last_write = self._protocol.loop.time()

    def _finish(self) -> None:
        self.response_complete = True
        self.keepalives = False
        self._protocol.finished(self)


class EdgeProtocol(HttpToolsProtocol):
    """One client connection."""

    cycle: Any  # uvicorn's or ours: whichever request was read last

    def __init__(self, edge: Edge, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.edge = edge
        self._header_size = 0
        self._started_at = 0.0  # the head of a request has begun to arrive
        self._idle_since = self.loop.time()
        self._close_at = 0.0  # a refused body is read and dropped until then
        self._paused_since = 0.0  # the client takes nothing
        self._active: HotCycle | None = None  # being answered; `cycle` is the one being read, later when pipelined

    # --- the connection
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.edge.connections.add(self)
        if len(self.edge.connections) > self.edge.settings.max_connections:
            self._refuse(GatewayError("Too many connections.", status=503, code="too_many_connections", retry_after=1))

    def connection_lost(self, exc: Exception | None) -> None:
        self.edge.connections.discard(self)
        active = self._active
        super().connection_lost(exc)
        if active is not None and not active.response_complete:
            active.disconnected = True
            active.set()

    def data_received(self, data: bytes) -> None:
        if self._is_ending():
            return
        if not self._started_at and not self.is_busy():
            self._started_at = self.loop.time()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse(BadRequest("The request is not valid HTTP.", code="invalid_http"))
        except httptools.HttpParserUpgrade:
            self._refuse(BadRequest("This server does not offer protocol upgrades.", code="invalid_http"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused_since = self.loop.time()
        if self._active is not None and self._active.on_paused is not None:
            self._active.on_paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._paused_since = 0.0
        if self._active is not None and self._active.on_resumed is not None:
            self._active.on_resumed()

    # --- the parser
    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._header_size = 0

    def on_url(self, url: bytes) -> None:
        self.url += url
        self._header_size += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._header_size += len(name) + len(value)
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._started_at = 0.0
        if self._header_size > self.edge.settings.max_header:
            self._refuse(BadRequest("The request's headers are too large.", status=431, code="headers_too_large"))
            return
        operation = HOT_ROUTES.get(self.url) or HOT_ROUTES.get(_path(self.url))
        if operation is None or self.parser.get_method() != b"POST" or self.parser.should_upgrade():
            self._leave_to_asgi()
            return
        keep_alive = self.parser.should_keep_alive() and not self.edge.draining
        cycle = HotCycle(self, operation, self.headers, keep_alive)
        self._limit_body(cycle)
        before, self.cycle = self.cycle, cycle
        if before is None or before.response_complete:
            self._start(cycle)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))  # type: ignore[arg-type]

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if self._is_ending():
            return
        if not isinstance(cycle, HotCycle):
            super().on_body(body)
        elif not cycle.response_complete and cycle.refused is None:
            cycle.body += body
            if len(cycle.body) > self.edge.settings.max_body:
                self._refuse_body(cycle)

    def on_message_complete(self) -> None:
        cycle = self.cycle
        if self._is_ending():
            return
        if not isinstance(cycle, HotCycle):
            super().on_message_complete()
        else:
            cycle.more_body = False
            cycle.set()

    def _leave_to_asgi(self) -> None:
        """uvicorn's own handling, on what has been parsed so far."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        self.headers += headers  # the list its scope points to
        try:
            super().on_headers_complete()
        except (httptools.HttpParserError, UnicodeDecodeError):
            self._refuse(BadRequest("The request's target is not valid.", code="invalid_http"))

    def _limit_body(self, cycle: HotCycle) -> None:
        length = cycle.header(b"content-length")
        if length is not None and int(length) > self.edge.settings.max_body:
            self._refuse_body(cycle)

    def _refuse_body(self, cycle: HotCycle) -> None:
        cycle.refused = BodyTooLarge(
            f"The body is larger than the {self.edge.settings.max_body} bytes this gateway accepts."
        )
        cycle.body.clear()
        cycle.set()

    # --- the end of an answer
    def finished(self, cycle: HotCycle) -> None:
        """A hot cycle has sent its last byte."""
        self.server_state.total_requests += 1
        cycle.on_paused = cycle.on_resumed = None
        if self.transport.is_closing():
            return
        if not cycle.keep_alive:
            self._close_gently(cycle.more_body)
            return
        self._idle_since = self.loop.time()
        self.flow.resume_reading()
        self._next()

    def on_response_complete(self) -> None:
        """uvicorn's own cycle has sent its last byte."""
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self._idle_since = self.loop.time()
            self.flow.resume_reading()
            self._next()

    def _next(self) -> None:
        """Starts the next request of the pipeline. (`look_after` closes idle connections, all with one timer.)"""
        if self.pipeline:
            self._start(self.pipeline.pop()[0])

    def _start(self, cycle: Any) -> None:
        if not isinstance(cycle, HotCycle):
            self._active = None
            self._start_asgi_task(cycle, self.app)
            return
        self._active = cycle
        cycle.task = task = self.loop.create_task(self.edge.serve(cycle))
        self.tasks.add(task)  # uvicorn waits for these when it stops
        task.add_done_callback(self.tasks.discard)

    def _close_gently(self, body_is_coming: bool) -> None:
        """Closes after the answer. While the client still sends, an immediate close would reset the connection and take
        the answer with it."""
        if body_is_coming and self.transport.can_write_eof():
            self.transport.write_eof()
            self._close_at = self.loop.time() + LINGER
        else:
            self.transport.close()

    def _refuse(self, error: GatewayError) -> None:
        """Answers what never became a request and closes."""
        if self._is_ending():
            return
        if self.is_busy():
            self.transport.close()  # an answer is under way: nothing can be said in between
            return
        body = errors.body(error)
        head = b"".join(b"%b: %b\r\n" % line for line in errors.headers(error))
        self.transport.write(
            b"%b%bx-request-id: %b\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b"
            % (_STATUS_LINES[error.status], self.date_header(), new_request_id().encode(), head, len(body), body)
        )
        self._close_gently(True)

    # --- time
    def is_busy(self) -> bool:
        if self._active is not None and not self._active.response_complete:
            return True
        return self.cycle is not None and not self.cycle.response_complete

    def cancel(self) -> None:
        active = self._active
        if active is not None and active.task is not None and not active.response_complete:
            active.task.cancel()

    def is_paused(self) -> bool:
        return self._paused_since > 0.0

    def _is_ending(self) -> bool:
        return self._close_at > 0.0 or self.transport.is_closing()

    def date_header(self) -> bytes:
        return b"".join(b"%b: %b\r\n" % line for line in self.server_state.default_headers)

    def look_after(self, now: float) -> None:
        settings = self.edge.settings
        if self.transport.is_closing():
            return
        if self._close_at:
            if now > self._close_at:
                self.transport.abort()
            return
        if self._paused_since and now - self._paused_since > STUCK_READER:
            self.transport.abort()
            return
        if self._started_at and now - self._started_at > settings.header_timeout:
            self._refuse(RequestTimeout(f"The request's headers did not arrive within {settings.header_timeout:g} s."))
            return
        if not self.is_busy():
            if not self._started_at and now - self._idle_since > settings.idle_timeout:
                self.transport.close()
            return
        if self._active is not None:
            self._look_after_cycle(self._active, now)

    def _look_after_cycle(self, cycle: HotCycle, now: float) -> None:
        settings = self.edge.settings
        if cycle.more_body and cycle.body_deadline and now > cycle.body_deadline:
            cycle.refused = RequestTimeout(f"The body did not arrive within {settings.body_timeout:g} s.")
            cycle.set()
        elif cycle.keepalives and settings.keepalive_interval and now - cycle.last_write >= settings.keepalive_interval:
            cycle.comment()


def new_request_id() -> str:
    return f"{_id_prefix}{next(_ids):08x}"


def _request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """The client's own id when it is harmless, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and 0 < len(value) <= 128 and _ID_CHARACTERS.issuperset(value):
            return value.decode()
    return new_request_id()


def _path(url: bytes) -> bytes:
    """The path of a target with a query or in absolute form; b"" when there is none."""
    if b"?" not in url and url.startswith(b"/"):
        return url
    try:
        return httptools.parse_url(url).path or b""
    except httptools.HttpParserError:
        return b""
