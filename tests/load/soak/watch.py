"""What the gateway's processes hold over the run: memory, open files, threads, processor time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil

from tests.load.soak.clients import World
from tests.load.soak.stage import Stage

EVERY = 5.0  # seconds
SETTLED = 1 / 3  # of a process's life, after which its memory has to be flat
JUDGED_FROM = 600.0  # seconds of life; it takes some minutes until memory has reached its level
MOST_GROWTH = 0.05  # of the memory, over the rest of its life ...
NOISE = 6.0  # ... or MiB, whichever is more
MIB = 1024 * 1024


class Look(NamedTuple):
    at: float
    rss: float  # MiB
    files: int
    threads: int
    cpu: float  # seconds


@dataclass
class Life:
    """One process from its start to its end."""

    name: str
    looks: list[Look] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.looks[-1].at - self.looks[0].at

    @property
    def slope(self) -> float:
        """MiB a second over the last two thirds, by least squares."""
        since = self.looks[0].at + self.seconds * SETTLED
        points = [(look.at, look.rss) for look in self.looks if look.at >= since]
        middle = sum(at for at, _ in points) / len(points), sum(rss for _, rss in points) / len(points)
        spread = sum((at - middle[0]) ** 2 for at, _ in points)
        return sum((at - middle[0]) * (rss - middle[1]) for at, rss in points) / spread if spread else 0.0

    @property
    def growth(self) -> float:
        """MiB over the last two thirds."""
        return self.slope * self.seconds * (1 - SETTLED)

    @property
    def is_flat(self) -> bool:
        middle = self.looks[len(self.looks) // 2].rss
        return self.seconds < JUDGED_FROM or self.growth <= max(NOISE, MOST_GROWTH * middle)


class Watch:
    def __init__(self, world: World, stage: Stage) -> None:
        self._world, self._stage = world, stage
        self.lives: dict[int, Life] = {}  # by process id
        self._starts: dict[int, int] = {}
        self.lags: list[float] = []  # seconds that this process came too late
        self.streams: list[int] = []

    async def run(self) -> None:
        """While there is load; memory after it says nothing of it."""
        while not self._world.stopping.is_set():
            self.look()
            due = time.monotonic() + EVERY
            while time.monotonic() < due and not self._world.stopping.is_set():
                begun = time.monotonic()
                await asyncio.sleep(0.1)
                self.lags.append(time.monotonic() - begun - 0.1)

    def look(self) -> None:
        self.streams.append(self._world.open_streams)
        processes = {"supervisor": psutil.Process(self._stage.gateway.pid)}
        processes |= {f"worker {number}": process for number, process in self._stage.members().items()}
        for name, process in processes.items():
            if process.pid not in self.lives:
                self._starts[process.pid] = starts = sum(one.name.startswith(name) for one in self.lives.values()) + 1
                self.lives[process.pid] = Life(f"{name} ({starts})" if name != "supervisor" else name)
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    look = Look(
                        time.monotonic(), process.memory_info().rss / MIB, process.num_fds(), process.num_threads(),
                        times.user + times.system,
                    )  # fmt: skip
            except psutil.NoSuchProcess:
                continue
            self.lives[process.pid].looks.append(look)

    def print(self) -> None:
        print(f"\n{'process':16}{'lived s':>9}{'MiB start':>11}{'middle':>8}{'end':>8}{'MiB/h':>8}{'flat':>6}"
              f"{'files':>15}{'threads':>12}{'CPU s':>8}")  # fmt: skip
        for life in self.lives.values():
            if not life.looks:
                continue
            begun = life.looks[min(2, len(life.looks) - 1)]  # the first ones may meet a process that loads its code
            three = begun, life.looks[len(life.looks) // 2], life.looks[-1]
            start, middle, end = (look.rss for look in three)
            flat = "short" if life.seconds < JUDGED_FROM else "yes" if life.is_flat else "NO"
            files = "/".join(str(look.files) for look in three)
            threads = "/".join(str(look.threads) for look in three)
            print(f"{life.name:16}{life.seconds:>9.0f}{start:>11.1f}{middle:>8.1f}{end:>8.1f}{life.slope * 3600:>8.1f}"
                  f"{flat:>6}{files:>15}{threads:>12}{end_cpu(life):>8.1f}")  # fmt: skip


def end_cpu(life: Life) -> float:
    return life.looks[-1].cpu
