"""A server of files on a real socket, on any address of 127.0.0.0/8: honest ones, and ones that mean no good."""

from __future__ import annotations

import contextlib
import gzip
import socket
import ssl
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4
GIF = b"GIF89a" + b"\x01\x00\x01\x00" + bytes(40)
WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(64)
MP4 = b"\0\0\0\x18ftypisom" + bytes(64)
JPEG = b"\xff\xd8\xff\xe0" + bytes(64)

Page = Callable[["Visit"], None]


class Visit:
    """One request, and what can be answered to it."""

    def __init__(self, server: FileServer, sock: socket.socket, head: bytes) -> None:
        self.server, self.head = server, head.decode("latin-1")
        self.target = self.head.split(" ")[1]
        self.sent = 0  # bytes
        self.gone = threading.Event()  # the other side has closed before all was sent
        self._sock = sock

    def header(self, name: str) -> str | None:
        lines = (line.partition(":") for line in self.head.split("\r\n")[1:])
        return next((value.strip() for key, _, value in lines if key.lower() == name), None)

    def write(self, data: bytes) -> None:
        self._sock.sendall(data)
        self.sent += len(data)

    def begin(self, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        lines = [f"HTTP/1.1 {status} Said", *(f"{name}: {value}" for name, value in (headers or {}).items())]
        self._sock.sendall("\r\n".join([*lines, "connection: close", "", ""]).encode())

    def wait(self) -> None:
        """Until the other side closes, or the server stops."""
        self._sock.settimeout(0.05)
        while not self.server.stopping.is_set():
            with contextlib.suppress(TimeoutError):
                if not self._sock.recv(1024):
                    self.gone.set()
                    return


def page(content: bytes, kind: str = "image/png", **headers: str) -> Page:
    def answer(visit: Visit) -> None:
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        visit.begin(200, {"content-type": kind, "content-length": str(len(content)), **more})
        visit.write(content)

    return answer


def redirect(location: str, status: int = 302) -> Page:
    return lambda visit: visit.begin(status, {"location": location, "content-length": "0"})


def endless(visit: Visit) -> None:
    visit.begin(200, {"content-type": "image/png"})
    visit.write(PNG)
    while not visit.server.stopping.is_set():
        visit.write(bytes(64 * 1024))


def large(visit: Visit) -> None:
    """Says that it is large, and sends nothing of it."""
    visit.begin(200, {"content-type": "image/png", "content-length": str(10 << 30)})
    visit.wait()


def silent(visit: Visit) -> None:
    visit.wait()


def dripping(visit: Visit) -> None:
    visit.begin(200, {"content-type": "image/png"})
    visit.write(PNG)
    visit.wait()


def bomb(visit: Visit) -> None:
    """A megabyte that becomes a thousand."""
    packer = zlib.compressobj(9, wbits=31)
    packed = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(256)), packer.flush()])
    visit.begin(200, {"content-type": "image/png", "content-encoding": "gzip", "content-length": str(len(packed))})
    visit.write(packed)


def zipped(visit: Visit) -> None:
    page(gzip.compress(PNG), content_encoding="gzip")(visit)


def cut(visit: Visit) -> None:
    visit.begin(200, {"content-type": "image/png", "content-length": "100000"})
    visit.write(PNG)


class FileServer:
    """`pages`: path without query -> what happens. Anything else is a 404."""

    def __init__(
        self, pages: Mapping[str, Page], host: str = "127.0.0.2", tls: ssl.SSLContext | None = None, port: int = 0
    ) -> None:
        self.pages, self.visits = dict(pages), list[Visit]()
        self.connections = 0
        self.stopping = threading.Event()
        self._tls = tls
        self._socket = socket.create_server((host, port))
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://{self.host}:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(20)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(sock)
            if self._tls is not None:
                sock = stack.enter_context(self._tls.wrap_socket(sock, server_side=True))
            head = b""
            while b"\r\n\r\n" not in head:
                more = sock.recv(4096)
                if not more:
                    return
                head += more
            visit = Visit(self, sock, head)
            self.visits.append(visit)
            answer = self.pages.get(visit.target.partition("?")[0])
            try:
                if answer is None:
                    visit.begin(404, {"content-length": "0"})
                else:
                    answer(visit)
            except OSError:
                visit.gone.set()

    def stop(self) -> None:
        self.stopping.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            thread.join(10)


@contextlib.contextmanager
def serving(
    pages: Mapping[str, Page], host: str = "127.0.0.2", **options: ssl.SSLContext | None
) -> Iterator[FileServer]:
    server = FileServer(pages, host, options.get("tls"))
    try:
        yield server
    finally:
        server.stop()
