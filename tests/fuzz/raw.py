"""Raw bytes to a port and a strict reading of what comes back."""

from __future__ import annotations

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

HANG = 20.0  # seconds without a byte and without an end after which a connection counts as hung
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [ -~]+")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?([\t -~\x80-\xff]*)")


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict[str, Any]:
        """The error, after a look at whether it is one in OpenAI's form."""
        assert self.headers["content-type"].startswith("application/json"), self
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"], self
        return error


def converse(port: int, data: bytes) -> bytes:
    """Sends and reads to the end. Raises: AssertionError when the end does not come."""
    with socket.create_connection(("127.0.0.1", port), timeout=HANG) as sock:
        received = b""
        try:
            sock.sendall(data)
            while part := sock.recv(1 << 16):
                received += part
        except TimeoutError:
            raise AssertionError(f"hung after {received[-200:]!r}, sent {data!r}") from None
        except OSError:
            pass  # reset: an end as well
        return received


def converse_all(port: int, payloads: list[bytes]) -> list[bytes]:
    """The same on as many connections at once: most of them end by the gateway's time limits."""
    with ThreadPoolExecutor(len(payloads)) as pool:
        return list(pool.map(lambda data: converse(port, data), payloads))


def replies(received: bytes) -> list[Reply]:
    """Every answer in order. Raises: AssertionError for anything that is not well-formed HTTP/1.1; an answer to a
    connection that was cut may be the last one and incomplete."""
    found = []
    while received:
        head, end, rest = received.partition(b"\r\n\r\n")
        assert end, f"a head without an end: {received[:200]!r}"
        first, *lines = head.split(b"\r\n")
        status = _STATUS.fullmatch(first)
        assert status, f"no status line: {first!r}"
        headers: dict[str, str] = {}
        for line in lines:
            field = _FIELD.fullmatch(line)
            assert field, f"no header: {line!r}"
            name = field[1].decode().lower()
            assert name not in headers, f"{name} twice"
            headers[name] = field[2].decode("latin-1").strip()
        body, received = _body(int(status[1]), headers, rest)
        found.append(Reply(int(status[1]), headers, body))
    return found


def _body(status: int, headers: dict[str, str], rest: bytes) -> tuple[bytes, bytes]:
    if status < 200 or status in (204, 304):
        return b"", rest
    if "content-length" in headers:
        assert "transfer-encoding" not in headers
        length = int(headers["content-length"])
        assert len(rest) >= length, "an answer shorter than it says"
        return rest[:length], rest[length:]
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while True:
            size, end, rest = rest.partition(b"\r\n")
            assert end, "chunks without an end"
            length = int(size, 16)
            assert rest[length : length + 2] == b"\r\n"
            body, rest = body + rest[:length], rest[length + 2 :]
            if length == 0:
                return body, rest
    assert headers.get("connection") == "close"
    return rest, b""
