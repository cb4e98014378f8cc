"""How much of the labelled sample is found, and how much of what is found is right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.masking import KINDS, find
from gateway.masking.spans import Span
from tests.masking.sample import Case

ALL = "all"


@dataclass
class Score:
    """`found` of the `wanted` values are wholly covered under their own name. `right` of the `claimed` spans touch a
    value of their name. `covered`: wholly replaced, whatever by."""

    wanted: int = 0
    found: int = 0
    covered: int = 0
    claimed: int = 0
    right: int = 0

    @property
    def recall(self) -> float:
        return self.found / self.wanted if self.wanted else 1.0

    @property
    def precision(self) -> float:
        return self.right / self.claimed if self.claimed else 1.0


@dataclass
class Measured:
    """Scores by kind and overall; what went wrong, for whoever tunes."""

    scores: dict[str, Score]
    negatives: int = 0  # texts in which nothing is to be found
    clean: int = 0  # of them left as they were
    wrong: list[str] = field(default_factory=list)


def measure(cases: Iterable[Case]) -> Measured:
    measured = Measured({kind: Score() for kind in (*KINDS, ALL)})
    for case in cases:
        spans = find(case.text)
        if not case.spans:
            measured.negatives += 1
            measured.clean += not spans
        _count(measured, case, spans)
    return measured


def _count(measured: Measured, case: Case, spans: list[Span]) -> None:
    for wanted in case.spans:
        over = [span for span in spans if span.start <= wanted.start and wanted.end <= span.end]
        hit = any(span.kind == wanted.kind for span in over)
        for score in (measured.scores[wanted.kind], measured.scores[ALL]):
            score.wanted += 1
            score.found += hit
            score.covered += bool(over)
        if not hit:
            value = case.text[wanted.start : wanted.end]
            measured.wrong.append(f"{case.line}: missed {wanted.kind} {value!r}: {spans}")
    for span in spans:
        right = any(w.kind == span.kind and w.start < span.end and span.start < w.end for w in case.spans)
        for score in (measured.scores[span.kind], measured.scores[ALL]):
            score.claimed += 1
            score.right += right
        if not right:
            value = case.text[span.start : span.end]
            measured.wrong.append(f"{case.line}: wrong {span.kind} {value!r} in {case.text!r}")
