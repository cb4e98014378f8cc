"""Telephone numbers: international ones, those of Japan and North America, and whatever follows a word such as "tel".

Whether a number could be given out is known to `phonenumbers`, Google's libphonenumber. Its own search through texts is
not used: it takes ten times as long and finds no full-width digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

import phonenumbers

from gateway.masking.spans import Span

_MOST_GROUPS = 7
_LONGEST = 17  # digits, of which two are the prefix for calls abroad
_RUN: Final = re.compile(
    r"(?<![0-9A-Za-z_#])(?<![0-9][.,:/-])(?:\+ ?)?\(?[0-9]{1,15}+(?:[ .()/-]{1,3}+[0-9]{1,15}+){0,9}+(?![0-9A-Za-z_])"
)
_GROUP: Final = re.compile(r"[0-9]+")
_DATE: Final = re.compile(r"(?:19|20)[0-9]{2}([-/.])[0-9]{1,2}\1[0-9]{1,2}")
_WORDS: Final = re.compile(
    r"(?:(?<![a-z])(?:tel|telephone|phone|mobile|cell|fax|whatsapp|sms|telefon|handy|téléphone|teléfono|móvil|telefono)"
    r"|電話|携帯|ファックス|直通|連絡先|代表|内線)"
    r"[^0-9\n]{0,16}$",
    re.IGNORECASE,
)
_CALLS: Final = re.compile(r"(?<![a-z])(?:call|text|ring|dial)(?: me| us)?(?: at| on)?[ :]{1,2}$", re.IGNORECASE)
_NEAR = 28  # characters
_JAPANESE_SHAPES: Final = frozenset(
    {(2, 4, 4), (3, 3, 4), (4, 2, 4), (5, 1, 4), (3, 4, 4), (4, 3, 3), (4, 3, 4), (3, 8), (2, 8), (10,), (11,)}
)
_MOBILE: Final = re.compile(r"0(?:[5789]0[1-9][0-9]{7}|120[0-9]{6}|800[0-9]{7})")
_AMERICAN_SHAPES: Final = frozenset({(3, 3, 4), (1, 3, 3, 4)})


class _Number(NamedTuple):
    """Neighbouring groups of digits. `written`: with what stands between them."""

    written: str
    digits: str
    shape: tuple[int, ...]


def phone_numbers(text: str) -> Iterator[Span]:
    for run in _RUN.finditer(text):
        if run.end() - run.start() < 7:
            continue
        place = run.start()
        while place < run.end():
            found, place = _first_number(text, place, run.end())
            if found is not None:
                yield found


def _first_number(text: str, start: int, stop: int) -> tuple[Span | None, int]:
    """The number that begins with the first group here, if one does, and where to look on."""
    groups = [(match.start(), match.end()) for match in islice(_GROUP.finditer(text, start, stop), _MOST_GROUPS)]
    if not groups:
        return None, stop
    begin = groups[0][0]
    while begin > start and text[begin - 1] in "+( ":
        begin -= 1
    while text[begin] == " ":
        begin += 1
    called = _is_called_one(text, begin)
    sizes = tuple(stop - start for start, stop in groups)
    for count in range(len(groups), 0, -1):
        total, shape = sum(sizes[:count]), sizes[:count]
        if not 7 <= total <= _LONGEST or not (called or text[begin] in "+(0" or shape in _AMERICAN_SHAPES):
            continue
        end = groups[count - 1][1]
        digits = "".join([text[first:last] for first, last in groups[:count]])
        if _is_number(_Number(text[begin:end], digits, shape), called):
            return Span(begin, end, "PHONE"), end
    return None, groups[0][1]


def _is_called_one(text: str, start: int) -> int:
    """2 after a word such as "tel", 1 after one such as "call", else 0."""
    near = max(0, start - _NEAR)
    if _WORDS.search(text[near:start]):
        return 2
    return 1 if _CALLS.search(text[near:start]) else 0


def _is_number(number: _Number, called: int) -> bool:
    written, digits, shape = number.written, number.digits, number.shape
    if written.startswith("+"):
        return len(digits) >= 9 and _is_possible(written)
    if _DATE.match(written) or written.count("(") != written.count(")") or not digits.strip("0"):
        return False
    if digits.startswith("00"):
        return 10 <= len(digits) and len(shape) > 2 and digits[2] != "0" and _is_valid("+" + digits[2:], None)
    if digits.startswith("0") and shape in _JAPANESE_SHAPES and "/" not in written and _is_valid(digits, "JP"):
        return len(shape) > 1 or called > 0 or bool(_MOBILE.fullmatch(digits))
    if shape in _AMERICAN_SHAPES and "/" not in written and _is_valid(digits, "US"):
        return True
    if called == 0 or len(digits) > 15:
        return False
    return called == 2 or len(shape) > 1


def _is_possible(written: str) -> bool:
    """Numbers kept for films are never valid, but possible."""
    try:
        return phonenumbers.is_possible_number(phonenumbers.parse(written.replace("(0)", ""), None))
    except phonenumbers.NumberParseException:
        return False


def _is_valid(digits: str, region: str | None) -> bool:
    try:
        return phonenumbers.is_valid_number(phonenumbers.parse(digits, region))
    except phonenumbers.NumberParseException:
        return False
