"""Token bytes to text that is safe to send: whole characters only, and never a piece of a stop string. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StopFilter:
    """Finds stop strings in text that arrives in pieces.

    However the text is cut, what is emitted is the same: everything before the stop string that is complete first.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that can be sent now. After a match `stopped` is true and nothing more comes out."""
        if not self._stops:
            return text
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = self._beginning_of_a_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _beginning_of_a_stop(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string could begin."""
        longest = min(max(map(len, self._stops)) - 1, len(text))
        for size in range(longest, 0, -1):
            tail = text[len(text) - size :]
            if any(len(stop) > size and stop.startswith(tail) for stop in self._stops):
                return size
        return 0


class TextAssembler:
    """Bytes of tokens in, text out.

    Characters whose bytes straddle tokens are held until they are complete. U+FFFD stands only for bytes that are not
    UTF-8 however one waits, and for a character that the end of generation cut in two.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._filter = StopFilter(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was reached."""
        return self._filter.stopped

    def push(self, piece: bytes) -> str:
        """Text that became safe with this token, possibly empty."""
        return self._filter.push(self._decoder.decode(piece))

    def finish(self) -> str:
        """The rest. Call once, when no token follows."""
        return self._filter.push(self._decoder.decode(b"", final=True)) + self._filter.flush()
