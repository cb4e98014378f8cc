"""An engine's answer while it arrives: its head, its body by callback or whole, its time limits. Opens no sockets."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, TypeAlias

from gateway.errors import GatewayError, UpstreamBroken, UpstreamTimeout
from gateway.types import Timeouts

Request: TypeAlias = bytes | list[bytes | memoryview]  # head and body; in pieces where a copy would take too long

_LAST_WORDS = Timeouts(idle=1.0)


class Source(Protocol):
    """The connection an answer comes on; `upstream.Connection` is one."""

    loop: asyncio.AbstractEventLoop
    paused: bool

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def abort(self) -> None: ...
    def release(self, reply: Reply) -> None: ...


class Sink(Protocol):
    """Where a relayed answer goes. Both are called from the engine's socket and must not block."""

    def received(self, data: bytes) -> None: ...
    def ended(self) -> None: ...


class Record(Protocol):
    """Where it is noted that an engine has been given work; `Outcome` is one."""

    sent: float  # seconds of the steady clock


class Reply:
    """An engine's answer while it arrives.

    `started` resolves with the head, `relay` hands the body to a sink as it comes, `read` collects it. `close` ends the
    connection unless the answer was read to its end.
    """

    # Defaults live on the class: an instance stores only what differs, which is most of what making it costs.
    answered = False  # a byte of an answer has come
    begun = False  # a byte of its body has come: engines send their headers before they read the prompt
    status = 0  # 0 until the head is complete
    headers: Mapping[bytes, bytes] = MappingProxyType({})
    complete = False
    error: GatewayError | None = None
    _size = 0
    _sink: Sink | None = None
    _waiter: asyncio.Future[None] | None = None
    _decoder: _Decoder | None = None

    def __init__(self, connection: Source, timeouts: Timeouts, now: float, limit: int, registry: set[Reply]) -> None:
        self._connection = connection
        self._registry = registry  # of open replies, for the time limits
        registry.add(self)
        self._limit = limit  # bytes of a body that is collected, and of compressed data blown up in one read
        self._parts: list[bytes] = []
        self.timeouts = timeouts
        self.sent = self.last_read = now

    def close(self) -> None:
        """Gives the connection back, or ends it in the middle of the answer. May be called again."""
        self._sink = None
        self._registry.discard(self)
        self._connection.release(self)

    # --- the reader's side
    def started(self) -> asyncio.Future[None]:
        """What to await for the status and headers: done once there is a status or an error."""
        self._waiter = waiter = self._connection.loop.create_future()
        return waiter

    async def relay(self, sink: Sink) -> None:
        """Hands the body to `sink`, what has come already first; returns after `sink.ended()`.

        Raises: UpstreamBroken, UpstreamTimeout when the answer stops early; `sink.ended` is not called then.
        """
        self._sink = sink
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            sink.received(data)
        if self.complete:
            sink.ended()
        await self._end()

    async def read(self) -> bytes:
        """The whole body.

        Raises: UpstreamBroken (also when it is larger than the limit), UpstreamTimeout.
        """
        await self._end()
        return self.take_body()

    def take_body(self) -> bytes:
        """The body, once the answer is complete."""
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    async def _end(self) -> None:
        while not self.complete and self.error is None:
            await self._wait()
        if self.error is not None:
            raise self.error

    def pause(self) -> None:
        self._connection.pause()

    def resume(self) -> None:
        self.last_read = self._connection.loop.time()  # the engine was not silent, it was not listened to
        self._connection.resume()

    def linger(self) -> None:
        """All that matters has come: its end is waited for only briefly, so that the connection can be kept."""
        self.timeouts = _LAST_WORDS

    async def _wait(self) -> None:
        self._waiter = self._connection.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # --- the socket's side
    def feed(self, data: bytes) -> None:
        """Body bytes of one read of the socket, after the head."""
        self.begun = True
        if self._decoder is not None:
            try:
                data = self._decoder.decode(data, self._limit)
            except (zlib.error, ValueError):
                self.fail(UpstreamBroken("The engine sent a compressed answer that cannot be read."))
                return
            if not data:
                return
        if self._sink is not None:
            self._sink.received(data)
            return
        self._parts.append(data)
        self._size += len(data)
        if self._size > self._limit:
            self.fail(UpstreamBroken("The engine's answer is larger than the gateway accepts."))

    def begin(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status, self.headers = status, headers
        encoding = headers.get(b"content-encoding", b"identity").lower()
        if encoding in (b"gzip", b"x-gzip", b"deflate"):
            self._decoder = _Decoder()
        elif encoding != b"identity":
            self.fail(UpstreamBroken("The engine compressed its answer although it was asked not to."))

    def end(self) -> None:
        self.complete = True
        if self._sink is not None:
            self._sink.ended()
        self.wake()

    def fail(self, error: GatewayError) -> None:
        if not self.complete and self.error is None:
            self.error = error
            self._connection.abort()
        self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    @property
    def has_body(self) -> bool:
        """Whether a part of the body waits to be taken."""
        return bool(self._parts) or self.complete

    @property
    def relaying(self) -> bool:
        return self._sink is not None

    def overdue(self, now: float) -> GatewayError | None:
        """The time limit that has passed, if one has."""
        limits = self.timeouts
        if limits.total is not None and now - self.sent > limits.total:
            return UpstreamTimeout(f"The answer was not finished within {limits.total:g} s.")
        if self.begun:
            if now - self.last_read > limits.idle and not self._connection.paused:
                return UpstreamTimeout(f"The engine went silent for {limits.idle:g} s in the middle of its answer.")
        elif now - self.sent > limits.first_byte:
            return UpstreamTimeout(f"The engine did not begin to answer within {limits.first_byte:g} s.")
        return None


class _Decoder:
    """gzip or zlib, piece by piece, so that a compressed stream is still delivered event by event."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)

    def decode(self, data: bytes, limit: int) -> bytes:
        """Raises: zlib.error, ValueError for more than `limit` bytes at once."""
        out = self._inflate.decompress(data, limit)
        if self._inflate.unconsumed_tail:
            raise ValueError("decompressed data is larger than the limit")
        return out
