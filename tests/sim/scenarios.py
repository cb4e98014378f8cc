"""The stories that are told of every policy. Each gives back its lab, run to the end.

`load` is a share of what the fleet can do when routing helps nothing, measured once and written down here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.sim.engine import Hardware, Job
from tests.sim.lab import Lab, jain, share

GPU = Hardware()
CPU = GPU.slower(10)
SLOTS = Hardware(most=4, cache=32_000)  # few sequences at once and no more: llama.cpp

# What the fleets do when they are offered more than they can under round robin, in requests a second.
CHATS = 36.4  # eight GPUs
SINGLES = 5.9  # one GPU; a CPU a tenth
SIZES = 45.2  # eight GPUs
PLACES = 15.8  # three GPUs with 32 places each
SLOTS_ALL = 6.5  # three engines with slots and a slow one, under least_load: round robin would fill the slow one alone


def chats(
    policy: str, load: float = 0.8, seed: int = 1, seconds: float = 400.0, cache: int = GPU.cache, prompts: int = 6
) -> Lab:
    """Eight replicas, several system prompts, chats of eight turns. `cache`: tokens that a replica can keep."""
    lab = Lab(policy, [replace(GPU, cache=cache)] * 8, seed)

    def begin() -> None:
        system = lab.random.randrange(prompts)
        lab.source.chat("t", system + 1, 512 + 256 * system, turns=8, said=250, answer=200, pause=10)

    lab.source.poisson(load * CHATS / 8, 0, seconds, begin)
    lab.run(seconds)
    return lab


def singles(
    policy: str, load: float = 0.8, seed: int = 1, seconds: float = 300.0, *, fast: int = 8, slow: int = 0,
    whole: float = 0.0,
) -> Lab:  # fmt: skip
    """Requests that have nothing in common, before replicas of which some take ten times as long. `whole`: the share of
    requests that want no stream."""
    lab = Lab(policy, [GPU] * fast + [CPU] * slow, seed)
    rate = load * SINGLES * (fast + slow / 10)
    lab.source.poisson(rate, 0, seconds, lambda: lab.source.single("t", 1000, 150, whole))
    lab.run(seconds)
    return lab


def sizes(policy: str, load: float = 0.8, seed: int = 1, seconds: float = 300.0) -> Lab:
    """One request in ten has a prompt of about 8,000 tokens and a long answer, the others are short."""
    lab = Lab(policy, [GPU] * 8, seed)

    def begin() -> None:
        long = lab.random.random() < 0.1
        lab.source.single("t", *((8000, 500) if long else (300, 100)))

    lab.source.poisson(load * SIZES, 0, seconds, begin)
    lab.run(seconds)
    return lab


def slots(policy: str, load: float = 0.8, seed: int = 1, seconds: float = 300.0) -> Lab:
    """Three engines with four slots each, which queue what is beyond, and one that takes ten times as long."""
    lab = Lab(policy, [SLOTS] * 3 + [SLOTS.slower(10)], seed)
    lab.source.poisson(load * SLOTS_ALL, 0, seconds, lambda: lab.source.single("t", 500, 150))
    lab.run(seconds)
    return lab


def burst(policy: str, seed: int = 1, background: float = 3.0) -> tuple[Lab, list[int]]:
    """Sixty requests within 100 ms on three equal replicas whose load is polled every five seconds, after a minute of
    `background` requests a second. Also gives back where the sixty went."""
    lab = Lab(policy, [GPU] * 3, seed)
    if background:
        lab.source.poisson(background, 0, 70, lambda: lab.source.single("t", 1000, 150))
    lab.source.burst(60 + 5 * lab.random.random(), 60, 0.1, lambda: lab.source.single("burst", 300, 150))
    lab.run(90)
    went = [request.attempts[0] for request in lab.source.requests if request.tenant == "burst"]
    return lab, [went.count(name) for name in lab.front.engines]


def flood(times: float, load: float = 0.7, seed: int = 1, seconds: float = 300.0, most: int = 32) -> Lab:
    """Four tenants of equal weight on three replicas with `most` places each. Three of them ask for `load` of their
    share, and one for `times` its share."""
    lab = Lab("least_load", [GPU] * 3, seed, most)
    asked = PLACES / 4
    for name in ("a", "b", "c"):
        lab.source.poisson(asked * load, 0, seconds, lambda name=name: lab.source.single(name, 1000, 150))
    if times:
        lab.source.poisson(asked * times, 0, seconds, lambda: lab.source.single("loud", 1000, 150))
    lab.run(seconds)
    return lab


@dataclass(frozen=True, slots=True)
class Crowd:
    """What the three quiet tenants saw. Seconds."""

    queue_p99: float  # in the gateway, until sent or refused
    ttft_p99: float
    fairness: float  # Jain's index of the tokens served to all four
    loud: float  # tokens served to the loud one over the mean of the others


def crowd(lab: Lab, since: float = 60.0, until: float = 270.0) -> Crowd:
    requests = lab.measured(since, until)
    quiet = [r for r in requests if r.tenant != "loud"]
    served = dict.fromkeys(("a", "b", "c", "loud"), 0)
    for r in requests:
        if r.ended and not r.failed:
            served[r.tenant] += r.prompt + r.answer
    now = lab.clock.now
    return Crowd(
        queue_p99=share(sorted((r.sent or r.ended or now) - r.arrived for r in quiet), 0.99),
        ttft_p99=share(sorted((r.first or now) - r.arrived for r in quiet if not r.failed), 0.99),
        fairness=jain(list(served.values())),
        loud=3 * served["loud"] / (sum(served.values()) - served["loud"]),
    )


def death(policy: str, seed: int = 1, rate: float = 200.0, dies: float = 20.0, back: float = 35.0) -> Lab:
    """Short requests at 200 a second on three replicas, one of which dies and is started again."""
    lab = Lab(policy, [GPU] * 3, seed)
    lab.source.poisson(rate, 0, 120, lambda: lab.source.single("t", 30, 8))
    lab.clock.after(dies, lab.engines[0].die)
    lab.clock.after(back, lab.engines[0].start)
    lab.run(122)
    return lab


def failing(policy: str, seed: int = 1, rate: float = 30.0) -> Lab:
    """One of three replicas looks healthy and answers 503 within a millisecond."""
    lab = Lab(policy, [GPU] * 3, seed)
    lab.engines[0].refuses = True
    lab.source.poisson(rate, 0, 120, lambda: lab.source.single("t", 300, 30))
    lab.run(125)
    return lab


class _Nobody:
    """Whoever asked without the gateway."""

    def first_token(self) -> None: ...
    def done(self) -> None: ...
    def broke(self) -> None: ...


def others(policy: str, seed: int = 1, load: float = 0.6, seconds: float = 300.0) -> Lab:
    """Four replicas, one of which also serves as many requests of others, past the gateway, as it could serve alone."""
    lab = Lab(policy, [GPU] * 4, seed)
    lab.source.poisson(load * SINGLES * 4, 0, seconds, lambda: lab.source.single("t", 1000, 150))
    nobody = _Nobody()
    lab.source.poisson(0.7 * SINGLES, 0, seconds, lambda: lab.engines[0].submit(Job(1000, 150, (), nobody)))
    lab.run(seconds)
    return lab
