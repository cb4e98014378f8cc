"""An engine on a real socket that does what a test says, byte by byte.

    engine = Engine(dialect="vllm")
    engine.script = lambda x: x.stream(["a", "b"])      # or any function of an Exchange
    engine.once(lambda x: x.reset())                    # for one request only, before the script

Threads and blocking sockets: a script reads from top to bottom as the scenario it plays. Every request is kept in
`requests` (inference) or `probes` (GETs), with its raw head and body, and knows when its peer closed the connection.
Nothing here sleeps by itself; a script waits on events or on the peer.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import select
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from tests.doubles.dialects import DIALECTS, DONE, UPSTREAM_MODEL, USAGE, Dialect

PATIENCE = 60.0  # seconds after which a script that waits gives up, so that no thread outlives its test
Script = Callable[["Exchange"], None]


class PeerGone(Exception):
    """The gateway closed its side while a script was waiting or writing."""


class Request:
    """One request as it came."""

    def __init__(self, head: bytes, body: bytes, connection: int) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        self.method, self.target, self.version = first.split(" ")
        self.headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        self.raw_head, self.body = head, body
        self.connection = connection  # number of the connection it came on
        self.gone = threading.Event()  # the peer closed before the answer was complete
        self.ended = threading.Event()  # the script is over

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def json(self) -> Any:
        return json.loads(self.body)


class Exchange:
    """What a script can do with one request."""

    def __init__(self, engine: Engine, sock: socket.socket, request: Request) -> None:
        self.engine, self.request, self.dialect = engine, request, engine.dialect
        self._sock = sock
        self._gzip: Any = None
        self._chunked = True
        self.keep = True  # the connection lives on after the answer

    # --- bytes
    def send(self, data: bytes) -> None:
        """Raises: PeerGone."""
        try:
            self._sock.sendall(data)
        except OSError:
            self.request.gone.set()
            raise PeerGone from None

    def push(self, block: bytes, most: int) -> int:
        """Writes `block` again and again without waiting for room; bytes taken until the peer has taken none for a
        while, at most `most`."""
        taken = 0
        view = memoryview(block)
        self._sock.setblocking(False)
        try:
            while taken < most:
                _, writable, _ = select.select([], [self._sock], [], 1.5)
                if not writable:
                    break
                with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError):
                    taken += self._sock.send(view[taken % len(block) :])
        except OSError:
            self.request.gone.set()
            raise PeerGone from None
        finally:
            self._sock.setblocking(True)
        return taken

    def wait(self, event: threading.Event | None = None, timeout: float = PATIENCE) -> None:
        """Until `event` is set, or for ever. Raises: PeerGone as soon as the gateway closes its side."""
        deadline = time.monotonic() + timeout
        while not (event is not None and event.is_set()):
            if self.peer_closed():
                self.request.gone.set()
                raise PeerGone
            if time.monotonic() > deadline or self.engine.stopping.is_set():
                raise TimeoutError("the script waited too long")
            if event is not None:
                event.wait(0.01)
            else:
                select.select([self._sock], [], [], 0.1)

    def pause(self, seconds: float) -> None:
        """Silence; ends early when the peer leaves. Raises: PeerGone."""
        with contextlib.suppress(TimeoutError):
            self.wait(threading.Event(), seconds)

    def peer_closed(self) -> bool:
        readable, _, _ = select.select([self._sock], [], [], 0)
        if not readable:
            return False
        try:
            if isinstance(self._sock, ssl.SSLSocket):
                return self._sock.recv(1) == b""
            return self._sock.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    # --- whole answers
    def reply(self, body: Any, status: int = 200, **headers: str) -> None:
        """A document with its length. Keyword names are header names with _ for -."""
        data = body if isinstance(body, bytes) else self.dialect.dump(body)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        head = {"content-type": "application/json", "content-length": str(len(data))} | given
        self.send(head_bytes(status, head.items()) + data)

    def fail(self, message: str, status: int, *, shape: str | None = None, retry_after: str = "", **more: Any) -> None:
        """An error in the engine's dialect."""
        from tests.doubles.dialects import error_body

        headers = {"retry_after": retry_after} if retry_after else {}
        self.reply(error_body(shape or self.dialect.error_shape, message, status, **more), status, **headers)

    def html(self, status: int = 502) -> None:
        page = b"<html><head><title>Bad Gateway</title></head><body>nginx at 10.1.2.3:8000</body></html>"
        self.reply(page, status, content_type="text/html")

    # --- streams
    def begin(
        self, status: int = 200, content_type: str = "text/event-stream; charset=utf-8", *, chunked: bool = True,
        gzipped: bool = False,
    ) -> None:  # fmt: skip
        """The head of a stream. Without `chunked` the body ends with the connection."""
        self._chunked = chunked
        headers = [("content-type", content_type)]
        if chunked:
            headers.append(("transfer-encoding", "chunked"))
        else:
            headers.append(("connection", "close"))
            self.keep = False
        if gzipped:
            headers.append(("content-encoding", "gzip"))
            self._gzip = zlib.compressobj(wbits=31)
        self.send(head_bytes(status, headers))

    def part(self, data: bytes) -> None:
        """Body bytes, as one chunk of the transfer encoding; flushed when compressed."""
        if self._gzip is not None:
            data = self._gzip.compress(data) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
        self.send(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def event(self, payload: Any) -> None:
        self.part(self.dialect.frame(payload))

    def delta(self, delta: dict[str, Any] | str, finish: str | None = None, **options: Any) -> None:
        """One chunk."""
        text = {"content": delta} if isinstance(delta, str) else delta
        self.event(self.dialect.chunk(text, finish, **options))

    def role(self) -> None:
        if self.dialect.role is not None:
            self.delta(self.dialect.role)

    def done(self) -> None:
        """`[DONE]` and the end of the body."""
        self.event(DONE)
        self.end()

    def end(self) -> None:
        """The clean end of the body, `[DONE]` or not."""
        if self._gzip is not None:
            self.send_chunk(self._gzip.flush())
        if self._chunked:
            self.send(b"0\r\n\r\n")

    def send_chunk(self, data: bytes) -> None:
        if data:
            self.send(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def wants_usage(self) -> bool:
        return bool((self.request.json().get("stream_options") or {}).get("include_usage"))

    def stream(self, pieces: Sequence[Any] = ("Hel", "lo, ", "world"), **options: Any) -> None:
        """A whole answer as this engine would stream it, usage included when it was asked for."""
        if self.wants_usage():
            options.setdefault("usage", USAGE)
        self.raw_stream(self.dialect.stream(pieces, **options))

    def stream_body(self, pieces: Sequence[Any] = ("Hel", "lo, ", "world"), **options: Any) -> None:
        """The same after `begin`."""
        self.part(self.dialect.stream(pieces, **options))
        self.end()

    def raw_stream(self, body: bytes, cut: Callable[[bytes], Iterable[bytes]] | None = None) -> None:
        """`body` as a stream, in the pieces that `cut` makes of it, each in a packet of its own."""
        self.begin()
        for piece in cut(body) if cut else (body,):
            self.part(piece)
        self.end()

    # --- ways to die
    def close(self) -> None:
        self.keep = False
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def reset(self) -> None:
        """RST instead of FIN."""
        self.keep = False
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()

    def half_chunk(self) -> None:
        """A chunk of the transfer encoding that announces more than comes."""
        self.send(b'200\r\ndata: {"id":"half')
        self.close()


class Engine:
    """See the module's docstring. Use as a context manager, or call `stop`."""

    def __init__(
        self,
        dialect: str = "vllm",
        script: Script | None = None,
        *,
        models: Sequence[str] = (UPSTREAM_MODEL,),
        unix: Path | None = None,
        tls: Certificates | None = None,
        prefix: str = "",
    ) -> None:
        self.dialect: Dialect = DIALECTS[dialect]
        self.script: Script = script or answer
        self.models, self.prefix = models, prefix
        self.healthy = True
        self.probe: Script | None = None  # answers GETs instead of the usual answers
        self.metrics = ""  # body of GET /metrics; 404 while empty
        self.requests: list[Request] = []
        self.probes: list[Request] = []
        self.surprises: list[BaseException] = []  # what scripts raised besides PeerGone
        self.connections = 0  # ever accepted
        self.closing_idle = False  # closes a kept connection as soon as an answer was sent: it goes stale
        self.stopping = threading.Event()
        self._once: deque[Script] = deque()
        self._lock = threading.Lock()
        self._running = 0
        self._most_running = 0
        self._socks: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._tls = tls.server_context() if tls is not None else None
        self._unix = unix
        if unix is not None:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(unix))
            self._listener.listen(256)
        else:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = 0 if unix is not None else self._listener.getsockname()[1]
        self._spawn(self._accept)

    # --- for tests
    @property
    def url(self) -> str:
        if self._unix is not None:
            return f"unix:{self._unix}"
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}{self.prefix}"

    @property
    def running(self) -> int:
        """Inference requests whose script is not over."""
        with self._lock:
            return self._running

    @property
    def most_running(self) -> int:
        """The most that ever ran at once."""
        with self._lock:
            return self._most_running

    def once(self, *scripts: Script) -> None:
        """Scripts for the next requests, one each; afterwards `script` goes on."""
        self._once.extend(scripts)

    def last(self) -> Request:
        return self.requests[-1]

    def drop_idle(self) -> None:
        """Closes every connection, as an engine that restarts."""
        for sock in list(self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self.stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        deadline = time.monotonic() + 10
        for thread in list(self._threads):
            while thread.is_alive() and time.monotonic() < deadline:
                self.drop_idle()  # again and again: one may have been accepted just now
                thread.join(0.05)
        if self._unix is not None:
            self._unix.unlink(missing_ok=True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- the server
    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._socks.add(sock)
            self._spawn(self._serve, sock, self.connections)

    def _serve(self, sock: socket.socket, number: int) -> None:
        try:
            if self._unix is None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                plain, sock = sock, self._tls.wrap_socket(sock, server_side=True)
                self._socks.discard(plain)
                self._socks.add(sock)
            buffer = bytearray()
            while (request := self._read(sock, buffer, number)) is not None:
                if not self._answer(Exchange(self, sock, request)):
                    return
        except (OSError, ssl.SSLError, PeerGone):
            pass
        finally:
            self._socks.discard(sock)
            sock.close()

    def _read(self, sock: socket.socket, buffer: bytearray, number: int) -> Request | None:
        while (end := buffer.find(b"\r\n\r\n")) < 0:
            data = sock.recv(1 << 16)
            if not data:
                return None
            buffer += data
        head = bytes(buffer[:end])
        del buffer[: end + 4]
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        while len(buffer) < length:
            data = sock.recv(1 << 20)
            if not data:
                return None
            buffer += data
        body = bytes(buffer[:length])
        del buffer[:length]
        return Request(head, body, number)

    def _answer(self, x: Exchange) -> bool:
        """Whether the connection lives on."""
        request = x.request
        if request.method != "POST":
            self.probes.append(request)
            (self.probe or self._answer_probe)(x)
            return x.keep
        with self._lock:
            self._running += 1
            self._most_running = max(self._most_running, self._running)
        self.requests.append(request)
        try:
            (self._once.popleft() if self._once else self.script)(x)
        except PeerGone:
            return False
        except Exception as error:
            if not self.stopping.is_set():
                self.surprises.append(error)
            return False
        finally:
            with self._lock:
                self._running -= 1
            request.ended.set()
        return x.keep and not self.closing_idle

    def _answer_probe(self, x: Exchange) -> None:
        path = x.request.target.removeprefix(self.prefix)
        if path == "/v1/models" and self.healthy:
            x.reply(self.dialect.models(self.models))
        elif path == "/health" or not self.healthy:
            x.reply(b"", 200 if self.healthy else 503)
        elif path == "/metrics" and self.metrics:
            x.reply(self.metrics.encode(), content_type="text/plain; version=0.0.4")
        else:
            x.reply({"detail": "Not Found"}, 404)


def head_bytes(status: int, headers: Iterable[tuple[str, str]]) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def answer(x: Exchange) -> None:
    """What a healthy engine does with any request."""
    path, body = x.request.target, x.request.json()
    if path.endswith("/embeddings"):
        x.reply(embeddings(body))
    elif path.endswith("/chat/completions"):
        x.stream() if body.get("stream") else x.reply(x.dialect.completion())
    elif body.get("stream"):
        x.raw_stream(x.dialect.text_stream(["Hel", "lo"], usage=USAGE if x.wants_usage() else None))
    else:
        x.reply(x.dialect.text_completion())


VECTORS = [[0.5, -0.25, 1.0, 3.5], [2.0, 0.0, -1.0, 0.125]]  # exact in float32


def embeddings(body: dict[str, Any]) -> dict[str, Any]:
    """Lists of floats, whatever was asked for: what most engines do."""
    count = len(body["input"]) if isinstance(body["input"], list) else 1
    entries = [{"object": "embedding", "index": i, "embedding": VECTORS[i % len(VECTORS)]} for i in range(count)]
    return {
        "object": "list",
        "model": UPSTREAM_MODEL,
        "data": entries,
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }


def gzipped(document: bytes) -> bytes:
    return gzip.compress(document)


# --- cuts: what one body becomes on its way
def by_bytes(size: int) -> Callable[[bytes], Iterable[bytes]]:
    return lambda data: (data[start : start + size] for start in range(0, len(data), size))


def at(*places: int) -> Callable[[bytes], Iterable[bytes]]:
    """Cuts at offsets."""

    def cut(data: bytes) -> Iterable[bytes]:
        bounds = [0, *sorted(place for place in places if 0 < place < len(data)), len(data)]
        return [data[start:end] for start, end in itertools.pairwise(bounds)]

    return cut


class Certificates:
    """A certificate authority of our own and one server certificate for loopback, made once."""

    def __init__(self, folder: Path) -> None:
        self.ca_file, self.cert_file, self.key_file = folder / "ca.pem", folder / "server.pem", folder / "server.key"
        try:
            import cryptography  # noqa: F401
        except ImportError:
            self._with_openssl(folder)
        else:
            self._with_library()

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert_file, self.key_file)
        return context

    @staticmethod
    def available() -> bool:
        try:
            import cryptography  # noqa: F401
        except ImportError:
            return shutil.which("openssl") is not None
        return True

    def _with_openssl(self, folder: Path) -> None:
        def run(*args: str | Path) -> None:
            subprocess.run(["openssl", *map(str, args)], cwd=folder, check=True, capture_output=True)

        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        run("req", "-x509", *curve, "-keyout", "ca.key", "-out", self.ca_file, "-days", "2", "-subj", "/CN=doubles-ca")
        run("req", *curve, "-keyout", self.key_file, "-out", "server.csr", "-subj", "/CN=localhost")
        (folder / "ext").write_text(
            "subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n"
        )
        run("x509", "-req", "-in", "server.csr", "-CA", self.ca_file, "-CAkey", "ca.key", "-set_serial", "7",
            "-days", "2", "-out", self.cert_file, "-extfile", "ext")  # fmt: skip

    def _with_library(self) -> None:
        import datetime
        from ipaddress import ip_address

        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        now = datetime.datetime.now(datetime.UTC)

        def name(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        def build(subject: str, key: Any, issuer_key: Any, ca: bool) -> x509.Certificate:
            builder = (
                x509.CertificateBuilder()
                .subject_name(name(subject))
                .issuer_name(name("doubles-ca"))
                .public_key(key.public_key())
                .serial_number(x509.random_serial_number())
                .not_valid_before(now - datetime.timedelta(hours=1))
                .not_valid_after(now + datetime.timedelta(days=2))
                .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
                .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
                .add_extension(
                    x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
                )
            )
            if not ca:
                names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
                builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
            return builder.sign(issuer_key, hashes.SHA256())

        pem = serialization.Encoding.PEM
        ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        self.ca_file.write_bytes(build("doubles-ca", ca_key, ca_key, True).public_bytes(pem))
        self.cert_file.write_bytes(build("localhost", key, ca_key, False).public_bytes(pem))
        self.key_file.write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
