"""Where the top-level members of a JSON object lie in its bytes, so that one value can change and no other byte does.

The text must already be known to be valid JSON (a parser accepted it): these functions find their way, they do not
check. Strings are jumped over with `bytes.find`, so a megabyte of base64 costs next to nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import orjson

EXACT_ABOVE = 256 * 1024  # bytes; counting every key in a larger text costs more than finding the members
_STRUCTURE = re.compile(rb'["\[\]{}]')
_SPACE = re.compile(rb"[ \t\n\r]*")
_SCALAR = re.compile(rb"[^,}\]\s]+")


class Member(NamedTuple):
    """One `"key": value` of an object, as offsets into its bytes."""

    key: str
    start: int  # of the opening quote of the key
    value: int
    end: int  # just after the value


def members(text: bytes, at: int = 0) -> list[Member]:
    """The members of the object that begins at or after `at`, in order, repeated keys included."""
    return list(walk(text, at))


def walk(text: bytes, at: int = 0) -> Iterator[Member]:
    """The same one by one, for those who need only the first few."""
    position = text.index(b"{", at) + 1
    while True:
        position = _skip_space(text, position)
        if text[position] == 0x7D:  # }
            return
        if text[position] == 0x2C:  # ,
            position = _skip_space(text, position + 1)
        start = position
        key_end = _string_end(text, start)
        value = _skip_space(text, _skip_space(text, key_end) + 1)  # over the colon
        position = _value_end(text, value)
        yield Member(orjson.loads(text[start:key_end]), start, value, position)


def text_span(text: bytes, key: str) -> tuple[int, int]:
    """Offsets of the text, quotes included, that is the value of the top-level member `key`, a plain word.

    The object has to have the member. Raises: KeyError if that is seen not to be so.
    """
    quoted = b'"%b"' % key.encode()
    if len(text) <= EXACT_ABOVE and text.count(quoted) == 1 and b"\\u00" not in text:
        # It occurs once, and no key is spelled with escapes: so this is the one at the top.
        start = _skip_space(text, _skip_space(text, text.index(quoted) + len(quoted)) + 1)
        end = text.find(b'"', start + 1)
        if text[start] == 0x22 and text.find(b"\\", start, end) < 0:
            return start, end + 1
    for member in walk(text):
        if member.key == key:
            return member.value, member.end
    raise KeyError(key)


def elements(text: bytes, at: int = 0) -> Iterator[tuple[int, int]]:
    """Start and end of each value of the array that begins at or after `at`."""
    position = text.index(b"[", at) + 1
    while True:
        position = _skip_space(text, position)
        if text[position] == 0x5D:  # ]
            return
        if text[position] == 0x2C:  # ,
            position = _skip_space(text, position + 1)
        start, position = position, _value_end(text, position)
        yield start, position


def splice(text: bytes, changes: Mapping[str, bytes | None], found: list[Member] | None = None) -> bytes:
    """The object with some top-level values replaced, added (in front) or, for None, taken out.

    Every other byte stays as it was. `changes` maps keys to JSON text.
    """
    return b"".join(pieces(text, text, changes, found))


def pieces(
    text: bytes, view: bytes | memoryview, changes: Mapping[str, bytes | None], found: list[Member] | None = None
) -> list[bytes | memoryview]:
    """The same in pieces. `view`: the text, or a memoryview of it where its parts are not to be copied."""
    found = members(text) if found is None else found
    opening = text.index(b"{") + 1
    added = [
        orjson.dumps(key) + b":" + value for key, value in changes.items() if value is not None and not _has(found, key)
    ]
    kept = [member for member in found if not (member.key in changes and changes[member.key] is None)]
    if len(kept) != len(found):  # taking members out moves commas: rebuild from the members' own bytes
        result: list[bytes | memoryview] = [view[:opening], b",".join(added)]
        comma = b"," if added else b""
        for member in kept:
            change = changes.get(member.key)
            if change is None:
                result += (comma, view[member.start : member.end])
            else:
                result += (comma, view[member.start : member.value], change)
            comma = b","
        result.append(view[found[-1].end :])
        return result
    result, position = [view[:opening]], opening
    if added:
        result.append(b",".join(added) + (b"," if found else b""))
    for member in found:
        change = changes.get(member.key)
        if change is not None:
            result += (view[position : member.value], change)
            position = member.end
    result.append(view[position:])
    return result


def _has(found: list[Member], key: str) -> bool:
    return any(member.key == key for member in found)


def _skip_space(text: bytes, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _string_end(text: bytes, start: int) -> int:
    """Just after the closing quote of the string that opens at `start`."""
    position = start + 1
    while True:
        quote = text.index(b'"', position)
        slashes = 0
        while text[quote - 1 - slashes] == 0x5C:
            slashes += 1
        if slashes % 2 == 0:
            return quote + 1
        position = quote + 1


def _value_end(text: bytes, start: int) -> int:
    first = text[start]
    if first == 0x22:
        return _string_end(text, start)
    if first not in b"[{":
        match = _SCALAR.match(text, start)
        return match.end() if match else start
    depth, position = 0, start
    while True:
        match = _STRUCTURE.search(text, position)
        if match is None:
            raise ValueError("unbalanced JSON")
        mark = text[match.start()]
        if mark == 0x22:
            position = _string_end(text, match.start())
            continue
        position = match.end()
        depth += 1 if mark in b"[{" else -1
        if depth == 0:
            return position
