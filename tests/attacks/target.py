"""What is attacked, and the tally of how each attack ended."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.doubles.engine import Engine
from tests.e2e.harness import Gateway, Lab, base_config, chat, replica

HERE = "127.0.0.1"  # well-behaved callers come from here
HANG = 20.0  # seconds without a byte and without an end: a connection that hangs

SERVER = {
    "header_timeout": "1s",
    "body_timeout": "1s",
    "idle_timeout": "2s",
    "max_body": "1MiB",
    "max_connections": 300,
    "max_connections_per_address": 120,
}


class Tally:
    """How the attempts of each class ended."""

    def __init__(self) -> None:
        self._endings: dict[str, Counter[str]] = {}

    def add(self, kind: str, ending: str, times: int = 1) -> None:
        self._endings.setdefault(kind, Counter())[ending] += times

    def table(self) -> str:
        rows = [("class of attack", "attempts", "how they ended")]
        for kind, endings in self._endings.items():
            how = ", ".join(f"{count} x {ending}" for ending, count in sorted(endings.items()))
            rows.append((kind, str(endings.total()), how))
        first = max(len(row[0]) for row in rows)
        return "\n".join(f"{kind:{first}}  {count:>8}  {how}" for kind, count, how in rows)


class Target:
    """A gateway with a well-behaved engine behind the model `m`."""

    def __init__(self, folder: Path, tally: Tally, **options: Any) -> None:
        self.tally = tally
        self.gateway = Gateway(folder, base_config({}, [], logging={"level": "debug"}), **options)
        self.lab = Lab(self.gateway)
        self.engine: Engine = self.lab.engine()
        self.gateway.configure(self.config())
        self.process = psutil.Process(self.gateway.process.pid)

    def config(self, models: dict[str, Any] | None = None, **server: Any) -> dict[str, Any]:
        return self.lab.config(
            {"m": [replica(self.engine)]} | (models or {}), server=SERVER | server, logging={"level": "debug"}
        )

    @property
    def port(self) -> int:
        return self.gateway.port

    @property
    def key(self) -> str:
        return self.lab.key

    def prompts(self) -> list[str]:
        return [entry.json()["messages"][0]["content"] for entry in self.engine.requests]

    def works(self) -> None:
        """An ordinary caller is served. Raises: AssertionError."""
        before = len(self.engine.requests)
        answer = self.lab.call(chat(messages=[{"role": "user", "content": "after"}]))
        assert answer.status == 200 and answer.json()["choices"] and self.prompts()[before:] == ["after"]

    def at_rest(self) -> bool:
        return self.lab.at_rest()

    @contextmanager
    def bounded(self, mebibytes: int) -> Iterator[None]:
        """Memory may grow by so much, and no more, by what happens inside."""
        before = self.process.memory_info().rss
        yield
        grown = (self.process.memory_info().rss - before) >> 20
        assert grown <= mebibytes, f"memory grew by {grown} MiB"

    def close(self) -> None:
        self.lab.close()
        self.gateway.stop()


def connect(port: int, source: str = HERE) -> socket.socket:
    sock = socket.socket()
    sock.settimeout(HANG)
    sock.bind((source, 0))
    sock.connect((HERE, port))
    return sock


def pour(sock: socket.socket, start: bytes, block: bytes, times: int) -> tuple[int, bytes]:
    """Sends `start` and `block` again and again until it is stopped, reads to the end and closes. Returns bytes taken,
    and what was answered. Raises: AssertionError when the end does not come."""
    taken, received = 0, b""
    with sock:
        with contextlib.suppress(OSError):
            sock.sendall(start)
            for _ in range(times):
                sock.sendall(block)
                taken += len(block)
        try:
            while data := sock.recv(1 << 16):
                received += data
        except TimeoutError:
            raise AssertionError(f"hung after {taken} bytes, {received[:100]!r}") from None
        except OSError:
            pass  # reset: an end as well
    return taken, received


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def ending(received: bytes) -> str:
    """In a word: the status of the only answer, or that there was none."""
    return received.split(b" ", 2)[1].decode() if received.startswith(b"HTTP/1.1 ") else "closed"
