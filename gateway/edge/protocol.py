"""The client's side of the wire: uvicorn's httptools protocol, with our own cycle on the hot routes.

uvicorn stays the server: it accepts, pipelines and stops gracefully. On the few routes that carry
inference its request cycle is replaced by `HotCycle`, which runs `serve` in one task and writes to the transport
itself, without ASGI's messages; every other route goes on to FastAPI. `serve` sees only the methods of `HotCycle`, so
the edge can change without it. Relies on the attributes of uvicorn 0.54's `HttpToolsProtocol`: the version is pinned,
and tests/e2e/test_edge.py exercises what is relied on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from typing import Any, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway import certificates, errors
from gateway.edge.cors import Cors
from gateway.edge.crowd import Crowd
from gateway.edge.cycle import STATUS_LINES, HotCycle, new_request_id
from gateway.edge.routes import HOT_ROUTES, path_of
from gateway.edge.settings import EdgeSettings
from gateway.errors import BadRequest, BodyTooLarge, GatewayError, RequestTimeout

LINGER = 2.0  # seconds a refused body is still read and thrown away, so that the client gets to see the answer
MOST_PIPELINED = 32  # requests read ahead on one connection
MOST_HEADERS = 200  # names in one head
LEAST_OF_BODY = 4096  # bytes of a body that have to come within the time for its next part, or all of the rest
MOST_IGNORED = 256 * 1024  # bytes of a body that may still come after an answer that did not wait for it
MOST_TURNED_AWAY = 256  # connections at once that are told why they are refused; beyond it they are only closed
STUCK_READER = 120.0  # seconds a client may take nothing while there is something to take

Serve = Callable[[HotCycle], Coroutine[Any, Any, None]]


class Handshaking(Protocol):
    def abort(self) -> None: ...


class Edge:
    """What all connections of the process share."""

    def __init__(self, serve: Serve, settings: EdgeSettings) -> None:
        self.serve = serve
        self.settings = settings
        self.connections: set[EdgeProtocol] = set()
        self.crowd = Crowd()  # those of them that were admitted
        self.turned_away = 0  # and how many were not, and are told so
        self.handshakes: set[Handshaking] = set()  # connections that are not through with TLS yet
        self.draining = False
        self.date = _date_header()

    def protocol(self, *args: Any, **kwargs: Any) -> EdgeProtocol:
        """What uvicorn calls for every accepted connection."""
        return EdgeProtocol(self, *args, **kwargs)

    @property
    def running(self) -> int:
        """Connections whose answer is not complete."""
        return sum(1 for connection in self.connections if connection.is_busy())

    def cancel_all(self) -> None:
        """Ends what still runs; `serve` turns the cancellation into an error the client can read."""
        for handshake in list(self.handshakes):
            handshake.abort()
        for connection in list(self.connections):
            connection.cancel()

    def sweep(self, now: float) -> None:
        """Called a few times a second: time limits of clients, and comments for those who wait on a stream."""
        self.date = _date_header()
        for connection in list(self.connections):
            connection.look_after(now)


class EdgeProtocol(HttpToolsProtocol):
    """One client connection."""

    cycle: Any  # uvicorn's or ours: whichever request was read last

    def __init__(self, edge: Edge, *args: Any, **kwargs: Any) -> None:
        # The parser stores each header by this bound method, without a Python call of ours in between. Of headers that
        # come twice the last one counts; nothing that is read here or forwarded may come twice.
        self._head: dict[bytes, bytes] = {}
        self.on_header = self._head.__setitem__  # type: ignore[method-assign, assignment]
        self._joins = edge.settings.behind_proxies
        if self._joins:
            self.on_header = self._keep_header  # type: ignore[method-assign]
        super().__init__(*args, **kwargs)
        self.edge = edge
        self.peer: str | None = None
        self.certificate: tuple[str, ...] = ()
        self._place: str | None = None  # where the crowd has counted it
        self._turned_away = False
        self._read_size = 0  # bytes of the read that is being parsed
        self._body_size = 0  # bytes of the body that is being read
        self._body_seen = 0  # and what `look_after` found of it
        self._body_since = 0.0  # at this time
        self._framing_size = 0  # bytes of reads that brought nothing of a body that is due: extensions, trailers
        self._head_size = 0  # bytes of earlier reads that belong to an incomplete head
        self._head_since = 0.0  # a head has begun to arrive and is not complete
        self._idle_since = 0.0  # found idle by `look_after`
        self._deaf = False  # the connection is ending: whatever still arrives is dropped
        self._close_at = 0.0  # and this is when, at the latest
        self._paused_since = 0.0  # the client takes nothing
        self._silent_since = 0.0  # when `_writes` was seen to change last
        self._writes = 0
        self._active: HotCycle | None = None  # being answered; `cycle` is the one being read, later when pipelined

    # --- the connection
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.edge.connections.add(self)
        self.peer = self.client[0] if self.client else None
        if shown := transport.get_extra_info("peercert"):
            self.certificate = certificates.names(shown)
        if not self.admit(self.peer):
            self._turn_away()

    def admit(self, peer: str | None) -> bool:
        """Counts the connection in; False when there are too many. Whoever sees it before its TLS handshake may ask
        then already, and has to call `leave` if it never gets as far as `connection_made`."""
        if self._place is None:
            settings = self.edge.settings
            self._place = self.edge.crowd.enter(
                peer, settings.max_connections, settings.max_per_address, settings.trusted_proxies
            )
        return self._place is not None

    def leave(self) -> None:
        """Counts the connection out. May be called again."""
        if self._place is not None:
            self.edge.crowd.leave(self._place)
            self._place = None

    def _turn_away(self) -> None:
        if self.edge.turned_away >= MOST_TURNED_AWAY:
            self._deaf = True
            self.transport.abort()
            return
        self.edge.turned_away += 1
        self._turned_away = True
        self._refuse(GatewayError("Too many connections.", status=503, code="too_many_connections", retry_after=1))

    def connection_lost(self, exc: Exception | None) -> None:
        self.edge.connections.discard(self)
        self.edge.turned_away -= self._turned_away
        self.leave()
        self._deaf = True
        active = self._active
        super().connection_lost(exc)
        if active is not None and not active.response_complete:
            active.disconnected = True
            active.set()
        # The last request leads back here: with all of the connection's TLS it would wait for the cycle collector.
        self._active = self.cycle = None

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._read_size = len(data)
        body_size = self._body_size
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse(BadRequest("The request is not valid HTTP.", code="invalid_http"))
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        if self._head_since:
            self._head_size += self._read_size
            self._limit_head(self._head_size)
        elif body_size == self._body_size and self.cycle is not None and self.cycle.more_body:
            self._limit_framing()

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
        self._head.clear()
        self._body_size = self._body_seen = 0
        self._body_since = self._idle_since = 0.0
        self._head_since = self.loop.time()

    def on_url(self, url: bytes) -> None:
        self.url += url

    def _keep_header(self, name: bytes, value: bytes) -> None:
        """Some proxies append to X-Forwarded-For, some add a line of their own: what counts is all of it in order."""
        name = name.lower()
        before = self._head.get(name) if name == b"x-forwarded-for" else None
        self._head[name] = value if before is None else b"%b,%b" % (before, value)

    def on_headers_complete(self) -> None:
        self._head_since = 0.0
        if self._head_size or self._read_size > self.edge.settings.max_header:
            self._head_size = 0
            self._limit_head(sum(len(name) + len(value) for name, value in self._head.items()) + len(self.url))
        self._framing_size = -self._read_size  # what this read brought is no framing
        if len(self._head) > MOST_HEADERS:
            self._refuse(BadRequest("The request has too many headers.", status=431, code="headers_too_large"))
        elif b"host" not in self._head and b"Host" not in self._head and self._lacks_host():
            self._refuse(BadRequest("An HTTP/1.1 request needs a Host header.", code="invalid_http"))
        if self._deaf or self.parser.should_upgrade():
            return
        operation = HOT_ROUTES.get(self.url) or HOT_ROUTES.get(path_of(self.url))
        if operation is None or self.parser.get_method() != b"POST":
            self._leave_to_asgi()
            return
        headers = {name.lower(): value for name, value in self._head.items()}
        keep_alive = self.parser.should_keep_alive() and not self.edge.draining
        cycle = HotCycle(self, operation, headers, keep_alive, self.parser.get_http_version() == "1.1")
        if (cors := self.edge.settings.cors) is not None:
            lines = cors.lines(b"/v1/", headers.get(b"origin"))
            cycle.origin_headers = b"".join(b"%b: %b\r\n" % line for line in lines)
        length = headers.get(b"content-length")
        if length is not None and int(length) > self.edge.settings.max_body:
            self._refuse_body(cycle)
        before, self.cycle = self.cycle, cycle
        if before is None or before.response_complete:
            self._start(cycle)
        else:
            self.pipeline.appendleft((cycle, self.app))  # type: ignore[arg-type]
            if len(self.pipeline) >= MOST_PIPELINED:  # while reading is paused, a client that leaves is not noticed
                self.flow.pause_reading()

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if self._deaf:
            return
        self._body_size += len(body)
        if cycle.response_complete:
            if self._body_size > MOST_IGNORED:
                self._close_gently(True)
        elif not isinstance(cycle, HotCycle):
            super().on_body(body)
        elif cycle.refused is None:
            cycle.body.append(body)
            if len(cycle.body) >= cycle.most_pieces:
                cycle.fold_body()
            if self._body_size > self.edge.settings.max_body:
                self._refuse_body(cycle)

    def on_message_complete(self) -> None:
        cycle = self.cycle
        if self._deaf or self.parser.should_upgrade():
            return
        if isinstance(cycle, HotCycle):
            cycle.more_body = False
            cycle.set()
        else:
            super().on_message_complete()

    def _leave_to_asgi(self) -> None:
        """uvicorn's own handling, on what has been parsed so far."""
        url, headers = self.url, [(name.lower(), value) for name, value in self._head.items()]
        super().on_message_begin()
        self.url = url
        self.headers += headers  # the list its scope points to
        self.expect_100_continue = (b"expect", b"100-continue") in headers
        try:
            super().on_headers_complete()
            self.scope["state"]["certificate"] = self.certificate
            if self.edge.settings.cors is not None:
                self.scope["state"] |= _cors_state(self.edge.settings.cors, self.scope)
        except (httptools.HttpParserError, UnicodeDecodeError):
            self._refuse(BadRequest("The request's target is not valid.", code="invalid_http"))

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Some clients offer h2c with every request. The offer need not be taken, but the parser has stopped behind the
        head and takes the body for the other protocol: a new one reads the same request without the offer."""
        if self.parser.get_method() == b"CONNECT":
            self._refuse(BadRequest("This server is no proxy.", code="invalid_http"))
            return
        head = b"%b %b HTTP/1.1\r\n" % (self.parser.get_method(), self.url)
        for name, value in self._head.items():
            if name.lower() not in (b"upgrade", b"connection", b"http2-settings"):
                head += b"%b: %b\r\n" % (name, value)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(head + b"\r\n" + rest)

    def _lacks_host(self) -> bool:
        return self.parser.get_http_version() == "1.1" and all(name.lower() != b"host" for name in self._head)

    def _limit_head(self, size: int) -> None:
        if size > self.edge.settings.max_header:
            self._refuse(BadRequest("The request's headers are too large.", status=431, code="headers_too_large"))

    def _limit_framing(self) -> None:
        self._framing_size += self._read_size
        if self._framing_size > self.edge.settings.max_header:
            self._refuse(BadRequest("The body comes with too much that is no part of it.", code="invalid_http"))

    def _refuse_body(self, cycle: HotCycle) -> None:
        most = self.edge.settings.max_body
        cycle.refused = BodyTooLarge(f"The body is larger than the {most} bytes this gateway accepts.")
        cycle.body.clear()
        cycle.set()

    # --- one answer after the other
    def _start(self, cycle: Any) -> None:
        if isinstance(cycle, HotCycle):
            self._active = cycle
            # A name of our own, or every task would format one.
            cycle.task = asyncio.Task(self.edge.serve(cycle), loop=self.loop, name="request")
        else:
            self._active = None
            self._start_asgi_task(cycle, self.app)

    def finished(self, cycle: HotCycle) -> None:
        """A hot cycle has sent its last byte."""
        if not cycle.keep_alive:
            self._close_gently(cycle.more_body)
        elif self.pipeline or self.flow.read_paused:
            self._next()

    def on_response_complete(self) -> None:
        """uvicorn's own cycle has sent its last byte."""
        if not self.transport.is_closing():
            self._next()

    def _next(self) -> None:
        """Starts the next request of the pipeline. (`look_after` closes idle connections, all with one timer.)"""
        self.flow.resume_reading()
        if self.pipeline:
            self._start(self.pipeline.pop()[0])

    def _close_gently(self, body_is_coming: bool) -> None:
        """Closes after the answer. While the client still sends, an immediate close would reset the connection and take
        the answer with it."""
        self._deaf = True
        if body_is_coming and self.transport.can_write_eof():
            self.transport.write_eof()
            self._close_at = self.loop.time() + LINGER
        else:
            self.transport.close()

    def _refuse(self, error: GatewayError) -> None:
        """Answers what never became a request and closes."""
        if self._deaf or self.transport.is_closing():
            return
        if self.is_busy():
            self._deaf = True
            cycle = self.cycle
            if isinstance(cycle, HotCycle) and cycle is self._active and cycle.more_body and not cycle.started:
                cycle.refused = cycle.refused or error  # its body is what is wrong: `serve` answers, then we close
                cycle.set()
            else:
                self.transport.close()  # an answer is under way: nothing can be said in between
            return
        self.transport.write(refusal(error, self.edge.date))
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

    def date_header(self) -> bytes:
        return self.edge.date

    def is_paused(self) -> bool:
        return self._paused_since > 0.0

    def look_after(self, now: float) -> None:
        settings = self.edge.settings
        if self._joins != settings.behind_proxies:  # a reload came in between; the parser stays as it was made
            self.shutdown()
        if self._close_at and now > self._close_at:
            self.transport.abort()
        elif self._paused_since and now - self._paused_since > STUCK_READER:
            self.transport.abort()
        elif self._deaf:
            return
        elif self._head_since and now - self._head_since > settings.header_timeout and not self.is_busy():
            self._refuse(RequestTimeout(f"The request's headers did not arrive within {settings.header_timeout:g} s."))
        elif not self.is_busy():
            if not self._idle_since:
                self._idle_since = now
            elif now - self._idle_since > settings.idle_timeout:
                self.transport.close()
        elif self._active is not None:
            self._look_after_cycle(self._active, now)

    def _look_after_cycle(self, cycle: HotCycle, now: float) -> None:
        settings = self.edge.settings
        if cycle.more_body and cycle is self.cycle:
            if not self._body_since or self._body_size - self._body_seen >= LEAST_OF_BODY:
                self._body_since, self._body_seen = now, self._body_size
            elif now - self._body_since > settings.body_timeout:
                cycle.refused = RequestTimeout(f"Too little of the body arrived within {settings.body_timeout:g} s.")
                cycle.set()
        if not cycle.keepalives or not settings.keepalive_interval or cycle.response_complete:
            self._silent_since = 0.0
        elif not self._silent_since or cycle.writes != self._writes:
            self._silent_since, self._writes = now, cycle.writes
        elif now - self._silent_since >= settings.keepalive_interval:
            cycle.comment()
            self._silent_since, self._writes = now, cycle.writes


def refusal(error: GatewayError, date: bytes) -> bytes:
    """A whole answer for what never became a request, ending the connection."""
    body = errors.body(error)
    return (
        b"%b%bx-request-id: %b\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%b"
        % (
            STATUS_LINES[error.status],
            date,
            new_request_id().encode(),
            errors.header_lines(error),
            len(body),
            body,
        )
    )


def _date_header() -> bytes:
    return b"date: %b\r\n" % formatdate(usegmt=True).encode()


def _cors_state(cors: Cors, scope: Any) -> dict[str, Any]:
    """What the gatekeeper has to say to a browser: `preflight` alone, or `cors` with every answer."""
    path, headers = scope["raw_path"].partition(b"?")[0], dict(scope["headers"])
    if scope["method"] == "OPTIONS" and (answer := cors.preflight(path, headers)) is not None:
        return {"preflight": answer}
    return {"cors": cors.lines(path, headers.get(b"origin"))}
