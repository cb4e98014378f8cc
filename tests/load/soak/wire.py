"""A client connection over TLS that knows its own port, so that it can be told which worker it came to."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools

HANDSHAKE = 30.0  # seconds; a worker that was killed is back within a few


@dataclass(slots=True)
class Answer:
    """What came of one request. Times are seconds of a steady clock; 0 = never."""

    port: int  # ours, of the connection
    opened: float  # when the connection was
    began: float
    headed: float = 0.0
    ended: float = 0.0
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False
    left: bool = False  # we went away ourselves
    problem: str = ""  # why it is not complete


class NoConnection(Exception):
    """Carries an Answer that says why."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.problem)
        self.answer = answer


class Wire(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, port: int) -> None:
        self.port, self.opened, self.used = port, time.monotonic(), time.monotonic()
        self.closed = False
        self.serial = 0  # of the certificate it was shown
        self.headed: Callable[[], None] | None = None  # called when the head of an answer has come
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._over: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, port: int, context: ssl.SSLContext) -> Wire:
        """Raises: NoConnection."""
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setblocking(False)
        began, own = time.monotonic(), 0
        try:
            async with asyncio.timeout(HANDSHAKE):
                await loop.sock_connect(sock, ("127.0.0.1", port))
                own = sock.getsockname()[1]
                wire = cls(own)
                await loop.create_connection(
                    lambda: wire, sock=sock, ssl=context, server_hostname="127.0.0.1", ssl_handshake_timeout=HANDSHAKE
                )
        except (OSError, TimeoutError) as error:
            problem = f"no connection: {type(error).__name__}: {error}"
            sock.close()
            raise NoConnection(Answer(own, began, began, ended=time.monotonic(), problem=problem)) from None
        return wire

    async def ask(self, request: bytes, patience: float, leave_after: float | None = None) -> Answer:
        """Args: patience: seconds until the end. leave_after: seconds after which the connection is dropped."""
        answer = self._answer = Answer(self.port, self.opened, time.monotonic())
        self._over = asyncio.get_running_loop().create_future()
        if self.closed:
            answer.problem = "the connection was closed before the request"
        else:
            self._transport.write(request)
            try:
                async with asyncio.timeout(patience if leave_after is None else leave_after):
                    await self._over
            except TimeoutError:
                answer.left = leave_after is not None
                answer.problem = "" if answer.left else f"no end within {patience:.0f} s"
                self.close()
        answer.ended = self.used = time.monotonic()
        self._answer = None
        return answer

    def close(self) -> None:
        self.closed = True
        self._transport.abort()

    # --- asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        shown = transport.get_extra_info("ssl_object").getpeercert()
        self.serial = int(shown["serialNumber"], 16)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"no HTTP: {error}")
            self.close()

    def eof_received(self) -> None:
        self.closed = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._end(f"connection lost: {type(exc).__name__}: {exc}" if exc else "connection closed by the gateway")

    def _end(self, problem: str) -> None:
        if self._answer is not None and self._over is not None and not self._over.done():
            self._answer.problem = problem
            self._over.set_result(None)

    # --- httptools
    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is not None:
            self._answer.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.headed = time.monotonic()
            self._answer.status = self._parser.get_status_code()
        if self.headed is not None:
            self.headed()

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.body += data

    def on_message_complete(self) -> None:
        if self._answer is not None:
            self._answer.complete = True
        if not self._parser.should_keep_alive():
            self.closed = True
        self._end("")
