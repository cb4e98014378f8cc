"""Prometheus text format to numbers, for engines that publish their load that way."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite


def read(body: bytes, names: Iterable[str]) -> dict[str, float]:
    """Sums the samples of each named metric over all label sets.

    Names match exactly: `num_requests_waiting` does not take in `num_requests_waiting_by_reason`. A metric that is
    absent is absent from the result too, and one whose value is not a number is skipped.
    """
    wanted = {name.encode() for name in names}
    totals: dict[str, float] = {}
    for line in body.splitlines():
        if line.startswith(b"#"):
            continue
        name = line.partition(b"{")[0] if b"{" in line else line.partition(b" ")[0]
        if name not in wanted:
            continue
        sample = line.rpartition(b"}")[2] if b"{" in line else line.partition(b" ")[2]
        try:
            value = float(sample.split()[0])
        except (ValueError, IndexError):
            continue
        if isfinite(value):  # NaN and Inf say nothing of a load
            totals[name.decode()] = totals.get(name.decode(), 0.0) + value
    return totals
