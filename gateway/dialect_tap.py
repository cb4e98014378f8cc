"""The tap for engines whose streams have to be rewritten. It parses every chunk, so it is used only where it must be.

The adapter says what a chunk becomes; framing, usage, ends and errors are read as in every other stream.
"""

from __future__ import annotations

import orjson

from backends.base import JSON, Backend, ChunkFixer
from backends.failures import Failure
from gateway.sse import StreamTap


class FixingTap(StreamTap):
    """As `StreamTap`, with each event rewritten by the adapter's `fixer`; it never takes the short way."""

    __slots__ = ("_backend", "_fixer", "_lines")

    def __init__(self, backend: Backend, fixer: ChunkFixer, asked: str, *, strip_usage: bool, max_event: int) -> None:
        super().__init__(asked, strip_usage=strip_usage, max_event=max_event)
        self._backend, self._fixer = backend, fixer
        self._lines = backend.stream_type == b"application/x-ndjson"

    def feed(self, data: bytes) -> bytes:
        # A document a line: strings hold no raw newline, so an empty line behind each makes events of them.
        return super().feed(data.replace(b"\n", b"\n\n") if self._lines else data)

    def _block(self, block: bytes) -> bytes:
        return self._event(block, block, simple=True) if self._lines else super()._block(block)

    def _event(self, block: bytes, text: bytes, *, simple: bool) -> bytes:
        if text.strip() == b"[DONE]":
            return self._last(block)
        chunk = self._parse(text)
        return b"" if chunk is None else b"".join([self._passed(fixed) for fixed in self._fixer.fix(chunk)])

    def _read_failure(self, text: bytes) -> Failure:
        return self._backend.read_failure(0, text)

    def _passed(self, chunk: JSON) -> bytes:
        if not self._book(chunk):
            return b""
        if "model" in chunk:
            chunk["model"] = self.asked
        return b"data: %b\n\n" % orjson.dumps(chunk)
