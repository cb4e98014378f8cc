"""Numbers that check themselves: payment cards, the Japanese Individual Number (My Number), bank accounts (IBAN).

Sources: ISO/IEC 7812-1 (Luhn) and the ranges that card networks publish; the ordinance of the Ministry of Internal
Affairs and Communications No. 85 of 2014, article 5 (check digit of the Individual Number); ISO 13616 and the lengths
in the IBAN registry.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from gateway.masking.spans import Span

_CARD_SHAPES: Final = frozenset({(4, 6, 5), (4, 6, 4), (8, 8), (6, 13)})
_SHORTEST_CARD, _LONGEST_CARD = 13, 19  # digits
_MOST_GROUPS = 5
# Numerals that are no part of a word, a decimal or a longer number.
_RUN: Final = re.compile(r"(?<![0-9A-Za-z_])(?<![0-9][.,])[0-9]++(?:[ -][0-9]++)*+(?![0-9A-Za-z_]|[.,][0-9])")
_GROUP: Final = re.compile(r"[0-9]+")
_MY_NUMBER_WORDS: Final = re.compile(
    r"マイナ|個人番号|特定個人情報|my[ _-]?number|individual[ _-]?number|kojin[ _-]?bango", re.IGNORECASE
)
_BEFORE, _AFTER = 40, 24  # characters in which a word may stand
_IBAN: Final = re.compile(r"(?<![0-9A-Za-z])[A-Za-z]{2}[0-9]{2}(?=[ -]?[0-9A-Za-z]{4})")
_IBAN_LENGTHS: Final = {
    "AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22, "BI": 27, "BR": 29,
    "BY": 28, "CH": 21, "CR": 22, "CY": 28, "CZ": 24, "DE": 22, "DJ": 27, "DK": 18, "DO": 28, "EE": 20, "EG": 29,
    "ES": 24, "FI": 18, "FK": 18, "FO": 18, "FR": 27, "GB": 22, "GE": 22, "GI": 23, "GL": 18, "GR": 27, "GT": 28,
    "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IQ": 23, "IS": 26, "IT": 27, "JO": 30, "KW": 30, "KZ": 20, "LB": 28,
    "LC": 32, "LI": 21, "LT": 20, "LU": 20, "LV": 21, "LY": 25, "MC": 27, "MD": 24, "ME": 22, "MK": 19, "MN": 20,
    "MR": 27, "MT": 31, "MU": 30, "NI": 28, "NL": 18, "NO": 15, "OM": 23, "PK": 24, "PL": 28, "PS": 29, "PT": 25,
    "QA": 29, "RO": 24, "RS": 22, "RU": 33, "SA": 24, "SC": 31, "SD": 18, "SE": 24, "SI": 19, "SK": 24, "SM": 27,
    "SO": 23, "ST": 25, "SV": 28, "TL": 23, "TN": 24, "TR": 26, "UA": 29, "VA": 22, "VG": 24, "XK": 20, "YE": 30,
}  # fmt: skip


class _Digits(NamedTuple):
    """Neighbouring groups of digits, between which the same separator stands."""

    start: int
    end: int
    digits: str
    shape: tuple[int, ...]


def checked_numbers(text: str) -> Iterator[Span]:
    """Cards and My Numbers. The latter only near a word that says so: about one in ten numbers of twelve digits has a
    right check digit."""
    for found in _groupings(text):
        if is_card(found.digits) and _has_card_shape(found.shape):
            yield Span(found.start, found.end, "CARD")
        elif found.shape in ((12,), (4, 4, 4)) and is_my_number(found.digits):
            around = text[max(0, found.start - _BEFORE) : found.end + _AFTER]
            if _MY_NUMBER_WORDS.search(around):
                yield Span(found.start, found.end, "MY_NUMBER")


def ibans(text: str) -> Iterator[Span]:
    for match in _IBAN.finditer(text):
        end = _end_of_iban(text, match.start())
        if end:
            yield Span(match.start(), end, "IBAN")


# --- check digits
def is_card(digits: str) -> bool:
    """Whether a card network gives out such numbers, and the check digit is right."""
    return _is_issued(digits, len(digits)) and luhn(digits) and len(set(digits)) > 1


def luhn(digits: str) -> bool:
    doubled = sum(sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return (doubled + sum(map(int, digits[-1::-2]))) % 10 == 0


def is_my_number(digits: str) -> bool:
    return len(digits) == 12 and my_number_check(digits[:11]) == int(digits[11])


def my_number_check(digits: str) -> int:
    """The twelfth digit. `digits`: the first eleven."""
    total = sum(int(digit) * (n + 1 if n <= 6 else n - 5) for n, digit in enumerate(reversed(digits), 1))
    return 0 if total % 11 <= 1 else 11 - total % 11


def is_iban(letters: str) -> bool:
    """`letters`: without separators, in upper case."""
    if _IBAN_LENGTHS.get(letters[:2]) != len(letters):
        return False
    return int("".join(str(int(letter, 36)) for letter in letters[4:] + letters[:4])) % 97 == 1


# --- how they are written
def _groupings(text: str) -> Iterator[_Digits]:
    """Every choice of up to five neighbouring groups that has 12 to 19 digits: each group begins at most five."""
    for run in _RUN.finditer(text):
        if run.end() - run.start() < 12:
            continue
        groups = [(match.start(), match.end()) for match in _GROUP.finditer(text, run.start(), run.end())]
        for first in range(len(groups)):
            yield from _from(text, groups[first : first + _MOST_GROUPS])


def _from(text: str, groups: list[tuple[int, int]]) -> Iterator[_Digits]:
    digits, shape = "", []
    separator = text[groups[0][1] : groups[0][1] + 1]
    for start, end in groups:
        if end - start > _LONGEST_CARD or (digits and text[start - 1] != separator):
            return
        digits += text[start:end]
        shape.append(end - start)
        if len(digits) > _LONGEST_CARD:
            return
        if len(digits) >= 12:
            yield _Digits(groups[0][0], end, digits, tuple(shape))


def _has_card_shape(shape: tuple[int, ...]) -> bool:
    if len(shape) == 1 or shape in _CARD_SHAPES:
        return True
    return all(size == 4 for size in shape[:-1]) and shape[-1] <= 4


def _is_issued(digits: str, length: int) -> bool:
    two, four = int(digits[:2]), int(digits[:4])
    if digits[0] == "4":
        return length in (13, 16, 19)
    if 51 <= two <= 55 or 2221 <= four <= 2720 or 2200 <= four <= 2204:
        return length == 16
    if two in (34, 37):
        return length == 15
    if 3528 <= four <= 3589 or four == 6011 or 6440 <= four <= 6599 or two in (60, 62, 81, 82):
        return 16 <= length <= _LONGEST_CARD
    if 3000 <= four <= 3059 or four == 3095 or two in (36, 38, 39):
        return 14 <= length <= _LONGEST_CARD
    return two in (50, 56, 57, 58, 63, 67) and _SHORTEST_CARD <= length <= _LONGEST_CARD


def _end_of_iban(text: str, start: int) -> int:
    """Where the account number that begins here ends; 0 if there is none. Separators stand between groups of four."""
    length = _IBAN_LENGTHS.get(text[start : start + 2].upper(), 0)
    letters, place = "", start
    while len(letters) < length:
        char = text[place : place + 1]
        if char in ("-", " ") and letters and len(letters) % 4 == 0:
            place += 1
            char = text[place : place + 1]
        if not (char.isascii() and char.isalnum()):
            return 0
        letters += char.upper()
        place += 1
    follows = text[place : place + 1]
    if not length or (follows.isascii() and follows.isalnum()):
        return 0
    return place if is_iban(letters) else 0
