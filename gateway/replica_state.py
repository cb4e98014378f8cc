"""What one replica is doing: health, load, what its answers have taken. Beside it only `fleet` writes these numbers."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from enum import StrEnum
from math import inf

from backends.base import EngineLoad, ModelCard
from gateway.types import Replica
from gateway.workers.places import Places

FAILURES_TO_OPEN = 3  # in a row
FAILING_TO_OPEN = 0.4  # or this share of the last twenty or so: about every second request, for a while
FIRST_PAUSE = 5.0  # seconds a replica is left alone after that; doubles with every failed trial or early relapse
LONGEST_PAUSE = 60.0
PROBES_TO_FALL = 2  # failed probes in a row before an idle replica counts as down
PROBES_TO_RISE = 2  # good ones in a row before a replica that was down counts as up
MOST_PROBES_TO_RISE = 16  # for one that falls again and again
STEADY = 60.0  # seconds up after which a fall counts as the first one again
SMOOTHING = 0.2  # weight of the newest value in moving averages
SLOW_START = 20.0  # seconds in which a replica that is back gets its full share again
SLOWEST_START = 0.1  # of its share, at first
READING = 8  # answers in progress that hold up the next request as much as one prompt that is being read
KV_TIGHT = 0.9  # share of the KV cache in use from which on engines begin to put requests off


class Health(StrEnum):
    """The probe's word on a replica."""

    UNKNOWN = "unknown"  # not asked yet: may be tried
    UP = "up"
    LOADING = "loading"
    DOWN = "down"


