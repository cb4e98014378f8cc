"""What the fleet is doing: one small record per replica, kept over reloads. The only writer of these numbers."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum
from math import inf
from statistics import median

from prometheus_client.core import Metric

from backends.base import Capability, EngineLoad, ModelCard, Operation
from gateway.fit import Kind, kind_of
from gateway.metrics import gauge
from gateway.places import Places
from gateway.types import Model, Replica

FAILURES_TO_OPEN = 3  # in a row
FAILING_TO_OPEN = 0.4  # or this share of the last twenty or so: about every second request, for a while
FIRST_PAUSE = 5.0  # seconds a replica is left alone after that; doubles with every failed trial or early relapse
LONGEST_PAUSE = 60.0
PROBES_TO_FALL = 2  # failed probes in a row before an idle replica counts as down
PROBES_TO_RISE = 2  # good ones in a row before a replica that was down counts as up
MOST_PROBES_TO_RISE = 16  # for one that falls again and again
STEADY = 60.0  # seconds up after which a fall counts as the first one again
STALE = 20.0  # seconds after which an engine's own word is no longer believed
SMOOTHING = 0.2  # weight of the newest value in moving averages
SLOW_START = 20.0  # seconds in which a replica that is back gets its full share again
SLOWEST_START = 0.1  # of its share, at first
IDLE = 30.0  # seconds without an answer after which what was measured is doubted
READING = 8  # answers in progress that hold up the next request as much as one prompt that is being read
KV_TIGHT = 0.9  # share of the KV cache in use from which on engines begin to put requests off
MOST_COMBINATIONS = 256  # of kinds of replicas that are remembered for each view
MOST_VIEWS = 4096  # callers' views of models that are remembered between two reloads


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


class Groups:
    """A model's replicas by what they can honour. Whether a request fits is worked out for each kind of them."""

    __slots__ = ("_joined", "_members", "kinds", "only")

    def __init__(self, model: Model, states: Iterable[ReplicaState]) -> None:
        named = {word for replica in model.replicas for word in replica.capabilities}
        found: dict[tuple[int, int | None, frozenset[Capability]], tuple[Kind, list[ReplicaState]]] = {}
        for state in states:
            kind = kind_of(state.replica, state.card, named)
            found.setdefault((id(kind.backend), kind.window, kind.missing), (kind, []))[1].append(state)
        self.kinds = [kind for kind, _ in found.values()]
        members = [state for _, states in found.values() for state in states]
        self.only = members[0] if len(members) == 1 else None
        self._members = list(found.values())
        self._joined: dict[tuple[int, ...], list[ReplicaState]] = {}

    def of(self, kinds: Iterable[Kind]) -> list[ReplicaState]:
        """The replicas of these kinds; requests ask for few combinations, so each is put together once."""
        wanted = tuple([id(kind) for kind in kinds])
        joined = self._joined.get(wanted)
        if joined is None:
            if len(self._joined) >= MOST_COMBINATIONS:
                self._joined.clear()
            joined = [state for kind, states in self._members if id(kind) in wanted for state in states]
            self._joined[wanted] = joined
        return joined

    def kind_of(self, replica: Replica) -> Kind | None:
        """None for a replica that is not among them any more."""
        return next((kind for kind, states in self._members if any(s.replica.id == replica.id for s in states)), None)


