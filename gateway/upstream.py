"""Connections to engines: a pool per endpoint, one request at a time on each connection, answers by callback.

This is the gateway's own HTTP/1.1 client because the client is the largest single cost of a proxy (docs/adr/0001). It
owns keep-alive and reuse, TLS and Unix sockets, time limits and back-pressure, and nothing else: no redirects, no
cookies, no proxies, no retries beyond a kept connection that turns out to be dead.

The parser is llhttp through httptools, the one uvicorn uses. What an engine sends is not trusted: heads, answers and
what compression may blow up to are bounded.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

from gateway.errors import UpstreamBroken, UpstreamUnreachable
from gateway.reply import Record, Reply, Request
from gateway.tls import EngineTls, TlsFileError, blame
from gateway.types import Endpoint, Timeouts

MAX_HEAD = 64 * 1024  # bytes of an answer's headers; and of trailers and the like behind or between its body's bytes
IDLE_CONNECTION = 30.0  # seconds a kept connection waits for its next request
MOST_IDLE = 256  # kept connections per endpoint
TICK = 0.25  # seconds between two looks at the time limits

_KEPT_HEADERS = frozenset(
    {b"content-type", b"content-encoding", b"retry-after", b"content-length", b"transfer-encoding"}
)


class _Unanswered(UpstreamBroken):
    """The connection ended before a single byte of an answer: on a kept connection that says nothing of the engine."""


class Connection(asyncio.Protocol):
    """One socket to an engine."""

    __slots__ = (
        "_bare_size", "_body", "_done", "_headers", "_keep", "_parser", "_pool", "_reply", "idle_since",
        "loop", "paused", "transport",
    )  # fmt: skip

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.loop = pool.loop
        self._parser = httptools.HttpResponseParser(self)
        self._reply: Reply | None = None
        self._headers: dict[bytes, bytes] = {}
        self._bare_size = 0  # bytes of reads in a row that held nothing of the body
        self._body: list[bytes] = []
        self._done = False  # the answer's last byte has come
        self._keep = False  # and the engine keeps the connection open
        self.transport: asyncio.Transport | None = None
        self.paused = False
        self.idle_since = 0.0

    def send(self, reply: Reply, request: Request) -> None:
        assert self.transport is not None
        self._reply = reply
        self._done = self._keep = False
        self._bare_size = 0
        if isinstance(request, bytes):
            self.transport.write(request)
        else:
            self.transport.writelines(request)  # uvloop copies nothing

    def release(self, reply: Reply) -> None:
        """The reader is finished with its answer: the connection is kept if the answer was read to its end."""
        if self._reply is not reply:
            return
        self._reply = None
        self._body.clear()
        if self.transport is None or not self._keep:
            self.abort()
            return
        self.resume()
        self._pool.keep(self)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def pause(self) -> None:
        if not self.paused and self.transport is not None:
            self.paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.paused and self.transport is not None:
            self.paused = False
            self.transport.resume_reading()

    # --- asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are not its subclasses

    def data_received(self, data: bytes) -> None:
        reply, was_done = self._reply, self._done
        if reply is None or was_done:
            self.abort()  # bytes nobody asked for: this connection's framing cannot be trusted any more
            return
        reply.last_read = self.loop.time()
        reply.answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._keep = False
            if not self._done:
                reply.fail(UpstreamBroken("The engine's answer is not valid HTTP."))
                return
        body = self._body
        if body:
            data = body[0] if len(body) == 1 else b"".join(body)
            body.clear()
            self._bare_size = 0
            reply.feed(data)
        elif not self._done:
            self._bare_size += len(data)
            if self._bare_size > MAX_HEAD:
                reply.fail(UpstreamBroken("The engine's answer has too many headers."))
                return
        if self._done:
            reply.end()
        elif not reply.relaying and reply.status:
            reply.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._pool.forget(self)
        reply = self._reply
        del self._parser  # it points back here: without this, every closed connection waits for the cycle collector
        if reply is None or self._done:
            return
        if reply.status and exc is None and not self._is_framed(reply):
            self._done = True
            reply.end()  # a body without a length ends with its connection
        elif reply.answered:
            reply.fail(UpstreamBroken("The connection to the engine was lost before the answer was finished."))
        else:
            # In TLS 1.3 a connection is up before the engine has judged the gateway's certificate.
            reply.fail(_Unanswered(blame(exc) or "The engine closed the connection without an answer."))

    @staticmethod
    def _is_framed(reply: Reply) -> bool:
        return b"content-length" in reply.headers or b"transfer-encoding" in reply.headers

    # --- httptools callbacks
    def on_message_begin(self) -> None:
        self._headers = {}
        if self._done:
            self._keep = False  # another answer behind the one that was asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _KEPT_HEADERS:
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._reply is not None and status >= 200 and not self._done:
            self._reply.begin(status, self._headers)

    def on_body(self, body: bytes) -> None:
        if not self._done:
            self._body.append(body)

    def on_message_complete(self) -> None:
        # 1xx answers are messages of their own to the parser; the one that counts follows.
        if self._reply is not None and self._reply.status and not self._done:
            self._done = True
            self._keep = self._parser.should_keep_alive()


class Pool:
    """Kept connections to one endpoint, newest first."""

    __slots__ = ("_endpoint", "_idle", "_open", "_tls", "loop")

    def __init__(self, endpoint: Endpoint, loop: asyncio.AbstractEventLoop, tls: EngineTls) -> None:
        self._endpoint = endpoint
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._tls = tls
        self.loop = loop

    def take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is not None and not connection.transport.is_closing():
                return connection
        return None

    async def connect(self, timeout: float) -> Connection:
        """Raises: UpstreamUnreachable."""
        endpoint = self._endpoint
        try:
            context = self._tls.context(endpoint) if endpoint.tls else None
            async with asyncio.timeout(timeout):
                if endpoint.unix is not None:
                    _, connection = await self.loop.create_unix_connection(lambda: Connection(self), endpoint.unix)
                else:
                    _, connection = await self.loop.create_connection(
                        lambda: Connection(self),
                        endpoint.host,
                        endpoint.port,
                        ssl=context,
                        server_hostname=endpoint.host if context else None,
                    )
        except TimeoutError:
            raise UpstreamUnreachable(
                f"The engine did not accept a connection within {timeout:g} s.", retry_after=5
            ) from None
        except TlsFileError:  # which file, the log has said at the start
            raise UpstreamUnreachable("The gateway's own TLS files for the engine are not usable.") from None
        except ssl.SSLError as error:
            why = blame(error) or "The TLS handshake with the engine failed."
            raise UpstreamUnreachable(why, retry_after=30) from None
        except OSError:
            raise UpstreamUnreachable("The engine refused the connection.", retry_after=5) from None
        self._open.add(connection)
        return connection

    def keep(self, connection: Connection) -> None:
        if len(self._idle) >= MOST_IDLE:
            connection.abort()
            return
        connection.idle_since = self.loop.time()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        self._open.discard(connection)

    def sweep(self, now: float) -> None:
        while self._idle and now - self._idle[0].idle_since > IDLE_CONNECTION:
            self._idle.popleft().abort()

    def close(self) -> None:
        """Closes kept connections; those in use are closed by whoever uses them."""
        while self._idle:
            self._idle.popleft().abort()

    @property
    def size(self) -> int:
        return len(self._open)


class Upstream:
    """All pools, and the one timer that looks after every open answer's time limits."""

    def __init__(self, max_response: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._pools: dict[Endpoint, Pool] = {}
        self._tls = EngineTls()
        self._replies: set[Reply] = set()
        self.max_response = max_response

    async def open(self, endpoint: Endpoint, timeouts: Timeouts, request: Request, record: Record) -> Reply:
        """Sends a request (head and body) and waits for the head of the answer. Close the reply when done with it.

        A kept connection that the engine had closed meanwhile is replaced by a fresh one, once, without counting as a
        failure: nothing of an answer had come. (Not by the next kept one: a request that kills its engine would be sent
        down all of them.)

        Raises: UpstreamUnreachable, UpstreamBroken, UpstreamTimeout.
        """
        pool = self._pools.get(endpoint)
        if pool is None:
            pool = self._pools[endpoint] = Pool(endpoint, self._loop, self._tls)
        connection = pool.take()
        kept = connection is not None
        while True:
            if connection is None:
                connection = await pool.connect(timeouts.connect)
            record.sent = time.monotonic()
            reply = Reply(connection, timeouts, self._loop.time(), self.max_response, self._replies)
            connection.send(reply, request)
            try:
                await reply.started()
            except BaseException:
                reply.close()
                raise
            if reply.status or reply.error is None:
                return reply
            reply.close()
            if not (kept and isinstance(reply.error, _Unanswered)):
                raise reply.error
            connection, kept = None, False

    def sweep(self) -> None:
        """Called every TICK: enforces time limits and lets go of connections that were kept for long."""
        now = self._loop.time()
        for reply in list(self._replies):
            if (error := reply.overdue(now)) is not None:
                reply.fail(error)
        for pool in self._pools.values():
            pool.sweep(now)

    def retire(self, wanted: Callable[[Endpoint], bool]) -> None:
        """After a reload: closes the kept connections of endpoints that are gone."""
        for endpoint in [endpoint for endpoint in self._pools if not wanted(endpoint)]:
            self._pools.pop(endpoint).close()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
