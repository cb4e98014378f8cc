"""`python -m tests.masking`: precision and recall on the labelled sample, and what masking costs.

--wrong      also lists what went wrong in the tuned half; the held-out half stays unseen
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from gateway.masking import mask
from tests.masking.measure import Measured, measure
from tests.masking.sample import HALVES, load


def table(half: str, measured: Measured) -> list[str]:
    rows = [f"| {half} | values | recall | replaced at all | claims | precision |", "|---|---|---|---|---|---|"]
    rows += [
        f"| {kind} | {one.wanted} | {one.recall:.3f} | {one.covered / max(one.wanted, 1):.3f} | {one.claimed}"
        f" | {one.precision:.3f} |"
        for kind, one in measured.scores.items()
    ]
    return [*rows, f"{measured.clean} of {measured.negatives} texts without anything stayed as they were.", ""]


def cost() -> str:
    """CPU time of this process for the whole sample, the best of five rounds."""
    texts = ["\n".join(case.text for case in load(half)) for half in HALVES]
    size = sum(len(text.encode()) for text in texts) / 1024
    best = float("inf")
    for _ in range(5):
        begun = time.process_time()
        for text in texts:
            mask(text, Counter())
        best = min(best, time.process_time() - begun)
    return f"{best / size * 1e6:.0f} microseconds of CPU for a KiB of the sample, which is dense with numbers."


if __name__ == "__main__":
    for half in HALVES:
        measured = measure(load(half))
        print("\n".join(table(half, measured)))
        if "--wrong" in sys.argv and half == "tuned":
            print("\n".join(measured.wrong), end="\n\n")
    print(cost())
