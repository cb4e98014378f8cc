"""An engine with continuous batching and a paged cache, in virtual time.

The constants are those of an 8B model with 16-bit weights on one data centre GPU under vLLM, in round numbers: about
10,000 prompt tokens a second, and decoding steps of 20 to 30 ms with 32 to 64 sequences. A step carries one token of
every running sequence and fills up with prompt tokens, first come, first served. Blocks of finished prompts and answers
stay in the cache until room is needed. When a growing answer finds no room, the sequence that came last is put back and
computed again, as vLLM does.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Protocol

from backends.base import EngineLoad
from tests.sim.clock import Clock

BLOCK = 64  # tokens; engines use 16, which makes no difference to prompts of thousands
WIRE = 0.001  # seconds between gateway and engine
SHORT = 0.001  # seconds in which a failing engine refuses


@dataclass(frozen=True, slots=True)
class Hardware:
    """What an engine can do. Times in seconds."""

    step: float = 0.010  # of a step, to read the weights
    per_sequence: float = 0.0003  # more for each sequence that decodes
    per_token: float = 0.0001  # more for each prompt token
    budget: int = 2048  # tokens in one step
    most: int = 64  # sequences in one step
    cache: int = 160_000  # tokens of KV cache
    loading: float = 30.0  # until a started engine answers

    def slower(self, times: float) -> Hardware:
        return Hardware(
            self.step * times, self.per_sequence * times, self.per_token * times, self.budget, self.most, self.cache,
            self.loading,
        )  # fmt: skip


class Waiter(Protocol):
    """Whoever gets the answer."""

    def first_token(self) -> None: ...
    def done(self) -> None: ...
    def broke(self) -> None: ...


class Job:
    """A request inside an engine. `blocks`: names of the whole blocks of prompt and answer; equal names, equal text."""

    __slots__ = ("answer", "begun", "blocks", "held", "left", "made", "prompt", "waiter")

    def __init__(self, prompt: int, answer: int, blocks: tuple[int, ...], waiter: Waiter) -> None:
        self.prompt, self.answer, self.blocks, self.waiter = prompt, answer, blocks, waiter  # tokens
        self.made = 0  # tokens of the answer
        self.left = 0  # tokens to compute before the next one of the answer
        self.held: tuple[int, ...] = ()  # blocks it keeps in the cache
        self.begun = -1  # step in which it began to decode, less what it had made before


class Cache:
    """Blocks of text: those that running jobs hold, and the rest in the order in which they will be dropped."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._held: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.growing = 0  # tokens of answers that are being written

    @property
    def free(self) -> int:
        """Blocks that can be had, if need be by dropping idle ones."""
        return self.blocks - len(self._held) - -(-self.growing // BLOCK)

    @property
    def used(self) -> float:
        return 1 - self.free / self.blocks

    def hold(self, names: tuple[int, ...], spare: int) -> int | None:
        """Blocks from the beginning that were there; None if the rest finds no room."""
        hits = 0
        for name in names:
            if name not in self._held and name not in self._idle:
                break
            hits += 1
        if len(names) - hits + spare + sum(name in self._idle for name in names[:hits]) > self.free:
            return None
        for name in names:
            self._held[name] = self._held.get(name, 0) + 1
            self._idle.pop(name, None)
        self._trim()
        return hits

    def release(self, names: Iterable[int]) -> None:
        for name in names:
            if self._held[name] > 1:
                self._held[name] -= 1
            else:
                del self._held[name]
                self._idle[name] = None

    def keep(self, names: Iterable[int]) -> None:
        """An answer was written: its blocks may serve the chat's next turn."""
        for name in names:
            if name not in self._held:
                self._idle[name] = None
        self._trim()

    def _trim(self) -> None:
        while self._idle and len(self._idle) > self.free:
            self._idle.popitem(last=False)


class Mood(StrEnum):
    UP = "up"
    LOADING = "loading"
    DEAD = "dead"


class Engine:
    """One replica's engine."""

    def __init__(self, clock: Clock, hardware: Hardware) -> None:
        self._clock, self.hardware = clock, hardware
        self.mood = Mood.UP
        self.refuses = False  # answers 503 at once although its health looks well
        self.busy = 0.0  # seconds with something to do
        self.computed = self.cached = 0  # prompt tokens
        self.preempted = self.most_waiting = 0
        self.life = 0  # grows with every death: what was under way then comes to nothing
        self._empty()

    def _empty(self) -> None:
        self.cache = Cache(self.hardware.cache // BLOCK)
        self.waiting: deque[Job] = deque()
        self._running: dict[Job, None] = {}
        self._prefilling: deque[Job] = deque()
        self._finishing: list[tuple[int, int, Job]] = []  # step number, tie, job
        self._numbers = count()
        self._decoding = 0
        self._steps = 0
        self._stepping = False

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._running), len(self.waiting), self.cache.used)

    def submit(self, job: Job) -> None:
        if self.mood is not Mood.UP or self.refuses:
            self._clock.after(SHORT, job.waiter.broke)
            return
        self.waiting.append(job)
        if not self._stepping:
            self._step()

    # --- faults
    def die(self) -> None:
        jobs = [*self._running, *self.waiting]
        self.mood = Mood.DEAD
        self.life += 1
        self._empty()
        for job in jobs:
            self._clock.after(WIRE, job.waiter.broke)

    def start(self) -> None:
        """It loads its model first."""
        self.mood = Mood.LOADING
        self._clock.after(self.hardware.loading, self._loaded)

    def _loaded(self) -> None:
        self.mood = Mood.UP

    # --- steps
    def _step(self) -> None:
        self._admit()
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        self._make_room()
        if not self._running:
            self._stepping = False
            return
        self._stepping = True
        decoding = self._decoding
        chunk, ready = self._fill(self.hardware.budget - decoding)
        h = self.hardware
        seconds = h.step + h.per_sequence * decoding + h.per_token * chunk
        life = self.life
        self._clock.after(seconds, lambda: self._stepped(life, seconds, ready))

    def _admit(self) -> None:
        while self.waiting and len(self._running) < self.hardware.most:
            job = self.waiting[0]
            tokens = job.prompt + job.made
            names = job.blocks[: tokens // BLOCK]
            hits = self.cache.hold(names, 1)
            if hits is None:
                return
            self.waiting.popleft()
            job.held = names
            job.left = max(1, tokens - hits * BLOCK)
            self.cached += tokens - job.left
            self._running[job] = None
            self._prefilling.append(job)

    def _make_room(self) -> None:
        """For one more token of each answer."""
        while self.cache.free < 1 and len(self._running) > 1:
            job = next(reversed(self._running))
            if job.left:
                self._prefilling.remove(job)
            else:
                self._leave_decoding(job)
            self._running.pop(job)
            self.cache.release(reversed(job.held))
            self.waiting.appendleft(job)
            self.preempted += 1

    def _leave_decoding(self, job: Job) -> None:
        self._decoding -= 1
        made = self._steps - job.begun
        self.cache.growing -= made - job.made
        job.made, job.begun = made, -1

    def _fill(self, budget: int) -> tuple[int, list[Job]]:
        """Prompt tokens that fit into this step, and the jobs whose prompts are read with it."""
        chunk, ready = 0, []
        while self._prefilling and chunk < budget:
            job = self._prefilling[0]
            part = min(job.left, budget - chunk)
            job.left -= part
            chunk += part
            if job.left:
                break
            ready.append(self._prefilling.popleft())
        self.computed += chunk
        return chunk, ready

    def _stepped(self, life: int, seconds: float, ready: list[Job]) -> None:
        if life != self.life:
            return
        self.busy += seconds
        self._steps += 1
        self.cache.growing += self._decoding + len(ready)
        done = []
        while self._finishing and self._finishing[0][0] <= self._steps:
            _, _, job = heapq.heappop(self._finishing)
            if job.begun >= 0 and self._steps - job.begun >= job.answer:  # else it was put back in between
                done.append(job)
        for job in ready:  # their first token comes with this step
            self._decoding += 1
            job.begun = self._steps - 1 - job.made
            if job.made + 1 >= job.answer:
                done.append(job)
            else:
                heapq.heappush(self._finishing, (job.begun + job.answer, next(self._numbers), job))
            if not job.made:
                self._clock.after(WIRE, job.waiter.first_token)
        for job in done:
            self._finish(job)
        self._step()

    def _finish(self, job: Job) -> None:
        self._leave_decoding(job)
        self._running.pop(job)
        self.cache.release(reversed(job.held))
        self.cache.keep(reversed(job.blocks[len(job.held) :]))
        self._clock.after(WIRE, job.waiter.done)
