"""What the fleet is doing: one small record per replica, kept over reloads. The only writer of these numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from statistics import median

from prometheus_client.core import Metric

from backends.base import EngineLoad, ModelCard, Operation
from gateway.metrics import gauge
from gateway.types import Model, Replica

FAILURES_TO_OPEN = 3  # in a row
FAILING_TO_OPEN = 0.4  # or this share of the last twenty or so
FIRST_PAUSE = 5.0  # seconds a replica is left alone after that; doubles with every failed trial
LONGEST_PAUSE = 60.0
PROBES_TO_FALL = 2  # failed probes in a row before an idle replica counts as down
PROBES_TO_RISE = 2  # good ones in a row before a replica that was down counts as up
SMOOTHING = 0.2  # weight of the newest value in moving averages
SLOW_START = 20.0  # seconds in which a replica that is back gets its full share again
SLOWEST_START = 0.1  # of its share, at first
IDLE = 30.0  # seconds without an answer after which what was measured is doubted
KV_TIGHT = 0.9  # share of the KV cache in use from which on engines begin to put requests off
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
        "assumed", "card", "detail", "draining", "failed_probes", "failing", "failures", "foreign", "health",
        "inflight", "load", "load_read_at", "most", "open", "passed_probes", "pause", "paused_until", "replica",
        "served_at", "service", "slow_until", "tpot", "trying", "ttft", "unit", "wait",
    )  # fmt: skip

    def __init__(self, replica: Replica) -> None:
        self.inflight = 0  # our own open requests, exact
        self.health = Health.UNKNOWN
        self.card: ModelCard | None = None  # what the engine says of the model, once it has been asked
        self.detail = ""  # why it is not up, for operators
        self.failed_probes = self.passed_probes = 0  # in a row
        self.failures = 0  # in a row, of real requests
        self.failing = 0.0  # share of failures among the last requests, moving average
        self.paused_until = 0.0
        self.pause = FIRST_PAUSE
        self.trying = False  # a request is finding out whether it is back
        self.draining = False
        self.load = EngineLoad()
        self.load_read_at = 0.0
        self.foreign = 0  # requests of others that the engine had when it was asked last
        self.ttft: float | None = None  # seconds to the first token, moving average
        self.tpot: float | None = None  # seconds per token after the first, moving average
        self.service: float | None = None  # seconds of the engine's time that one request takes, moving average
        self.assumed = 1.0  # `service` as long as nothing was measured: what its peers take
        self.served_at = 0.0
        self.slow_until = 0.0
        self.open = True  # neither down, drained nor paused
        self.unit = 1.0  # seconds that each request before it makes one wait
        self.wait = 1.0  # seconds until one more request would be answered, for comparing replicas
        self.adopt(replica)

    def adopt(self, replica: Replica) -> None:
        self.replica = replica
        self.most = sys.maxsize if replica.max_inflight is None else replica.max_inflight
        self.weigh(0.0)

    def weigh(self, now: float) -> None:
        """Brings `open`, `unit` and `wait` up to date."""
        self.open = not self.draining and not self.paused_until and self.health in (Health.UP, Health.UNKNOWN)
        unit = (self.assumed if self.service is None else self.service) / self.replica.weight
        if self.slow_until > now:
            unit /= max(SLOWEST_START, 1 - (self.slow_until - now) / SLOW_START)
        kv_used = self.load.kv_used
        if kv_used is not None and kv_used > KV_TIGHT:
            unit *= 1 + 4 * (kv_used - KV_TIGHT) / (1 - KV_TIGHT)
        self.unit = unit
        self.wait = (self.inflight + self.foreign + 1) * unit

    def routable(self, now: float) -> bool:
        if self.paused_until and not self.draining and self.health in (Health.UP, Health.UNKNOWN):
            # After the pause one request tries whether the replica is back; it decides for the others.
            return now >= self.paused_until and not self.trying
        return self.open

    def has_room(self) -> bool:
        return self.inflight < self.most

    def set_draining(self, draining: bool, now: float) -> None:
        self.draining = draining
        self.weigh(now)

    # --- real requests and their outcomes
    def begin(self) -> bool:
        """Takes a place; whether this request is the one that finds out if the replica is back."""
        self.inflight += 1
        self.wait += self.unit
        if not self.paused_until:
            return False
        trial = self.is_broken()
        if trial:
            self.trying = True
        return trial

    def end(self, trial: bool) -> None:
        """Gives the place back; takes what `begin` returned."""
        self.inflight -= 1
        self.wait -= self.unit
        if trial:
            self.trying = False

    def is_broken(self) -> bool:
        return self.failures >= FAILURES_TO_OPEN or self.failing > FAILING_TO_OPEN

    def succeeded(self, now: float, began: float, ttft: float | None, tpot: float | None) -> None:
        """An answer was given. `began`: when its request was sent. Its place has been given back already."""
        if self.paused_until and self.is_broken():
            self.slow_until = now + SLOW_START
        self.failures = 0
        self.failing -= self.failing * (1.0 if self.paused_until else 0.1)
        self.paused_until, self.pause = 0.0, FIRST_PAUSE
        self.served_at = now
        # Requests that run together share the engine: what one takes of it is its time divided by their number.
        self.service = _average(self.service, (now - began) / (self.inflight + 1))
        if ttft is not None:
            self.ttft = _average(self.ttft, ttft)
        if tpot is not None:
            self.tpot = _average(self.tpot, tpot)
        self.weigh(now)

    def failed(self, now: float) -> None:
        was_broken = self.is_broken()
        self.failures += 1
        self.failing += 0.1 * (1 - self.failing)
        if not was_broken:
            if self.is_broken():
                self.pause = FIRST_PAUSE
                self.paused_until = max(self.paused_until, now + self.pause)
        elif now >= self.paused_until:
            # A trial. Requests that were open when the pause began and fail during it say nothing new.
            self.pause = min(self.pause * 2, LONGEST_PAUSE)
            self.paused_until = now + self.pause
        self.weigh(now)

    def asked_to_wait(self, now: float, seconds: float) -> None:
        """The engine answered 429: healthy, but not now."""
        self.paused_until = max(self.paused_until, now + min(seconds, LONGEST_PAUSE))
        self.weigh(now)

    # --- outcomes of probes
    def probe_succeeded(self, now: float) -> None:
        self.failed_probes = 0
        self.passed_probes += 1
        if self.health is Health.DOWN and self.passed_probes < PROBES_TO_RISE:
            return
        if self.health in (Health.DOWN, Health.LOADING):  # back; a first word of health forgives nothing
            self.failures, self.failing, self.paused_until, self.pause = 0, 0.0, 0.0, FIRST_PAUSE
            self.slow_until = now + SLOW_START
        self.health, self.detail = Health.UP, ""
        self.weigh(now)

    def probe_failed(self, health: Health, detail: str, now: float) -> None:
        """A replica with running requests is busy, not down, as long as those do not fail."""
        self.passed_probes = 0
        self.failed_probes += 1
        if health is Health.LOADING:
            self.health, self.detail = health, detail
        elif self.health in (Health.UNKNOWN, Health.LOADING):
            self.health, self.detail = Health.DOWN, detail
        elif self.failed_probes >= PROBES_TO_FALL and not (self.inflight and not self.failures):
            self.health, self.detail = Health.DOWN, detail
        self.weigh(now)

    def load_read(self, load: EngineLoad, now: float) -> None:
        """The engine's own word. It counts our requests too: what is beyond them is other people's."""
        self.load, self.load_read_at = load, now
        said = None if load.running is None else load.running + (load.waiting or 0)
        self.foreign = 0 if said is None else max(0, said - self.inflight)
        self.weigh(now)


def _average(before: float | None, value: float) -> float:
    return value if before is None else before + SMOOTHING * (value - before)


class LoadTable:
    """The states by replica id. A reload keeps those whose replica is still there."""

    def __init__(self) -> None:
        self._states: dict[str, ReplicaState] = {}
        self._able: dict[tuple[int, Operation], tuple[Model, list[ReplicaState]]] = {}

    def adopt(self, replicas: Iterable[Replica]) -> None:
        known, self._states = self._states, {}
        for replica in replicas:
            state = known.get(replica.id) or ReplicaState(replica)
            state.adopt(replica)
            self._states[replica.id] = state
        self._able.clear()

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

    def look_over(self, now: float) -> None:
        """Called a few times a second: what follows from time alone. Replicas that have not been measured lately count
        as their peers do, so that a slow answer long ago keeps nobody away for ever."""
        peers: dict[str, list[ReplicaState]] = {}
        for state in self._states.values():
            peers.setdefault(state.replica.model, []).append(state)
        for states in peers.values():
            measured = [state.service for state in states if state.service is not None]
            usual = median(measured) if measured else 1.0
            for state in states:
                state.assumed = usual
                if state.service is not None and now - state.served_at > IDLE and not state.inflight:
                    state.service += 0.01 * (usual - state.service)
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
        ):
            values = {names: getattr(state.load, attribute) for state, names in short.items()}
            yield gauge(
                name, text, ("model", "replica"), {names: value for names, value in values.items() if value is not None}
            )
