"""JSON inside texts: arguments of tools, answers in JSON mode. What was a document stays one."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Final

import orjson

from gateway.masking import find, mask
from gateway.masking.contexts import could_be_secret, names_secret

_DEEPEST = 3  # documents inside strings of documents
# In a document that is known to be valid these are all strings and numbers, and nothing is tried twice.
_TOKEN: Final = re.compile(r"(\"(?:[^\"\\]++|\\.)*+\")([ \t\r\n]*+:)?|-?[0-9][0-9.eE+-]*+")


def mask_document(text: str, counts: Counter[str], depth: int = 0) -> str | None:
    """The JSON object or array in `text` with its strings and numbers masked, all else as it came; None if it is none.

    The name of a member says what its value is: of `{"password": "rosebud"}` the value is a secret.
    """
    if depth >= _DEEPEST or text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    name = ""

    def replaced(token: re.Match[str]) -> str:
        nonlocal name
        if token[1] is None:
            return _number(token[0], name, counts)
        value = json.loads(token[1])
        if token[2] is not None:
            name = value
            label = mask(value, counts)[0]
            return token[0] if label == value else json.dumps(label, ensure_ascii=False) + token[2]
        label = _value(value, name, counts, depth)
        return token[0] if label == value else json.dumps(label, ensure_ascii=False)

    return _TOKEN.sub(replaced, text)


def _value(value: str, name: str, counts: Counter[str], depth: int) -> str:
    if name and names_secret(name) and could_be_secret(value):
        counts["SECRET"] += 1
        return "[SECRET]"
    inner = mask_document(value, counts, depth + 1)
    if inner is not None:
        return inner
    return _beside(value, name, counts) if name else mask(value, counts)[0]


def _beside(value: str, name: str, counts: Counter[str]) -> str:
    """As `mask`, with the member's name in front as words that may say what the value is."""
    before = f"{name[-64:]}: "
    pieces: list[str] = []
    place = len(before)
    whole = before + value
    for start, end, kind in find(whole):
        if end > place:
            pieces += (whole[place : max(start, place)], f"[{kind}]")
            counts[kind] += 1
            place = end
    return "".join((*pieces, whole[place:]))


def _number(written: str, name: str, counts: Counter[str]) -> str:
    """A label takes a number's place as a string."""
    if len(written) < 7:
        return written
    masked = _beside(written, name, counts)
    return written if masked == written else json.dumps(masked)
