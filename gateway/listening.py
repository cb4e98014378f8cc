"""The gateway's port, and the files a process may have open."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import sys

from gateway.config import StartupError

BACKLOG = 4096
MOST_FILES = 1_048_576
BALANCED = sys.platform == "linux"  # elsewhere sockets of one port do not share connections out


def raise_file_limit() -> None:
    """Every stream takes two sockets; the usual soft limit of 1024 files would be reached by 500 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_FILES)), hard))


def listen(host: str, port: int) -> socket.socket:
    """Raises: StartupError."""
    listener = _bound(host, port)
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    return listener


def listen_together(host: str, port: int, workers: int) -> list[socket.socket]:
    """A socket for each worker, all on one port: the kernel shares connections out between them.

    Whoever owns the sockets keeps them open, so what was accepted for a worker that has died waits for the next one.

    Raises: StartupError.
    """
    if not BALANCED:
        return [listen(host, port)] * workers
    # A socket that shares its port would also share that of another gateway that was started by mistake.
    listen(host, port).close()
    sockets: list[socket.socket] = []
    try:
        for _ in range(workers):
            sockets.append(_bound(host, port, shared=True))
            sockets[-1].listen(BACKLOG)
    except OSError as error:
        for one in sockets:
            one.close()
        raise _cannot_listen(host, port, error) from None
    return sockets


def leave(listener: socket.socket) -> None:
    """Takes a worker's socket out of those of its port, so that the others get its connections: those that wait are
    reset. It comes back by `listen`, as every server calls it."""
    # A second time would not be harmless: Linux then passes the shutdown on to connections that are accepted later.
    if BALANCED and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.shutdown(socket.SHUT_RDWR)


def _bound(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Raises: StartupError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    listener.setblocking(False)
    return listener


def _cannot_listen(host: str, port: int, error: OSError | OverflowError) -> StartupError:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return StartupError(f"port {port} on {host} is taken: stop what uses it, or choose another with --port")
    if number == errno.EACCES:
        return StartupError(f"no permission to listen on port {port}: choose one above 1023 with --port")
    return StartupError(f"cannot listen on {host}:{port}: {error}; choose an address of this machine")