class LoadTable:
    """The states by replica id. A reload keeps those whose replica is still there."""

    def __init__(self, places: Places | None = None) -> None:
        """`places`: counts shared with other workers."""
        self._places = places
        self._states: dict[str, ReplicaState] = {}
        self._able: dict[tuple[int, Operation], tuple[Model, list[ReplicaState]]] = {}
        self._alike: dict[tuple[int, Operation], tuple[Model, Groups]] = {}
        self._cards: list[ModelCard | None] = []  # that `_alike` goes by

    def adopt(self, replicas: Iterable[Replica]) -> None:
        known, self._states = self._states, {}
        for replica in replicas:
            state = known.get(replica.id) or ReplicaState(replica, self._places)
            state.adopt(replica)
            self._states[replica.id] = state
        self._able.clear()
        self._alike.clear()

    def named(self, replica: str) -> ReplicaState | None:
        return self._states.get(replica)

    def of(self, replica: Replica) -> ReplicaState:
        state = self._states.get(replica.id)
        if state is None:  # a request that began on an older snapshot
            state = ReplicaState(replica)
        return state

    def able(self, model: Model, operation: Operation) -> list[ReplicaState]:
        """The model's replicas whose engines know the operation, looked up once for each view of a model."""
        found = self._able.get((id(model), operation))
        # An id may be used again once its object is gone: the entry keeps the model alive.
        if found is not None:
            return found[1]
        states = [self.of(replica) for replica in model.replicas if operation in replica.backend.paths]
        if len(self._able) >= MOST_VIEWS:
            self._able.clear()
        self._able[id(model), operation] = model, states
        return states

    def alike(self, model: Model, operation: Operation) -> Groups:
        """The same, in groups that can honour the same requests."""
        found = self._alike.get((id(model), operation))
        if found is not None:
            return found[1]
        groups = Groups(model, self.able(model, operation))
        if len(self._alike) >= MOST_VIEWS:
            self._alike.clear()
        self._alike[id(model), operation] = model, groups
        return groups

    def look_over(self, now: float) -> None:
        """Called a few times a second: what follows from time alone. Replicas that have not been measured lately count
        as their peers do, so that a slow answer long ago keeps nobody away for ever."""
        cards = [state.card for state in self._states.values()]
        if cards != self._cards:  # an engine has been asked what it serves
            self._cards = cards
            self._alike.clear()
        peers: dict[str, list[ReplicaState]] = {}
        for state in self._states.values():
            peers.setdefault(state.replica.model, []).append(state)
        if self._places is not None:
            for state in self._states.values():
                state.elsewhere = self._places.open_elsewhere(state.column) if state.column is not None else 0
        for states in peers.values():
            measured = [state.service for state in states if state.service is not None]
            usual = median(measured) if measured else 1.0
            read = [state.cold_ttft / state.cold for state in states if state.cold]
            for state in states:
                state.assumed = usual
                if read and not state.cold:
                    state.prefill = median(read)
                if state.made and now - state.served_at > IDLE and not state.inflight:
                    state.spent += 0.01 * (usual * state.made - state.spent)
                if state.load_read_at and now - state.load_read_at > STALE:
                    state.load, state.load_read_at, state.foreign = EngineLoad(), 0.0, 0  # unknown again
                state.weigh(now)

    def __iter__(self) -> Iterator[ReplicaState]:
        return iter(self._states.values())

    def gauges(self, now: float) -> Iterator[Metric]:
        """The replica metrics; what an engine does not publish is left out, not zero."""
        states = list(self._states.values())
        short = {state: (state.replica.model, state.replica.id) for state in states}
        yield gauge(
            "replica_up", "1 when requests are sent to it", ("model", "replica", "backend", "format"),
            {(*names, state.replica.backend.kind, state.replica.format or ""): float(state.routable(now))
             for state, names in short.items()},
        )  # fmt: skip
        yield gauge(
            "inflight_requests", "Requests this gateway has open", ("model", "replica"),
            {names: float(state.inflight) for state, names in short.items()},
        )  # fmt: skip
        for name, attribute, text in (
            ("replica_running", "running", "Requests being generated, by the engine's own word"),
            ("replica_waiting", "waiting", "Requests queued inside the engine, by its own word"),
            ("replica_kv_usage_ratio", "kv_used", "Share of the KV cache in use, by the engine's own word"),
            ("replica_prefix_hit_ratio", "prefix_hits", "Prompt tokens found in the prefix cache, by its own word"),
        ):
            values = {names: getattr(state.load, attribute) for state, names in short.items()}
            yield gauge(
                name, text, ("model", "replica"), {names: value for names, value in values.items() if value is not None}
            )
