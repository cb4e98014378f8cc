"""A client that sees bytes: one connection, requests as written, answers as they arrive. And a strict SSE parser."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

PATIENCE = 30.0  # seconds for any single read


class Answer:
    """One answer while it arrives. `body` is what has come so far, without the transfer encoding."""

    def __init__(self, wire: Wire, method: str) -> None:
        self._wire = wire
        self.informational: list[int] = []
        self.status, self.headers = self._head()
        while 100 <= self.status < 200:
            self.informational.append(self.status)
            self.status, self.headers = self._head()
        self.body = b""
        self.chunks = 0  # of the transfer encoding
        self.complete = method == "HEAD" or self.status == 204 or self.header("content-length") == "0"

    def _head(self) -> tuple[int, list[tuple[str, str]]]:
        first, *lines = self._wire.until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        return int(first.split(" ")[1]), headers

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    def more(self) -> bytes:
        """The next part of the body; b"" at its end, clean (`complete`) or not."""
        if self.complete:
            return b""
        try:
            part = self._part()
        except (EOFError, ConnectionError):
            self.complete = self.header("content-length") is None and self.header("transfer-encoding") is None
            return b""
        self.body += part
        return part

    def _part(self) -> bytes:
        wire = self._wire
        if (self.header("transfer-encoding") or "").lower() == "chunked":
            size = int(wire.until(b"\r\n"), 16)
            part = wire.exactly(size + 2)[:-2]
            self.complete = size == 0
            self.chunks += 1
            return part
        length = self.header("content-length")
        part = wire.some(1 << 20 if length is None else int(length) - len(self.body))
        self.complete = length is not None and len(self.body) + len(part) == int(length)
        return part

    def rest(self) -> Answer:
        while self.more():
            pass
        return self

    def until(self, events: int) -> Answer:
        """Reads until that many data events have come."""
        while len(self.events()) < events and self.more():
            pass
        return self

    # --- what it says
    def json(self) -> Any:
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str) and error["message"]
        return error

    def events(self) -> list[str]:
        return [event.data for event in parse(self.body).events]

    def chunks_json(self) -> list[dict[str, Any]]:
        """Every event but `[DONE]`, as JSON: raises when one is not."""
        return [json.loads(event) for event in self.events() if event != "[DONE]"]

    def choices(self) -> Iterator[dict[str, Any]]:
        return (choice for chunk in self.chunks_json() for choice in chunk.get("choices", ()))

    def text(self, index: int = 0) -> str:
        return "".join(
            choice["delta"].get("content") or "" for choice in self.choices() if choice["index"] == index
        )

    def finishes(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices() if choice.get("finish_reason")]

    def stream_errors(self) -> list[dict[str, Any]]:
        return [chunk["error"] for chunk in self.chunks_json() if "error" in chunk]

    def ended_well(self) -> bool:
        return self.complete and self.events()[-1:] == ["[DONE]"] and not self.stream_errors()


class Wire:
    """One client connection."""

    def __init__(self, port: int, *, receive_buffer: int | None = None) -> None:
        self.sock = socket.socket()
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        """Sends a request and returns with the head of its answer."""
        self.send(request(method, path, body, **options))
        return self.answer(method)

    def answer(self, method: str = "POST") -> Answer:
        return Answer(self, method)

    def close(self) -> None:
        self.sock.close()

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def at_end(self) -> bool:
        """Whether the server has closed; waits for either that or a byte."""
        if self._buffer:
            return False
        try:
            return not self._fill()
        except ConnectionError:
            return True

    # --- reading
    def _fill(self) -> bool:
        data = self.sock.recv(1 << 18)
        self._buffer += data
        return bool(data)

    def until(self, mark: bytes) -> bytes:
        """Raises: EOFError."""
        while (place := self._buffer.find(mark)) < 0:
            if not self._fill():
                raise EOFError(bytes(self._buffer[:200]))
        found = bytes(self._buffer[:place])
        del self._buffer[: place + len(mark)]
        return found

    def exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            if not self._fill():
                raise EOFError(bytes(self._buffer[:200]))
        return self._take(size)

    def some(self, most: int) -> bytes:
        if not self._buffer and not self._fill():
            raise EOFError
        return self._take(most)

    def _take(self, most: int) -> bytes:
        found = bytes(self._buffer[:most])
        del self._buffer[:most]
        return found


def request(
    method: str,
    path: str,
    body: Any = None,
    *,
    key: str | None = None,
    headers: Sequence[str] = (),
    version: str = "1.1",
    length: int | None = None,
) -> bytes:
    """The bytes of a request. `length` overrides what content-length says."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    lines = [f"{method} {path} HTTP/{version}", "host: localhost", *headers]
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    if body is not None or method == "POST":
        lines += ["content-type: application/json", f"content-length: {len(data) if length is None else length}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


# --- server-sent events, by the letter of the standard
@dataclass
class Event:
    data: str
    type: str
    last_id: str


@dataclass
class Stream:
    events: list[Event] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    fields: set[str] = field(default_factory=set)


def parse(body: bytes) -> Stream:
    """What a conforming client makes of a body. An event with empty data is dispatched when there was a data line."""
    found = Stream()
    data: list[str] = []
    type_, last_id = "", ""
    text = body.decode().replace("\r\n", "\n").replace("\r", "\n")
    for line in text.split("\n")[:-1]:
        if not line:
            if data:
                found.events.append(Event("\n".join(data), type_ or "message", last_id))
            data, type_ = [], ""
            continue
        if line.startswith(":"):
            found.comments.append(line[1:].strip())
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        found.fields.add(name)
        if name == "data":
            data.append(value)
        elif name == "event":
            type_ = value
        elif name == "id":
            last_id = value
    return found
