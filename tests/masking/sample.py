"""The labelled sample: one case a line, with `[[KIND|value]]` around what has to be found. Nobody in it is real.

    # a comment        ## KIND    of the lines below; NONE: nothing is to be found there (the label is for the reader)
    \\n                 a line break

Addresses and numbers are of the ranges kept for documentation, films and tests. Secrets are made when the sample is
read, always the same ones, so that no file holds anything that looks like a live key:

    ${alnum:N} ${url:N} ${hex:N} ${b64:N} ${upper:N} ${digits:N}    N random characters of that alphabet
    ${uuid}                                                        a random UUID
    ${my:ELEVEN} ${my4:} ${my-:} ${myw:} ${myw4:}                   a number with its check digit: plain, in groups of
                                                                   four with spaces, with hyphens, and full-width
    ${say:TEXT}                                                    the text itself
"""

from __future__ import annotations

import random
import re
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from gateway.masking.numbers import my_number_check
from gateway.masking.spans import Span

FOLDER = Path(__file__).parent
HALVES = {"tuned": FOLDER / "sample_tuned.txt", "held_out": FOLDER / "sample_held_out.txt"}

_ALPHABETS = {
    "alnum": string.ascii_letters + string.digits,
    "url": string.ascii_letters + string.digits + "-_",
    "hex": "0123456789abcdef",
    "b64": string.ascii_letters + string.digits + "+/",
    "upper": string.ascii_uppercase + string.digits,
    "digits": string.digits,
}
_FIELD = re.compile(r"\$\{([a-z0-9-]+)(?::([^}]*))?\}")
_MARK = re.compile(r"\[\[([A-Z_]+)\|(.*?)\]\]", re.DOTALL)
_WIDE = str.maketrans("0123456789 ", "０１２３４５６７８９　")


@dataclass(frozen=True)
class Case:
    """A text and what is to be found in it; nothing, for a negative."""

    line: int  # of the file
    text: str
    spans: tuple[Span, ...]


def load(half: str) -> list[Case]:
    lines = HALVES[half].read_text("utf-8").splitlines()
    return [_case(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]


def _case(number: int, line: str) -> Case:
    chance = random.Random(number)
    line = _FIELD.sub(lambda found: _made(found, chance), line.replace("\\n", "\n"))
    text, spans, place = "", [], 0
    for mark in _marks(line):
        text += line[place : mark[0]]
        spans.append(Span(len(text), len(text) + len(mark[3]), mark[2]))
        text += mark[3]
        place = mark[1]
    return Case(number, text + line[place:], tuple(spans))


def _marks(line: str) -> list[tuple[int, int, str, str]]:
    return [(m.start(), m.end(), m[1], m[2]) for m in _MARK.finditer(line)]


def _made(found: re.Match[str], chance: random.Random) -> str:
    name, argument = found[1], found[2] or ""
    if name in _ALPHABETS:
        return "".join(chance.choice(_ALPHABETS[name]) for _ in range(int(argument)))
    makers: dict[str, Any] = {
        "uuid": lambda: str(UUID(int=chance.getrandbits(128), version=4)),
        "say": lambda: argument,
        "my": lambda: _my_number(argument, ""),
        "my4": lambda: _my_number(argument, " "),
        "my-": lambda: _my_number(argument, "-"),
        "myw": lambda: _my_number(argument, "").translate(_WIDE),
        "myw4": lambda: _my_number(argument, " ").translate(_WIDE),
    }
    return str(makers[name]())


def _my_number(eleven: str, separator: str) -> str:
    whole = eleven + str(my_number_check(eleven))
    return separator.join((whole[:4], whole[4:8], whole[8:])) if separator else whole
