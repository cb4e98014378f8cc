"""What clients ask: chats that grow turn by turn, single requests long and short, bursts, and a tenant that floods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Protocol

from gateway.prefixes import Chain
from tests.sim.clock import Clock
from tests.sim.engine import BLOCK

LONGEST = 512  # blocks of one chat
_FAR = 1 << 40  # names of shared blocks are below zero, one range for each system prompt


class Arrivals(Protocol):
    """Where requests go."""

    def arrive(self, request: Request) -> None: ...


@dataclass(slots=True, eq=False)
class Request:
    """One request and what became of it. Times in virtual seconds, sizes in tokens."""

    tenant: str
    prompt: int
    answer: int
    blocks: tuple[int, ...]  # of prompt and answer
    then: Callable[[], None] | None = None  # when it has been answered, or has failed
    session: bytes = b""
    whole: bool = False  # the answer comes in one piece, so the gateway sees no first token
    chain: Chain | None = None  # what the gateway's prefix index knows it by, once that was asked
    arrived: float = 0.0
    sent: float = 0.0  # to the first replica; until then it waited in the gateway
    first: float = 0.0
    ended: float = 0.0
    failed: bool = False
    replica: str = ""  # the last one it was sent to
    attempts: list[str] = field(default_factory=list)

    def finish(self, now: float) -> None:
        self.ended = now
        if self.then is not None:
            self.then()

    def fail(self, now: float) -> None:
        self.failed = True
        self.finish(now)


class Source:
    """Makes requests and remembers them all."""

    def __init__(self, clock: Clock, seed: int, front: Arrivals) -> None:
        self._clock, self._seed, self._front = clock, seed, front
        self._numbers = count()
        self.requests: list[Request] = []

    def poisson(self, per_second: float, since: float, until: float, begin: Callable[[], None]) -> None:
        """Calls `begin` at random moments."""
        random = self._chance()

        def next_one() -> None:
            if self._clock.now < until:
                begin()
                self._clock.after(random.expovariate(per_second), next_one)

        self._clock.after(since + random.expovariate(per_second), next_one)

    def burst(self, at: float, size: int, within: float, begin: Callable[[], None]) -> None:
        """Calls `begin` that often, evenly spaced from `at` on."""
        for number in range(size):
            self._clock.after(at + within * number / size - self._clock.now, begin)

    def send(self, request: Request) -> None:
        self.requests.append(request)
        self._front.arrive(request)

    def single(self, tenant: str, prompt: float, answer: float, whole: float = 0.0) -> None:
        """A request that has nothing in common with any other. `prompt`, `answer`: mean tokens. `whole`: how likely it
        is that it asks for no stream."""
        random = self._chance()
        sizes = _about(prompt, random), _about(answer, random)
        blocks = _own_blocks(next(self._numbers), 0, sum(sizes))
        self.send(Request(tenant, *sizes, blocks, whole=random.random() < whole))

    def chat(self, tenant: str, system: int, shared: int, turns: int, said: float, answer: float, pause: float) -> None:
        """A chat under one of the system prompts: `shared` tokens, the same for every chat with the same `system`.
        `said` and `answer`: mean tokens of a message and its answer. `pause`: mean seconds between the two."""
        random = self._chance()
        name, left, text = next(self._numbers), turns, shared

        def turn() -> None:
            nonlocal left, text
            left -= 1
            prompt, answered = text + _about(said, random), _about(answer, random)
            text = prompt + answered
            common = tuple(-system * _FAR - number for number in range(1, shared // BLOCK + 1))
            blocks = common + _own_blocks(name, len(common), text)
            request = Request(tenant, prompt, answered, blocks, lambda: again(request), name.to_bytes(16))
            self.send(request)

        def again(request: Request) -> None:
            if left and not request.failed and len(request.blocks) < LONGEST:
                self._clock.after(random.expovariate(1 / pause), turn)

        turn()

    def _chance(self) -> Random:
        """One for each client, so that what happens to one changes nothing of what another asks."""
        return Random(f"{self._seed} {next(self._numbers)}")


def _about(mean: float, random: Random) -> int:
    """Sizes as people have them: most are small, a few are many times the mean."""
    return max(1, round(random.lognormvariate(0, 0.6) / 1.197 * mean))


def _own_blocks(name: int, start: int, tokens: int) -> tuple[int, ...]:
    return tuple(range((name + 1) * LONGEST * 4 + start, (name + 1) * LONGEST * 4 + tokens // BLOCK))
