"""JSON that is large because of a few giant strings, such as images in base64, read without holding up other threads.

orjson keeps the interpreter until it has read the whole text, and everybody waits. So the giant strings are cut out and
read in pieces, with a pause after each, and the small rest goes through orjson with words in their places. The result
is what orjson makes of the whole text. Whatever cannot be cut is read whole.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import orjson

LARGE = 256 * 1024  # bytes of a text from which on it is read here, in a thread
_GIANT = 64 * 1024  # bytes of a string that is cut out
_PIECE = 256 * 1024  # bytes read at once: about 0.1 ms
_PAUSE = 20e-6  # seconds; a shorter one ends before another thread has woken up
_WORTH = 4  # a rest larger than this part of the whole is not worth the trouble

# No escape and no character reaches over the end of a match: behind twelve bytes without a backslash, as long as the
# longest escape, which is a surrogate pair, or behind any other escape.
_BREAK = re.compile(
    rb"[^\\]{12}(?![\x80-\xbf])"
    rb"|[^\\]\\(?:[\"\\/bfnrt]|u(?:[0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))"
)
_BACKSLASHES = re.compile(rb"\\*")
_BREAK_WITHIN = 4096  # bytes behind the place where a piece should end


def load(text: bytes, check: Callable[[bytes], None], giant: int = _GIANT, piece: int = _PIECE) -> tuple[Any, bytes]:
    """The document in `text`; and the text again, maybe with blanks for its escaped quotes: what is quoted in it and
    where its members lie is the same.

    Args:
        check: called before anything is parsed with what will be, giant strings left out; may raise.
        giant: bytes of a string that is cut out, at least 2.
        piece: bytes of it that are read at once.

    Raises: orjson.JSONDecodeError, as orjson would for the text.
    """
    plain = text
    outline, strings = _cut(text, plain, giant, piece)
    if not strings and b"\\" in text:
        plain = _without_escapes(text, piece)
        outline, strings = _cut(text, plain, giant, piece)
    if strings:
        check(outline)
        try:
            document = orjson.loads(outline)
        except orjson.JSONDecodeError:
            strings.clear()  # what was cut is no string, or the text is not valid
        else:
            if _put_back(document, strings) == len(strings):
                return document, plain
    check(plain)
    return orjson.loads(text), plain


def _without_escapes(text: bytes, size: int) -> bytes:
    """Blanks for escaped quotes and backslashes, so that each quote that is left begins or ends a string."""
    pieces, start = [], 0
    while start < len(text):
        run = _BACKSLASHES.match(text, min(start + size, len(text)) - 1)
        stop = run.end() + 1 if run is not None else len(text)
        pieces.append(text[start:stop].replace(b"\\\\", b"  ").replace(b'\\"', b"  "))
        start = stop
        time.sleep(_PAUSE)
    return b"".join(pieces)


def _cut(text: bytes, plain: bytes, giant: int, piece: int) -> tuple[bytes, dict[str, str]]:
    """The text without its giant strings, and those by the words that stand for them; none if it is not worth while.
    `plain`: the text, or what stands for it when quotes are looked for."""
    gaps = list(_gaps(plain, giant))
    if sum(end - start for start, end in gaps) * _WORTH < len(text) * (_WORTH - 1):
        return text, {}
    secret = os.urandom(16).hex()  # no text can have it in it by intent
    strings: dict[str, str] = {}
    outline: list[bytes] = []
    position = 0
    for number, (start, end) in enumerate(gaps):
        word = f"{secret}{number}"
        try:
            strings[word] = _read(text, start, end, piece)
        except ValueError:
            return text, {}
        outline += (text[position:start], word.encode())
        position = end
    outline.append(text[position:])
    return b"".join(outline), strings


def _gaps(text: bytes, least: int) -> Iterator[tuple[int, int]]:
    """Start and end of the stretches between two quotes that have `least` bytes. Looks only where such a one may be."""
    step = least // 2
    end = text.find(b'"')
    while 0 <= end < len(text) - step:
        position = end + step
        start = text.rfind(b'"', end, position) + 1
        end = text.find(b'"', position)
        if end - start >= least:
            yield start, end


def _read(text: bytes, start: int, end: int, size: int) -> str:
    """The string between two quotes. Raises: ValueError if it is none, or has no place to break it."""
    view = memoryview(text)
    read: list[str] = []
    plain = start  # from here on each byte is a character, and need not be kept twice meanwhile
    while start < end:
        stop = end
        if end - start > size + _BREAK_WITHIN:
            found = _BREAK.search(text, start + size, start + size + _BREAK_WITHIN)
            if found is None:
                raise ValueError("no place for a break")
            stop = found.end()
        piece = orjson.loads(b'"%b"' % text[start:stop])
        if len(piece) != stop - start:
            read += (str(view[plain:start], "ascii"), piece)
            plain = stop
        start = stop
        time.sleep(_PAUSE)
    read.append(str(view[plain:end], "ascii"))
    return "".join(read) if len(read) > 1 else read[0]


def _put_back(document: Any, strings: dict[str, str]) -> int:
    """Puts the strings in the places of their words. Returns how many: a word in a key, in a longer string or in a
    value that a later one has replaced is none."""
    count, containers = 0, [document]
    while containers:
        container = containers.pop()
        if isinstance(container, dict):
            entries: Any = container.items()
        elif isinstance(container, list):
            entries = enumerate(container)
        else:
            continue
        for place, value in entries:
            if isinstance(value, str):
                if value in strings:
                    container[place] = strings[value]
                    count += 1
            elif isinstance(value, dict | list):
                containers.append(value)
    return count
