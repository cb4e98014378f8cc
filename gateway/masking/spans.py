"""Where in a text something was found, and how overlapping finds become one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """`text[start:end]` is of this kind, in the words of the label that replaces it: EMAIL, PHONE ..."""

    start: int
    end: int
    kind: str


def settle(found: Iterable[Span]) -> list[Span]:
    """Spans in order, none overlapping. Overlapping ones become one that covers all of them, of the kind that was found
    first: nothing that any rule has found stays readable."""
    ranked = sorted(enumerate(found), key=lambda entry: (entry[1].start, entry[0]))
    settled: list[tuple[int, Span]] = []
    for rank, span in ranked:
        if settled and span.start < settled[-1][1].end:
            before, last = settled[-1]
            first, kind = (before, last.kind) if before < rank else (rank, span.kind)
            settled[-1] = first, Span(last.start, max(last.end, span.end), kind)
        else:
            settled.append((rank, span))
    return [span for _, span in settled]
