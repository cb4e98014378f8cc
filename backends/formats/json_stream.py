"""A JSON object read pair by pair from a file, in memory that does not grow with it.

A safetensors header may be 100 MB, and a hostile one of that size would take gigabytes if it were parsed whole.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

MAX_KEY = 1 << 16  # characters
_CHUNK = 1 << 16
_BLANK = re.compile(r"[ \t\n\r]*")
_decode = json.JSONDecoder().raw_decode


class JsonStream:
    """Steps through one object. Methods raise ValueError, saying why, when the bytes are not what they should be."""

    def __init__(self, file: BinaryIO, length: int) -> None:
        """Reads at most `length` bytes from where `file` stands."""
        self._file = file
        self._left = length
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0

    def keys(self) -> Iterator[str]:
        """The keys of the object that starts here; whoever iterates takes each key's value before the next."""
        self.expect("{")
        more = self.peek() != "}"
        if not more:
            self.expect("}")
        while more:
            if self.peek() != '"':
                raise ValueError("not JSON")
            key: str = self.value(MAX_KEY)
            self.expect(":")
            yield key
            more = self.expect(",}") == ","

    def peek(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            blank = _BLANK.match(self._text, self._at)
            self._at = blank.end() if blank else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more(_CHUNK):
                return ""

    def expect(self, allowed: str) -> str:
        """Takes one of the characters in `allowed`."""
        found = self.peek()
        if not found or found not in allowed:
            raise ValueError("not JSON")
        self._at += 1
        return found

    def value(self, longest: int) -> Any:
        """Takes one value of at most about `longest` characters. Call only where a string or an object starts."""
        if self.peek() not in ('"', "{"):
            raise ValueError("not JSON")
        while True:
            try:
                value, self._at = _decode(self._text, self._at)
                return value
            except RecursionError as error:
                raise ValueError("nested too deeply") from error
            except ValueError:  # perhaps only because it goes on in the next chunk
                pending = len(self._text) - self._at
                if pending > longest:
                    raise ValueError("an entry that is too long, or not JSON") from None
                if not self._more(max(_CHUNK, pending)):
                    raise ValueError("not JSON") from None

    def _more(self, wanted: int) -> bool:
        data = self._file.read(min(wanted, self._left))
        self._left -= len(data)
        try:
            self._text = self._text[self._at :] + self._utf8.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise ValueError("not UTF-8") from error
        self._at = 0
        return bool(data)
