"""A fleet, a gateway and its clients in one place, and what is read off them afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tests.sim.clock import Clock
from tests.sim.engine import Engine, Hardware
from tests.sim.front import Front
from tests.sim.workload import Request, Source


@dataclass(frozen=True, slots=True)
class Result:
    """Times in seconds. Loads by replica, in the fleet's order."""

    answered: int
    failed: int  # without a first token: the client sees an error
    cut: int  # in the middle of an answer
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    served: tuple[int, ...]  # requests
    busy: tuple[float, ...]  # share of the time
    hits: float  # share of prompt tokens that were in a cache
    queued: tuple[int, ...]  # the most requests that ever waited inside an engine

    @property
    def uneven(self) -> float:
        """The most requests of a replica over the fewest."""
        return max(self.served) / max(1, min(self.served))


class Lab:
    """One simulation. The same seed is the same story, whatever the policy, as far as the policy does not change it."""

    def __init__(self, policy: str, fleet: Sequence[Hardware], seed: int = 1, most: int | None = None) -> None:
        self.clock = Clock()
        self.engines = [Engine(self.clock, hardware) for hardware in fleet]
        self.front = Front(self.clock, self.engines, policy, Random(f"{seed} choices"), most)
        self.random = Random(f"{seed} clients")
        self.source = Source(self.clock, seed, self.front)

    def run(self, until: float) -> None:
        self.clock.run(until)

    def measured(self, since: float = 0.0, until: float = float("inf")) -> list[Request]:
        return [r for r in self.source.requests if since <= r.arrived < until]

    def result(self, since: float = 0.0) -> Result:
        requests = self.measured(since)
        # Whoever still waits counts with the wait so far: those that are served badly must not drop out.
        waits = sorted((r.first or self.clock.now) - r.arrived for r in requests if r.first or not r.ended)
        hits = Counter(name for r in requests for name in r.attempts)
        read = sum(engine.computed + engine.cached for engine in self.engines)
        return Result(
            answered=sum(r.ended > 0 and not r.failed for r in requests),
            failed=sum(r.failed and not r.first for r in requests),
            cut=sum(r.failed and r.first > 0 for r in requests),
            ttft_mean=sum(waits) / max(1, len(waits)),
            ttft_p50=share(waits, 0.5),
            ttft_p99=share(waits, 0.99),
            served=tuple(hits[name] for name in self.front.engines),
            busy=tuple(engine.busy / self.clock.now for engine in self.engines),
            queued=tuple(engine.most_waiting for engine in self.engines),
            hits=sum(engine.cached for engine in self.engines) / max(1, read),
        )


def share(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def jain(values: Sequence[float]) -> float:
    """1 when all are equal, 1/n when one has it all."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))
