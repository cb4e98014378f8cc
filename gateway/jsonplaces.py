"""Values deep inside a JSON text, by their way down: where they lie in its bytes, and how others get there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway import jsonscan

Way = tuple[str | int, ...]  # keys and positions from the top


class Ambiguous(ValueError):
    """An object on the way has a key twice: programs differ in which one counts."""


def replace(text: bytes, changes: Mapping[Way, bytes]) -> bytes:
    """The text with other JSON at some places; no other byte changes. The text is known to be valid.

    Raises: Ambiguous.
    """
    pieces: list[bytes] = []
    position = 0
    for start, end, way in sorted(_spans(text, list(changes))):
        pieces += (text[position:start], changes[way])
        position = end
    pieces.append(text[position:])
    return b"".join(pieces)


def _spans(text: bytes, ways: Sequence[Way]) -> Iterator[tuple[int, int, Way]]:
    """Start and end of the value at the end of each way. What several ways pass through is looked through once."""
    stack: list[tuple[int, int, Sequence[Way]]] = [(0, 0, ways)]  # where a value begins, its depth, who comes by
    while stack:
        at, depth, here = stack.pop()
        steps: dict[str | int, list[Way]] = {}
        for way in here:
            steps.setdefault(way[depth], []).append(way)
        for step, start, end in _members(text, at) if isinstance(here[0][depth], str) else _elements(text, at, steps):
            passing = steps.pop(step, None)
            if passing is None:
                continue
            if len(passing[0]) == depth + 1:
                yield start, end, passing[0]
            else:
                stack.append((start, depth + 1, passing))


def _members(text: bytes, at: int) -> list[tuple[str, int, int]]:
    found = [(member.key, member.value, member.end) for member in jsonscan.walk(text, at)]
    seen: set[str] = set()
    for name, _, _ in found:
        if name in seen:
            raise Ambiguous(name)
        seen.add(name)
    return found


def _elements(text: bytes, at: int, wanted: Mapping[str | int, object]) -> Iterator[tuple[int, int, int]]:
    last = max(place for place in wanted if isinstance(place, int))
    for place, (start, end) in enumerate(jsonscan.elements(text, at)):
        yield place, start, end
        if place == last:
            return


def replaced(document: Any, changes: Mapping[Way, Any]) -> Any:
    """A copy of a parsed document with other values at some places. What does not change is shared, not copied."""
    copied: dict[Way, Any] = {(): document.copy()}
    for way, change in changes.items():
        value = copied[()]
        for depth, step in enumerate(way[:-1], 1):
            if way[:depth] not in copied:
                copied[way[:depth]] = value[step] = value[step].copy()
            value = value[step]
        value[way[-1]] = change
    return copied[()]


def spelt(way: Way) -> str:
    """As in `messages[0].content[1].image_url`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in way).removeprefix(".")
