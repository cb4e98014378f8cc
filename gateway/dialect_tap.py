"""The tap for engines whose streams have to be rewritten. It parses every chunk, so it is used only where it must be.

The adapter says what a chunk becomes; framing, usage, ends and errors are read as in every other stream.
"""

from __future__ import annotations

import orjson

from backends.base import Backend, ChunkFixer
from backends.failures import Failure, FailureKind
from gateway.sse import StreamTap, read_usage


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
        try:
            chunk = orjson.loads(text)
        except orjson.JSONDecodeError:
            chunk = None
        if not isinstance(chunk, dict):
            self.failure = Failure(FailureKind.BROKEN, "The engine sent an event that is not a JSON object.")
            return b""
        if chunk.get("error") or chunk.get("object") == "error":
            self.failure = self._backend.read_failure(0, text)
            return b""
        return b"".join([self._passed(fixed) for fixed in self._fixer.fix(chunk)])

    def _passed(self, chunk: dict[str, object]) -> bytes:
        choices = chunk.get("choices") or []
        usage = read_usage(chunk.get("usage"))
        if usage is not None:
            self.usage = usage
            if not choices and self.strip_usage:
                return b""
        if self._read_choices(choices):
            self.tokens += 1
            self.started = True
        self.events += 1
        if "model" in chunk:
            chunk["model"] = self.asked
        return b"data: %b\n\n" % orjson.dumps(chunk)
