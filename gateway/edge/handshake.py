"""TLS of one client connection, from the first byte on: bounded in time and number, and honest when it fails.

A server made with an SSL context keeps that context for ever, gives a handshake a minute, and closes the connection
without a word when it fails. So the server listens without TLS, and each connection gets uvloop's own TLS protocol from
here, with the context of the moment. Relies on uvloop 0.23: `SSLProtocol` with the arguments of CPython's
asyncio.sslproto, which calls `wrap_bio` of what it is given as a context, once. The version is pinned, and
tests/e2e/test_tls.py exercises what is relied on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any, cast

from prometheus_client.core import Metric
from uvicorn.protocols.utils import get_remote_addr
from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]

from gateway.config import StartupError, TlsConfig
from gateway.edge.protocol import Edge, EdgeProtocol, refusal
from gateway.errors import BadRequest
from gateway.metrics import gauge
from gateway.tls import ServerTls, TlsFileError

MOST_HANDSHAKE = 10.0  # seconds; less when `header_timeout` is
MOST_CLOSING = 30.0  # seconds for what is still to be sent, and the client's word that it has ended, after a close
SPARE = 64  # handshakes under way up to which those of too many clients are taken too, to tell them in an answer
QUICK: int | None = getattr(socket, "TCP_QUICKACK", None)  # of Linux

_HTTP_ONLY = BadRequest("This port speaks HTTPS: write https:// in place of http://.", code="https_required")

log = logging.getLogger("sekisho.tls")


class TlsPort:
    """What uvicorn calls for every accepted connection when the port has TLS."""

    def __init__(self, edge: Edge, given: TlsConfig) -> None:
        """Raises: StartupError."""
        self._edge = edge
        try:
            self._tls = ServerTls(given)
        except TlsFileError as error:
            raise StartupError(f"server.tls.{error}") from None

    def adopt(self, given: TlsConfig | None) -> None:
        """For connections from now on. What cannot be used was found before; files may still change in between."""
        try:
            if given is not None and self._tls.refresh(given):
                log.info("new connections get the certificate of %s", given.cert_file)
        except TlsFileError as error:
            log.error("the old certificate stays: server.tls.%s", error)

    def gauges(self) -> Iterator[Metric]:
        text = "When the certificate of the gateway's port ends, in Unix seconds"
        yield gauge("certificate_expiry_timestamp_seconds", text, (), {(): self._tls.expires.timestamp()})

    def protocol(self, *args: Any, **kwargs: Any) -> TlsConnection:
        return TlsConnection(self._edge, self._tls.context, self._edge.protocol(*args, **kwargs))


class TlsConnection(SSLProtocol):  # type: ignore[misc]
    """A client connection below HTTP. It takes its place among the connections from the first byte on."""

    def __init__(self, edge: Edge, context: ssl.SSLContext, http: EdgeProtocol) -> None:
        self._offer = _Offer(context)
        super().__init__(
            asyncio.get_running_loop(), http, self._offer, None, True,
            ssl_handshake_timeout=min(MOST_HANDSHAKE, edge.settings.header_timeout),
            ssl_shutdown_timeout=MOST_CLOSING,
        )  # fmt: skip
        self._edge = edge
        self._http: EdgeProtocol | None = http
        self._handshake: _Handshake | None = None
        self._socket: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)
        peer = get_remote_addr(self._socket)
        assert self._http is not None
        if not self._http.admit(peer[0] if peer else None) and len(self._edge.handshakes) >= SPARE:
            self._socket.abort()
            return
        self._edge.handshakes.add(self)
        self._offer.connection = self
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._over()
        if self._http is not None:
            self._http.leave()
        self._http = self._socket = None  # they lead back here, and would wait for the cycle collector
        super().connection_lost(exc)

    def begin(self, handshake: _Handshake, outgoing: ssl.MemoryBIO) -> None:
        self._handshake = handshake
        handshake.ends = lambda error: self._end(error, outgoing)

    def abort(self) -> None:
        if self._socket is not None:
            self._socket.abort()

    def _end(self, error: ssl.SSLError | None, outgoing: ssl.MemoryBIO) -> None:
        self._over()
        if error is None:
            self._acknowledge()
        elif self._socket is not None:
            log.debug("the handshake with %s failed: %s", self._socket.get_extra_info("peername"), error.reason)
            self._say(refusal(_HTTP_ONLY, self._edge.date) if error.reason == "HTTP_REQUEST" else outgoing.read())

    def _over(self) -> None:
        self._edge.handshakes.discard(self)
        if self._handshake is not None:
            self._handshake.ends = None
            self._handshake = None

    def _acknowledge(self) -> None:
        """In TLS 1.3 without tickets the client has the last word of the handshake. Many hold the request back until
        that has been acknowledged, for which the kernel would wait 40 ms."""
        if QUICK is not None and self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, QUICK, 1)

    def _say(self, last: bytes) -> None:
        """uvloop drops what OpenSSL has to say about a failure, and aborts the transport: so by the socket itself."""
        transport = self._socket
        if transport is not None and transport.get_write_buffer_size() == 0:
            with contextlib.suppress(OSError):
                os.write(transport.get_extra_info("socket").fileno(), last)


class _Handshake(ssl.SSLObject):
    """Tells how the handshake ended."""

    ends: Callable[[ssl.SSLError | None], None] | None = None

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            if self.ends is not None:
                self.ends(error)
            raise
        if self.ends is not None:
            self.ends(None)


class _Offer:
    """In place of a context: the same, once, for one connection."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.connection: TlsConnection | None = None
        self._context = context

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, **options: Any) -> ssl.SSLObject:
        self._context.sslobject_class = _Handshake
        handshake = self._context.wrap_bio(incoming, outgoing, **options)
        assert self.connection is not None and isinstance(handshake, _Handshake)
        self.connection.begin(handshake, outgoing)
        self.connection = None
        return handshake
