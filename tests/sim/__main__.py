"""Prints what every policy makes of every story: `python -m tests.sim [story ...]`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from gateway.routing import POLICIES
from tests.sim import scenarios
from tests.sim.lab import Lab
from tests.sim.rivals import RIVALS

WARM = 100.0  # seconds that are not measured
FAULTS = ("one dies and returns", "one fails at once")  # measured from the start, and not with rivals

Story = Callable[[str], Lab]

STORIES: dict[str, Story] = {
    "chats, 80 %": scenarios.chats,
    "chats, one system prompt": partial(scenarios.chats, prompts=1),
    "chats, half the cache": partial(scenarios.chats, load=0.6, cache=80_000),
    "eight equal": scenarios.singles,
    "eight equal, no streams": partial(scenarios.singles, whole=1.0),
    "three fast, one slow": partial(scenarios.singles, fast=3, slow=1),
    "two fast, two slow": partial(scenarios.singles, fast=2, slow=2),
    "one fast, three slow": partial(scenarios.singles, fast=1, slow=3),
    "long and short": scenarios.sizes,
    "engines with slots": scenarios.slots,
    "requests of others": scenarios.others,
    "one dies and returns": scenarios.death,
    "one fails at once": scenarios.failing,
}


def main(wanted: list[str]) -> None:
    for name, story in STORIES.items():
        if not wanted or any(word in name for word in wanted):
            print(f"\n{name}\n  {'':17}   TTFT mean    p50    p99   hits  most/fewest  errors  cut")
            for policy in POLICIES if name in FAULTS else (*POLICIES, *RIVALS):
                _row(policy, story(policy), 0.0 if name in FAULTS else WARM)
    if not wanted or "flood" in wanted:
        _flood()


def _row(policy: str, lab: Lab, since: float) -> None:
    r = lab.result(since)
    print(
        f"  {policy:17} {r.ttft_mean:9.3f} s {r.ttft_p50:6.3f} {r.ttft_p99:6.2f} {r.hits:6.2f} {r.uneven:10.2f}"
        f" {r.failed:9} {r.cut:4}",
        flush=True,
    )


def _flood() -> None:
    print("\np99 of three tenants who ask for `load` of their shares, while a fourth asks for `times` of its")
    print("  load  times   queued      TTFT   Jain's index   loud / mean of others")
    for load in (0.7, 0.9, 1.1):
        for times in (0.0, max(1.0, load), 10.0):
            r = scenarios.crowd(scenarios.flood(times, load))
            seen = f"{r.queue_p99:6.2f} s {r.ttft_p99:7.2f} s"
            print(f"  {load:4.1f} {times:6.1f} {seen} {r.fairness:14.3f} {r.loud:23.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
