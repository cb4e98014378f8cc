"""Personal data and secrets in texts: found, and replaced by what they are: [EMAIL], [PHONE], [CARD], [MY_NUMBER],
[IBAN], [IP], [SECRET].

Pure: text in, text out. A label says nothing else, and no hash of the value: there are so few telephone numbers that
each could be tried. Every rule takes time in proportion to the length of the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from gateway.masking.addresses import ip_addresses, mail_addresses
from gateway.masking.contexts import secrets_by_context
from gateway.masking.folding import fold
from gateway.masking.numbers import checked_numbers, ibans
from gateway.masking.phones import phone_numbers
from gateway.masking.secrets import known_secrets
from gateway.masking.spans import Span, settle

KINDS: Final = ("EMAIL", "PHONE", "CARD", "MY_NUMBER", "IBAN", "IP", "SECRET")

# In the order in which they name what several of them have found.
_RULES: Final[tuple[Callable[[str], Iterator[Span]], ...]] = (
    known_secrets, ibans, checked_numbers, mail_addresses, ip_addresses, phone_numbers, secrets_by_context,
)  # fmt: skip


def find(text: str) -> list[Span]:
    """What is personal or secret in `text`, in order, none overlapping."""
    folded = fold(text)
    return settle(span for rule in _RULES for span in rule(folded))


def mask(text: str, counts: Counter[str], until: int | None = None) -> tuple[str, int]:
    """The text with labels in place of what was found, and how many characters of `text` that stands for: `until`, or
    more where something reaches over that place. `counts` is told how many of each kind."""
    stop = len(text) if until is None else until
    pieces: list[str] = []
    place = 0
    for start, end, kind in find(text):
        if start >= stop:
            break
        pieces += (text[place:start], f"[{kind}]")
        counts[kind] += 1
        place = end
    if place < stop:
        pieces.append(text[place:stop])
    return "".join(pieces), max(place, stop)
