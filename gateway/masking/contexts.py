"""Secrets that only the words beside them give away: `password=`, `Bearer`, "the access token you wanted: ...".

Words are looked for in lower case, since a search without regard to case takes five times as long.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from math import log2
from typing import Final, NamedTuple

from gateway.masking.folding import fold
from gateway.masking.spans import Span

_PASSWORD: Final = fold("pass(?:word|wd|phrase|code)|pwd|パスワード|パスフレーズ|暗証番号|合言葉")
_KEY: Final = fold("apiキー|アクセスキー|シークレット|トークン|秘密鍵|key|token|secret|credentials?")
_WORD: Final = re.compile(f"({_PASSWORD})|{_KEY}")
_OWNER: Final = re.compile(  # whose key: a key alone may be anything
    "(?:api|access|secret|private|auth|client|account|shared|encryption|signing|service|subscription|refresh|session|bot)"
    "[ _-]?$"
)
_ASSIGNED: Final = re.compile(
    r"[\"']?(?:[ \t]{0,2}(?:=>|:=|[=:]|は|が|(?:is|was)(?= ))[ \t]{0,2}"
    r"|[ \t]{1,2}(?=[\"'])|(?<=[kK][eE][yY])[ \t](?=[!-~]{20}))"
    r"(?:\"([^\"\n]{1,256})\"|'([^'\n]{1,256})'|([!-~]{1,512}))"
)
_CREDENTIALS: Final = (  # a word, and in lower case what it stands in
    (
        "authorization",
        re.compile(
            r"authorization[\"']?[ \t]{0,2}[:=][ \t]{0,2}[\"']?(?:(?:bearer|basic|token)[ \t]{1,2})?([!-~]{8,4096})"
        ),
    ),
    ("bearer", re.compile(r"bearer[ \t]{1,2}([\w.~+/=-]{16,4096})", re.ASCII)),
    ("-u", re.compile(r"(?<= )-u[ =]{1,2}[\"']?[\w.@-]{1,64}:([!-~]{3,128})", re.ASCII)),
    ("--user", re.compile(r"--user[ =]{1,2}[\"']?[\w.@-]{1,64}:([!-~]{3,128})", re.ASCII)),
)  # fmt: skip
_STRANGE: Final = re.compile(r"(?<![\w+/=-])[\w+/-]{24,512}+={0,2}(?![\w+/=-])", re.ASCII)
_HARMLESS: Final = re.compile(r"commit|sha-?[0-9]|md5|hash|digest|etag|checksum|uuid|revision|integrity")
_NEAR = 48  # characters

# What stands in place of a secret.
_NO_SECRET: Final = re.compile(
    r"(?:null|none|nil|true|false|undefined|required|optional|string|str|bool|int|bytes|secret|token|password|passwd"
    r"|redacted|hidden|masked|removed|changeme|empty|missing|invalid|x+|\*+|\.+|-+|_+)[.,;:!?)\]}]*"
    r"|\$.*|\{\{.*|\{%.*|%\(.*|<.*|\[(?:[A-Z_]+|removed)\].*|your[-_ ].*"
    r"|[A-Za-z_][\w.]*[(\[].*|(?:self|os|process|env|config|settings|args)\..*",
    re.IGNORECASE | re.DOTALL,
)
_AROUND = ".,;:!?)]}>\"'"  # after an unquoted value: of the sentence it stands in


class _Word(NamedTuple):
    """A word that speaks of a secret."""

    start: int
    end: int
    is_password: bool


def secrets_by_context(text: str) -> Iterator[Span]:
    """`text`: folded."""
    lower = _lowered(text)
    words = list(_words(lower))
    for word in words:
        match = _ASSIGNED.match(text, word.end)
        if match is not None:
            yield from _assigned(text, word, match)
    yield from _credentials(text, lower)
    if words:
        yield from _strange_words(text, lower, [word.end for word in words])


def names_secret(key: str) -> bool:
    """Whether a member of this name holds a secret: `password`, `api_key`, `clientSecret`, and not `max_tokens`."""
    lower = _lowered(fold(key))
    return any(word.end == len(lower) for word in _words(lower))


def could_be_secret(value: str) -> bool:
    """Whether the value of such a member is more than a placeholder."""
    return len(value) >= 4 and not _NO_SECRET.fullmatch(value)


def looks_random(word: str) -> bool:
    """Digits and letters mixed, and about as many bits a character as chance has in a word of this length."""
    if not _has_digit(word) or not any(map(str.isalpha, word)):
        return False
    size = len(word)
    entropy = -sum(count / size * log2(count / size) for count in Counter(word).values())
    return entropy >= (3.0 if set(word) <= set("0123456789abcdef-") else 3.7)


def _lowered(text: str) -> str:
    """As many characters as before; `lower` makes two of some."""
    return text.lower() if text.isascii() else text.translate(_LOWER)


_LOWER: Final = {ord("A") + place: ord("a") + place for place in range(26)}


def _words(lower: str) -> Iterator[_Word]:
    for match in _WORD.finditer(lower):
        start, is_password = match.start(), match[1] is not None
        inside = start > 0 and lower[start - 1].isascii() and lower[start - 1].isalpha()
        owned = match[0] == "key" or (match[0] == "token" and inside)
        if owned and not _OWNER.search(lower, max(0, start - 16), start):
            continue
        if match[0] == "pwd" and inside:
            continue
        yield _Word(start, match.end(), is_password)


def _assigned(text: str, word: _Word, match: re.Match[str]) -> Iterator[Span]:
    start, end = match.span(match.lastindex or 0)
    quoted = match.lastindex != 3
    if not quoted:
        in_query = word.start > 0 and text[word.start - 1] in "?&"
        end = _end_of_word(text, start, end, "\"'`;&" if in_query else "\"'`;")
    value = text[start:end]
    if len(value) < 4 or _NO_SECRET.fullmatch(value):
        return
    if word.is_password:
        accepted = quoted or any(not char.isalpha() and char not in "._-" for char in value)
    else:
        accepted = len(value) >= 8 and _has_digit(value) and not value.isdecimal()
    if accepted:
        yield Span(start, end, "SECRET")


def _end_of_word(text: str, start: int, end: int, marks: str) -> int:
    """Where an unquoted value ends: before a mark that ends values, and before the sentence's own punctuation."""
    for mark in marks:
        found = text.find(mark, start, end)
        if found > start:
            end = found
    value = text[start:end]
    return start + len(value.rstrip(_AROUND.replace("!", "") if value.endswith("!") else _AROUND))


def _credentials(text: str, lower: str) -> Iterator[Span]:
    for word, pattern in _CREDENTIALS:
        if word not in lower:
            continue
        for match in pattern.finditer(lower):
            start = match.start(1)
            value = text[start : match.end(1)].rstrip(_AROUND)
            if len(value) >= 3 and _has_digit(value) and not _NO_SECRET.fullmatch(value):
                yield Span(start, start + len(value), "SECRET")


def _strange_words(text: str, lower: str, ends: list[int]) -> Iterator[Span]:
    """Words that look like chance, behind one that speaks of a secret. `ends`: of the latter, in order."""
    for match in _STRANGE.finditer(text):
        place = bisect_left(ends, match.start())
        if not place or ends[place - 1] < match.start() - _NEAR:
            continue
        before = lower[max(0, match.start() - _NEAR) : match.start()]
        apart = "\n" in lower[ends[place - 1] : match.start()]
        if not apart and not _HARMLESS.search(before) and looks_random(match[0]):
            yield Span(match.start(), match.end(), "SECRET")


def _has_digit(word: str) -> bool:
    return any(map(str.isdigit, word))
