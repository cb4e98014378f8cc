"""The taps for tenants with a tool policy: as the others, but calls that are not allowed are taken out or end it.

An ordinary chunk takes the short way here too: one look more tells that it holds no call.
"""

from __future__ import annotations

from typing import Any

import orjson

from backends.base import JSON, Backend, ChunkFixer
from backends.failures import Failure, FailureKind
from gateway.dialect_tap import FixingTap
from gateway.errors import GatewayError, ToolCallNotAllowed
from gateway.sse import StreamTap
from gateway.tools.calls import CallScreen, says_nothing
from gateway.types import ToolPolicy

# A key's raw bytes cannot be part of a text, whose quotation marks are escaped. Some engines write the keys into every
# chunk, with a null.
_KEYS = tuple((b'"%b"' % key, b'"%b":null' % key, b'"%b": null' % key) for key in (b"tool_calls", b"function_call"))
_REFUSED = Failure(FailureKind.BROKEN, "The answer holds a call that is not allowed.")


def tap_for(
    policy: ToolPolicy, backend: Backend, fixer: ChunkFixer | None, asked: str, *, strip_usage: bool, max_event: int
) -> StreamTap:
    """`fixer`: of the engine's stream, if that has to be rewritten."""
    if fixer is None:
        return ToolTap(policy, asked, strip_usage=strip_usage, max_event=max_event)
    return FixingToolTap(policy, backend, fixer, asked, strip_usage=strip_usage, max_event=max_event)


def mentions_calls(events: bytes) -> bool:
    """Whether whole events hold the key of a call, with something under it."""
    return any(
        key in events and events.count(key) != events.count(null) + events.count(spaced) for key, null, spaced in _KEYS
    )


class Screening(StreamTap):
    """What both have in common. Without slots, so that it goes with any tap."""

    __slots__ = ()
    _screen: CallScreen

    @property
    def stripped(self) -> int:
        """Calls that were taken out."""
        return self._screen.stripped

    def error(self) -> GatewayError:
        return ToolCallNotAllowed() if self._screen.refused else super().error()

    def _screened(self, chunk: JSON) -> bool | None:
        """Whether the chunk has changed; None when nothing of it goes on."""
        try:
            changed = self._screen.read(chunk)
        except ToolCallNotAllowed:
            self.failure = _REFUSED
            return None
        return None if changed and says_nothing(chunk) else changed

    def _rendered(self, chunk: JSON) -> bytes:
        if "model" in chunk:
            chunk["model"] = self.asked
        return b"data: %b\n\n" % orjson.dumps(chunk)


class ToolTap(Screening):
    """For streams that go on as they came."""

    __slots__ = ("_screen",)

    def __init__(self, policy: ToolPolicy, asked: str, **options: Any) -> None:
        super().__init__(asked, **options)
        self._screen = CallScreen(policy)

    def feed(self, data: bytes) -> bytes:
        if self._prefix and mentions_calls(data):
            self._prefix = b""  # no short way; it is learnt again from what follows
        return super().feed(data)

    def _is_ordinary(self, block: bytes) -> bool:
        return super()._is_ordinary(block) and not mentions_calls(block)

    def _named(self, block: bytes, chunk: JSON, simple: bool) -> bytes:
        changed = self._screened(chunk)
        if changed is None:
            return b""
        return self._rendered(chunk) if changed else super()._named(block, chunk, simple)


class FixingToolTap(Screening, FixingTap):
    """For streams that are rewritten for their engine's sake."""

    __slots__ = ("_screen",)

    def __init__(
        self, policy: ToolPolicy, backend: Backend, fixer: ChunkFixer, asked: str, *, strip_usage: bool, max_event: int
    ) -> None:
        FixingTap.__init__(self, backend, fixer, asked, strip_usage=strip_usage, max_event=max_event)
        self._screen = CallScreen(policy)

    def _passed(self, chunk: JSON) -> bytes:
        if self.failure is not None or not self._book(chunk) or self._screened(chunk) is None:
            return b""
        return self._rendered(chunk)