class ReplicaState:
    """One replica as routing sees it. Times are seconds of a steady clock.

    `open` and `wait` follow from the rest and are kept up to date by whatever changes it, since every choice reads them
    of every replica and they change far less often.
    """

    __slots__ = (
        "assumed", "back_since", "bound", "broken", "card", "cold", "cold_ttft", "column", "detail", "draining",
        "elsewhere", "failed_probes", "failing", "failures", "foreign", "health", "hopeless", "inflight", "load",
        "load_read_at", "made", "most", "open", "passed_probes", "pause", "paused_until", "places", "prefill",
        "probes_to_rise", "reading", "replica", "served_at", "slow_until", "spent", "tpot", "trying", "ttft", "unit",
        "wait", "waiting", "weighed_at",
    )  # fmt: skip

    def __init__(self, replica: Replica, places: Places | None = None) -> None:
        self.places = places  # of several workers
        self.column: int | None = None  # where they count this replica; None = this process is the only one
        self.inflight = 0  # this process's open requests, exact
        self.elsewhere = 0  # those of other workers, as of the last look
        self.waiting = 0  # requests that could use a place here and wait for one
        self.reading = 0  # those of them that are streams without a first token: their prompts wait or are being read
        self.health = Health.UNKNOWN
        self.card: ModelCard | None = None  # what the engine says of the model, once it has been asked
        self.detail = ""  # why it is not up, for operators
        self.hopeless = False  # an embedded engine that cannot work with what it was given
        self.failed_probes = self.passed_probes = 0  # in a row
        self.probes_to_rise = PROBES_TO_RISE
        self.back_since = -inf
        self.failures = 0  # in a row, of real requests
        self.failing = 0.0  # share of failures among the last requests, moving average
        self.broken = False  # set aside after failures, until a trial succeeds or a probe finds it back
        self.paused_until = 0.0  # 0 = not paused; both the breaker and an engine that asks for a pause set it
        self.pause = FIRST_PAUSE  # how long the next one is
        self.trying = False  # a request is finding out whether it is back
        self.draining = False
        self.load = EngineLoad()
        self.load_read_at = 0.0
        self.foreign = 0  # requests of others that the engine had when it was asked last
        self.ttft: float | None = None  # seconds to the first token, moving average
        self.tpot: float | None = None  # seconds per token after the first, moving average
        self.cold = 0.0  # characters of prompts that were new to its cache, moving average; 0 = nothing measured
        self.cold_ttft = 0.0  # seconds to the first token of those, moving average
        self.prefill: float | None = None  # seconds for one such character: its own, or else what its peers take
        self.spent = 0.0  # seconds that an answer was in the making, moving average
        self.made = 0.0  # tokens it had, moving average; 0 = nothing measured
        self.assumed = 1.0  # `service` as long as nothing was measured: what its peers take
        self.served_at = 0.0
        self.slow_until = 0.0
        self.open = True  # neither down, drained nor paused
        self.unit = 1.0  # seconds that each request before it makes one wait
        self.wait = 1.0  # seconds until one more request would be answered, for comparing replicas
        self.weighed_at = 0.0
        self.adopt(replica)

    def adopt(self, replica: Replica) -> None:
        self.replica, self.hopeless = replica, False
        self.bound = sys.maxsize if replica.max_inflight is None else replica.max_inflight
        self.most = self.bound  # how many of those may be this process's
        self.column = self.places.column(replica.id) if self.places is not None else None
        self.weigh(self.weighed_at)

    def weigh(self, now: float) -> None:
        """Brings `open`, `unit` and `wait` up to date."""
        self.weighed_at = now
        if not self.broken and now >= self.paused_until:
            self.paused_until = 0.0  # the engine's own pause is over: all may come back
        self.open = not self.draining and not self.paused_until and self.health in (Health.UP, Health.UNKNOWN)
        unit = (self.spent / self.made if self.made else self.assumed) / self.replica.weight
        if self.slow_until > now:
            unit /= max(SLOWEST_START, 1 - (self.slow_until - now) / SLOW_START)
        kv_used = self.load.kv_used
        if kv_used is not None and kv_used > KV_TIGHT:
            unit *= 1 + 4 * (kv_used - KV_TIGHT) / (1 - KV_TIGHT)
        self.unit = unit
        others = max(self.foreign, self.elsewhere)
        self.wait = (self.inflight + others + READING * self.reading + 1) * unit

    @property
    def service(self) -> float | None:
        """Seconds in which it makes one token of an answer, or a whole answer where there are no tokens; None while
        nothing was measured. It hardly depends on how many requests share the engine, so a replica that gets few of
        them does not look slow for it."""
        return self.spent / self.made if self.made else None

    def routable(self, now: float) -> bool:
        if self.paused_until and not self.draining and self.health in (Health.UP, Health.UNKNOWN):
            # After the pause one request tries whether the replica is back; it decides for the others.
            return now >= self.paused_until and not self.trying
        return self.open

    def has_room(self) -> bool:
        if self.column is not None:
            self.share_places()
        return self.inflight < self.most

    def share_places(self) -> None:
        """Brings `most` up to date, where other workers use the same replica."""
        if self.column is not None and self.places is not None and self.bound != sys.maxsize:
            self.most = self.places.share(self.column, self.bound)

    def set_draining(self, draining: bool, now: float) -> None:
        self.draining = draining
        self.weigh(now)

    # --- real requests and their outcomes
    def begin(self) -> bool:
        """Takes a place; whether this request is the one that finds out if the replica is back."""
        self.inflight += 1
        self.wait += self.unit
        if self.column is not None:
            self._tell()
        if self.broken and not self.trying:
            self.trying = True
            return True
        return False

    def end(self, trial: bool) -> None:
        """Gives the place back; takes what `begin` returned."""
        self.inflight -= 1
        self.wait -= self.unit
        if trial:
            self.trying = False
        if self.column is not None:
            self._tell()
            self._pass_on()

    def wait_for(self, requests: int) -> None:
        """So many more requests wait for a place here, or fewer."""
        self.waiting += requests
        if self.column is not None and self.places is not None:
            self.places.set_waiting(self.column, self.waiting)

    def _tell(self) -> None:
        if self.column is not None and self.places is not None:
            self.places.set_open(self.column, self.inflight)

    def _pass_on(self) -> None:
        places, column = self.places, self.column
        if places is not None and column is not None and places.wanted_elsewhere(column):
            places.freed(self.replica.id)

    def begin_reading(self) -> None:
        """A stream was begun, and its first token has yet to come."""
        self.reading += 1
        self.wait += READING * self.unit

    def end_reading(self) -> None:
        self.reading -= 1
        self.wait -= READING * self.unit

    def succeeded(
        self,
        now: float,
        began: float,
        ttft: float | None,
        tpot: float | None,
        tokens: int = 1,
        *,
        trial: bool = False,
        cold: int = 0,
    ) -> None:
        """An answer was given. `began`: when its request was sent. Its place has been given back already. `tokens`: of
        the answer, if it had any. `cold`: characters of its prompt that were new here, when that was most of it."""
        if not self.broken:
            self.failures = 0
            self.failing *= 0.9
        elif trial:  # answers to requests from before say nothing of the replica as it is now
            self.end_trial(now)
        self.served_at = now
        # Of a stream the time after its first token counts: what came before depends on the prompt and on the queue.
        made = max(1, tokens if tpot is None else tokens - 1)
        spent = now - began if tpot is None else tpot * made
        # The means apart, not the mean of quotients, so that short answers do not weigh as much as long ones.
        self.spent = _average(self.spent if self.made else None, spent)
        self.made = _average(self.made or None, made)
        if ttft is not None:
            self.ttft = _average(self.ttft, ttft)
            if cold:
                self.cold_ttft = _average(self.cold_ttft if self.cold else None, ttft)
                self.cold = _average(self.cold or None, cold)
                self.prefill = self.cold_ttft / self.cold
        if tpot is not None:
            self.tpot = _average(self.tpot, tpot)
        self.weigh(now)

    def failed(self, now: float, *, trial: bool = False) -> None:
        """A request failed, and the replica is to blame. `trial`: what `begin` returned for it."""
        self.failures += 1
        self.failing += 0.1 * (1 - self.failing)
        if self.broken:
            if trial:  # others were open when the pause began, and say nothing new
                self._set_aside(now)
        elif self.failures >= FAILURES_TO_OPEN or self.failing > FAILING_TO_OPEN:
            if now - self.back_since >= STEADY:
                self.pause = FIRST_PAUSE
            self._set_aside(now)
        self.weigh(now)

    def asked_to_wait(self, now: float, seconds: float) -> None:
        """The engine answered 429: healthy, but not now."""
        self.paused_until = max(self.paused_until, now + min(seconds, LONGEST_PAUSE))
        self.weigh(now)

    def end_trial(self, now: float) -> None:
        """The trial went well; of a stream the first token says so, and the last one may be long in coming."""
        self.trying = False
        self._come_back(now)
        self.failing = FAILING_TO_OPEN / 2  # one good answer is not much to go by
        self.weigh(now)

    def _set_aside(self, now: float) -> None:
        self.broken = True
        self.paused_until = max(self.paused_until, now + self.pause)
        self.pause = min(self.pause * 2, LONGEST_PAUSE)

    def _come_back(self, now: float) -> None:
        self.failures, self.failing, self.broken, self.paused_until = 0, 0.0, False, 0.0
        self.back_since, self.slow_until = now, now + SLOW_START

    # --- outcomes of probes
    def probe_succeeded(self, now: float) -> None:
        self.failed_probes = 0
        self.passed_probes += 1
        if self.health is Health.DOWN and self.passed_probes < self.probes_to_rise:
            return
        if self.health in (Health.DOWN, Health.LOADING):  # back; a first word of health forgives nothing
            self._come_back(now)
            self.pause = FIRST_PAUSE
        self.health, self.detail = Health.UP, ""
        self.weigh(now)

    def probe_failed(self, health: Health, detail: str, now: float) -> None:
        """A replica with running requests is busy, not down, as long as those do not fail."""
        self.passed_probes = 0
        self.failed_probes += 1
        if health is Health.LOADING:
            self.health, self.detail = health, detail
        elif self.health is not Health.UP:
            self.health, self.detail = Health.DOWN, detail
        elif self.failed_probes >= PROBES_TO_FALL and not (self.inflight and not self.failures):
            self.health, self.detail = Health.DOWN, detail
            # One that comes and goes has to be good for longer every time, until it stays: no flapping.
            again = now - self.back_since < STEADY
            self.probes_to_rise = min(self.probes_to_rise * 2, MOST_PROBES_TO_RISE) if again else PROBES_TO_RISE
        self.weigh(now)

    @property
    def undecided(self) -> bool:
        """Whether the last probes contradict what is believed, so that one more soon would tell."""
        if self.health is Health.DOWN:
            return self.passed_probes > 0
        return self.health is Health.UP and 0 < self.failed_probes < PROBES_TO_FALL

    def load_read(self, load: EngineLoad, now: float) -> None:
        """The engine's own word. It counts our requests too: what is beyond them is other people's."""
        self.load, self.load_read_at = load, now
        said = None if load.running is None else load.running + (load.waiting or 0)
        self.foreign = 0 if said is None else max(0, said - self.inflight)
        self.weigh(now)

    def reason(self, now: float) -> str:
        """Why it gets requests now or why not, in one line for operators."""
        if self.draining:
            return "drained by an operator"
        if self.health in (Health.DOWN, Health.LOADING):
            return f"{self.health}: {self.detail}" if self.detail else str(self.health)
        left = self.paused_until - now
        if self.broken and self.trying:
            return "set aside after failures, one request is trying it"
        if left > 0:
            return (
                f"set aside after failures, tried again in {left:.1f} s"
                if self.broken
                else f"asked to be left alone for {left:.1f} s"
            )
        if not self.has_room():
            return f"full, {self.inflight} of {self.most} requests open"
        if self.broken:
            return "set aside after failures, the next request tries it"
        if self.slow_until > now:
            return f"takes requests, slow start for {self.slow_until - now:.1f} s"
        return "takes requests" if self.health is Health.UP else "takes requests, not probed yet"


def describe(states: Iterable[ReplicaState], tried: Collection[str], now: float) -> str:
    """What a choice was made from, in one line for the log."""
    return "; ".join(
        f"{state.replica.id} {'tried already' if state.replica.id in tried else state.reason(now)},"
        f" wait {state.wait:.3f} s, {state.inflight} open"
        for state in states
    )


def _average(before: float | None, value: float) -> float:
    return value if before is None else before + SMOOTHING * (value - before)
