"""What outlives requests: the collaborators of `serve`, and the bookings it leaves behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import getrandbits

from gateway.call import Call
from gateway.fleet import LoadTable, ReplicaState
from gateway.limits import Limiter
from gateway.logs import AccessLog
from gateway.metrics import Metrics
from gateway.outcome import Outcome
from gateway.routing import Ask, choose
from gateway.snapshot import Snapshot
from gateway.types import Model
from gateway.upstream import Upstream


class Gateway:
    """The collaborators of `serve`. `snapshot` is replaced as a whole by a reload; everything else lives on."""

    def __init__(
        self,
        snapshot: Snapshot,
        metrics: Metrics,
        access_log: AccessLog,
        upstream: Upstream,
        limiter: Limiter | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.metrics, self.access_log, self.upstream = metrics, access_log, upstream
        self.limiter = limiter or Limiter()
        self.fleet = LoadTable()
        self.draining = False
        self.finished: list[Outcome] = []  # not booked yet
        self._turns: dict[str, int] = {}  # choices made, by model

    def choose(self, model: Model, call: Call, tried: Sequence[str]) -> ReplicaState:
        """Raises: NoReplica, UnsupportedOperation."""
        if len(model.replicas) == 1 and not tried:  # the usual case needs no choice
            state = self.fleet.of(model.replicas[0])
            able = call.operation in state.replica.backend.paths
            if able and state.has_room() and state.routable(time.monotonic()):
                return state
        turn = self._turns[model.name] = self._turns.get(model.name, -1) + 1
        ask = Ask(call.operation, time.monotonic(), turn, getrandbits(30), tried)
        return choose(model, [self.fleet.of(replica) for replica in model.replicas], ask)

    def book(self) -> None:
        """Takes finished requests into the metrics and the access log. They are gathered and booked together, a few
        times a second and before anybody reads the metrics: together they cost a third of what each costs alone."""
        finished, self.finished = self.finished, []
        for outcome in finished:
            self.metrics.record(outcome)
        self.access_log.add(finished)
