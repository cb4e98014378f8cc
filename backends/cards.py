"""What adapters share for reading an engine's list of models. An engine's words are not trusted: what does not look as
it should is left out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_WORD = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_LONGEST = 64  # characters of a quantisation
_GGML_SIZE = re.compile(r"(?i)^((?:IQ|Q|TQ)\d\w*?)(?:_K)? - (Small|Medium|Large|Extra-Small)")
# Engines have names of their own for the same thing.
_SAME = {
    "embedding": "embeddings", "embed": "embeddings", "trained_for_tool_use": "tools", "tool_use": "tools",
    "image": "vision", "multimodal": "vision", "thinking": "reasoning",
}  # fmt: skip


def word(value: object) -> str | None:
    """A format: one word in lower case."""
    found = value.strip().lower() if isinstance(value, str) else ""
    return found if _WORD.fullmatch(found) else None


def quantisation(value: object) -> str | None:
    """As people write it, such as Q4_K_M. Some engines say "unknown" where they do not know."""
    found = value.strip() if isinstance(value, str) else ""
    if not 0 < len(found) <= _LONGEST or not found.isprintable() or found.lower() in ("unknown", "none", "null"):
        return None
    return _short(found)


def _short(found: str) -> str:
    """llama.cpp's "Q4_K - Medium" is what everybody calls Q4_K_M."""
    parts = _GGML_SIZE.match(found)
    if parts is None:
        return found
    size = {"small": "S", "medium": "M", "large": "L", "extra-small": "XS"}[parts[2].lower()]
    return f"{found.partition(' - ')[0]}_{size}"


def capabilities(*given: Any) -> tuple[str, ...]:
    """Words out of lists, or the true ones of an object of switches; each once, in the gateway's spelling."""
    found = (name for one in given for name in _names(one))
    return tuple(dict.fromkeys(_SAME.get(name, name) for name in found if _WORD.fullmatch(name)))[:32]


def _names(given: Any) -> Iterable[str]:
    if isinstance(given, dict):
        given = [name for name, value in given.items() if value is True]
    return [name.strip().lower() for name in given if isinstance(name, str)] if isinstance(given, list) else []


def mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
