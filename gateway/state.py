"""What outlives requests: the collaborators of `serve`, and the bookings it leaves behind."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from random import getrandbits
from typing import Protocol

from gateway.addresses import client_address
from gateway.auth import UnverifiedToken, authenticate, check_address
from gateway.call import Call
from gateway.errors import AuthError
from gateway.fleet import LoadTable, ReplicaState
from gateway.limits import Limiter
from gateway.logs import AccessLog
from gateway.metrics import Metrics
from gateway.outcome import Outcome
from gateway.retries import RetryBudget
from gateway.routing import Ask, choose
from gateway.snapshot import Snapshot
from gateway.spool import UsageSink
from gateway.tokens import Tokens
from gateway.types import Address, Model, Principal
from gateway.upstream import Upstream

RETRY_RATIO = 0.2  # attempts beyond the first, per request


class Caller(Protocol):
    """What is known of whoever sends a request."""

    @property
    def headers(self) -> Mapping[bytes, bytes]: ...  # names in lower case
    @property
    def peer(self) -> str | None: ...  # address of the connection
    @property
    def certificate(self) -> tuple[str, ...]: ...  # names in the client certificate of the connection


def caller_address(caller: Caller, now: Snapshot) -> Address | None:
    return client_address(caller.peer, caller.headers.get(b"x-forwarded-for", b""), now.trusted_proxies)


def _holder(caller: Caller, now: Snapshot) -> Principal | None:
    """Who a client certificate stands for, where no credential was sent. A wrong key stays wrong beside one."""
    if not caller.certificate or not {b"authorization", b"x-api-key"}.isdisjoint(caller.headers):
        return None
    return next((now.holders[name] for name in caller.certificate if name in now.holders), None)


class Gateway:
    """The collaborators of `serve`. `snapshot` is replaced as a whole by a reload; everything else lives on."""

    def __init__(
        self,
        snapshot: Snapshot,
        metrics: Metrics,
        access_log: AccessLog,
        upstream: Upstream,
        limiter: Limiter | None = None,
        tokens: Tokens | None = None,
        usage: UsageSink | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.metrics, self.access_log, self.upstream = metrics, access_log, upstream
        self.limiter = limiter or Limiter()
        self.tokens = tokens or Tokens()
        self.usage = usage
        self.fleet = LoadTable()
        self.retries = RetryBudget(RETRY_RATIO)
        self._looked_at = time.monotonic()
        self.draining = False
        self.finished: list[Outcome] = []  # not booked yet
        self._turns: dict[str, int] = {}  # choices made, by the first replica

    async def identify(self, caller: Caller, now: Snapshot) -> Principal:
        """Who calls. Raises: AuthError."""
        try:
            try:
                principal = authenticate(caller.headers, now.keys, self.tokens.known, time.time())
            except UnverifiedToken as unknown:
                principal = await self.tokens.verify(unknown.token, now.people.tenants)
            if principal.networks:
                check_address(principal, caller_address(caller, now))
        except AuthError:
            holder = _holder(caller, now) or now.anonymous
            if holder is None:
                raise
            return holder
        return principal

    def choose(self, model: Model, call: Call, tried: Sequence[str]) -> ReplicaState:
        """Raises: NoReplica, UnsupportedOperation."""
        states = self.fleet.able(model, call.operation)
        if len(states) == 1 and not tried and states[0].open and states[0].has_room():
            return states[0]  # the usual case needs no choice
        # Callers may see different replicas of a model: each of these views goes round by itself.
        view = model.replicas[0].id
        turn = self._turns[view] = self._turns.get(view, -1) + 1
        return choose(model, states, Ask(time.monotonic(), turn, getrandbits(30), tried))

    def look_over(self, now: float) -> None:
        """Called a few times a second: what follows from time alone."""
        self.fleet.look_over(now)
        self.retries.forget(now - self._looked_at)
        self._looked_at = now

    def book(self) -> None:
        """Takes finished requests into the metrics, the access log and the usage records. They are gathered and booked
        together, a few times a second and before anybody reads the metrics: so they cost a third of what each costs
        alone."""
        finished, self.finished = self.finished, []
        for outcome in finished:
            self.metrics.record(outcome)
        self.access_log.add(finished)
        if self.usage is not None and finished:
            self.usage.add(finished)
