"""What the fleet is doing: one small record per replica, kept over reloads. The only writer of these numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

from prometheus_client.core import Metric

from backends.base import EngineLoad, ModelCard
from gateway.metrics import gauge
from gateway.types import Replica

FAILURES_TO_OPEN = 3  # in a row
FIRST_PAUSE = 5.0  # seconds a replica is left alone after that; doubles with every failed trial
LONGEST_PAUSE = 60.0
PROBES_TO_FALL = 2  # failed probes in a row before an idle replica counts as down
SMOOTHING = 0.2  # weight of the newest value in moving averages


class Health(StrEnum):
    """The probe's word on a replica."""

    UNKNOWN = "unknown"  # not asked yet: may be tried
    UP = "up"
    LOADING = "loading"
    DOWN = "down"


class ReplicaState:
    """One replica as routing sees it. Times are seconds of a steady clock."""

    __slots__ = (
        "card", "detail",
        "draining", "failed_probes", "failures", "health", "inflight", "load", "load_read_at", "pause",
        "paused_until", "replica", "trying", "ttft",
    )  # fmt: skip

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.inflight = 0  # our own open requests, exact
        self.health = Health.UNKNOWN
        self.card: ModelCard | None = None  # what the engine says of the model, once it has been asked
        self.detail = ""  # why it is not up, for operators
        self.failed_probes = 0
        self.failures = 0  # in a row, of real requests
        self.paused_until = 0.0
        self.pause = FIRST_PAUSE
        self.trying = False  # a request is finding out whether it is back
        self.draining = False
        self.load = EngineLoad()
        self.load_read_at = 0.0
        self.ttft: float | None = None  # moving average

    def routable(self, now: float) -> bool:
        if self.draining or self.health is Health.DOWN or self.health is Health.LOADING:
            return False
        if self.paused_until:
            # After the pause one request tries whether the replica is back; it decides for the others.
            return now >= self.paused_until and not self.trying
        return True

    def has_room(self) -> bool:
        most = self.replica.max_inflight
        return most is None or self.inflight < most

    # --- real requests and their outcomes
    def begin(self) -> bool:
        """Takes a place; whether this request is the one that finds out if the replica is back."""
        self.inflight += 1
        trial = self.paused_until > 0 and self.failures >= FAILURES_TO_OPEN
        if trial:
            self.trying = True
        return trial

    def end(self, trial: bool) -> None:
        """Gives the place back; takes what `begin` returned."""
        self.inflight -= 1
        if trial:
            self.trying = False

    def succeeded(self, ttft: float | None) -> None:
        self.failures = 0
        self.paused_until, self.pause = 0.0, FIRST_PAUSE
        if ttft is not None:
            self.ttft = ttft if self.ttft is None else self.ttft + SMOOTHING * (ttft - self.ttft)

    def failed(self, now: float) -> None:
        self.failures += 1
        if self.failures == FAILURES_TO_OPEN:
            self.pause = FIRST_PAUSE
            self.paused_until = max(self.paused_until, now + self.pause)
        elif self.failures > FAILURES_TO_OPEN and now >= self.paused_until:
            # A trial. Requests that were open when the pause began and fail during it say nothing new.
            self.pause = min(self.pause * 2, LONGEST_PAUSE)
            self.paused_until = now + self.pause

    def asked_to_wait(self, now: float, seconds: float) -> None:
        """The engine answered 429: healthy, but not now."""
        self.paused_until = max(self.paused_until, now + min(seconds, LONGEST_PAUSE))

    # --- outcomes of probes
    def probe_succeeded(self) -> None:
        if self.health in (Health.DOWN, Health.LOADING):  # back; a first word of health forgives nothing
            self.failures, self.paused_until, self.pause = 0, 0.0, FIRST_PAUSE
        self.failed_probes, self.health, self.detail = 0, Health.UP, ""

    def probe_failed(self, health: Health, detail: str) -> None:
        """A replica with running requests is busy, not down, as long as those do not fail."""
        self.failed_probes += 1
        if health is Health.LOADING:
            self.health, self.detail = health, detail
        elif self.health in (Health.UNKNOWN, Health.LOADING):
            self.health, self.detail = Health.DOWN, detail
        elif self.failed_probes >= PROBES_TO_FALL and not (self.inflight and not self.failures):
            self.health, self.detail = Health.DOWN, detail


class LoadTable:
    """The states by replica id. A reload keeps those whose replica is still there."""

    def __init__(self) -> None:
        self._states: dict[str, ReplicaState] = {}

    def adopt(self, replicas: Iterable[Replica]) -> None:
        known, self._states = self._states, {}
        for replica in replicas:
            state = known.get(replica.id) or ReplicaState(replica)
            state.replica = replica
            self._states[replica.id] = state

    def of(self, replica: Replica) -> ReplicaState:
        state = self._states.get(replica.id)
        if state is None:  # a request that began on an older snapshot
            state = ReplicaState(replica)
        return state

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
