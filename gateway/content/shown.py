"""How much of a prompt or answer is shown, and in which form."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from gateway.masking import mask
from gateway.masking.documents import mask_document

_ENTRY = 16  # bytes that an entry of a list takes at least: a thousand empty messages are not shown either
_LOOK_AHEAD = 4096  # characters behind the cut that are read, lest something is missed as only half of it is there
_LONGEST_WORD = 200  # characters of a name
_MEDIA: Final = re.compile(r"data:([0-9A-Za-z.+/-]{1,80})?")


class Shown:
    """One prompt or answer on its way into a record: everything of it that is text goes through here."""

    def __init__(self, limit: int, counts: Counter[str] | None) -> None:
        """`limit`: bytes of text. `counts`: what was masked; None where everything is shown as it is."""
        self.room, self.left_out = limit, 0  # bytes
        self._counts = counts

    def text(self, value: str) -> str:
        size = len(value) if value.isascii() else len(value.encode(errors="replace"))
        if size > self.room:
            return self._cut(value, size)
        self.room -= size
        if self._counts is None:
            return value
        document = mask_document(value, self._counts)
        return mask(value, self._counts)[0] if document is None else document

    def word(self, value: object) -> str:
        """A name or the like: a string of which only the beginning can matter."""
        return self.text(value[:_LONGEST_WORD]) if isinstance(value, str) else ""

    def entries(self, values: Iterable[Any]) -> Iterable[Any]:
        """The values as long as there is room; what is left then is counted."""
        for value in values:
            if self.room <= 0:
                self.left_out += _size(value)
            else:
                self.room -= _ENTRY
                yield value

    def _cut(self, value: str, size: int) -> str:
        room = max(self.room, 0)
        self.room = 0
        most = min(room, len(value))
        stop = most if value.isascii() else len(value[:most].encode(errors="replace")[:room].decode(errors="ignore"))
        if self._counts is None or stop == 0:
            shown, reached = value[:stop], stop
        else:
            shown, reached = mask(value[: stop + _LOOK_AHEAD], self._counts, stop)
        self.left_out += len(value[reached:].encode(errors="replace"))
        return shown


def media(kind: str, data: str) -> dict[str, Any]:
    """What is shown of a picture or a sound: its type and its size in bytes. Links may hold secrets: none is shown."""
    found = _MEDIA.match(data)
    if found is None and "://" in data[:16]:
        return {"media": "link"}
    encoded = data[found.end() :].partition(",")[2] if found is not None else data
    return {"media": (found and found[1]) or kind, "bytes": len(encoded) * 3 // 4}


def _size(value: object) -> int:
    """Bytes of all text in a value of a JSON document."""
    size, left = 0, [value]
    while left:
        match left.pop():
            case str(text):
                size += len(text.encode(errors="replace"))
            case dict(members):
                left.extend(members.values())
            case list(entries):
                left.extend(entries)
    return size
