"""Full-width and other spellings of the same characters, one for one: offsets into the folded text are offsets into the
text as it came."""

from __future__ import annotations

from typing import Final

_HYPHENS: Final = "\u00ad\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u2500\u2501\u30fc\uff0d\uff70\ufe63\ufe58"
_SPACES: Final = "\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
# Decimal digits of other scripts: Arabic-Indic, its extended form, Devanagari, Bengali, Thai.
_ZEROS: Final = (0x0660, 0x06F0, 0x0966, 0x09E6, 0x0E50)


def _table() -> dict[int, int]:
    table = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}  # full-width ASCII
    for zero in _ZEROS:
        table |= {zero + digit: ord("0") + digit for digit in range(10)}
    table |= {ord(char): ord("-") for char in _HYPHENS}
    table |= {ord(char): ord(" ") for char in _SPACES}
    table |= {0x300C: ord('"'), 0x300D: ord('"'), 0x201C: ord('"'), 0x201D: ord('"'), 0x2019: ord("'")}
    return table


_TABLE: Final = _table()


def fold(text: str) -> str:
    """As many characters as `text` has."""
    return text if text.isascii() else text.translate(_TABLE)
