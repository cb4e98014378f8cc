"""What outlives requests: the collaborators of `serve`, and the bookings it leaves behind."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from random import getrandbits
from typing import Protocol
from urllib.parse import urlsplit

from gateway.addresses import client_address
from gateway.auth import UnverifiedToken, authenticate, check_address
from gateway.call import Call
from gateway.config.values import is_loopback
from gateway.content.log import ContentLog
from gateway.errors import AuthError, GatewayError, ModelBusy, NoReplica
from gateway.fit import fails_alike, fitting, refusal
from gateway.fleet import MOST_VIEWS, LoadTable
from gateway.limits import Limiter
from gateway.logs import AccessLog
from gateway.metrics import Metrics
from gateway.outcome import Outcome
from gateway.prefixes import PrefixIndex
from gateway.replica_state import Health, ReplicaState, describe
from gateway.retries import RetryBudget
from gateway.routing import Ask, choose
from gateway.snapshot import Snapshot
from gateway.spool import UsageSink
from gateway.tokens import Tokens
from gateway.tracing.tracer import Tracer
from gateway.types import Address, Model, Principal, Replica
from gateway.upstream import Upstream
from gateway.waiting import WaitingRoom
from gateway.workers.places import Places

AWAY = (Health.DOWN, Health.LOADING)

log = logging.getLogger("sekisho.routing")


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


def _is_another_sites(headers: Mapping[bytes, bytes], *, anonymous: bool) -> bool:
    """Whether a page of somebody else's makes a browser send this. A browser shows its certificate to whoever asks, and
    reaches a gateway on its own machine, so identities that need no credential are not for such requests. A host name
    that leads to this machine is the other way in (DNS rebinding)."""
    if headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
        return True
    return anonymous and not _names_this_machine(headers.get(b"host", b"localhost").decode("latin-1"))


def _names_this_machine(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # an unclosed bracket
        return False


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
        places: Places | None = None,
    ) -> None:
        """`places`: what other workers have open."""
        self.snapshot = snapshot
        self.metrics, self.access_log, self.upstream = metrics, access_log, upstream
        self.limiter = limiter or Limiter()
        self.tokens = tokens or Tokens()
        self.usage = usage
        self.tracer: Tracer | None = None  # while tracing is on
        self.content: ContentLog | None = None  # unless `logging.content` is none
        self.fleet = LoadTable(places)
        self.waiting = WaitingRoom()
        self.retries = RetryBudget(snapshot.config.routing.retry_budget)
        self.prefixes = PrefixIndex(snapshot.config.routing.prefix_index)
        self._looked_at = time.monotonic()
        self.draining = False
        self._several = places is not None  # worker processes
        self._verbose = False  # choices are explained in the log
        self.finished: list[Outcome] = []  # not booked yet
        self._turns: dict[tuple[str, int, str], int] = {}  # choices made among the same replicas

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
            if holder is None or _is_another_sites(caller.headers, anonymous=holder is now.anonymous):
                raise
            return holder
        return principal

    def choose(self, model: Model, call: Call, tried: Sequence[str]) -> ReplicaState:
        """Raises: NoReplica; UnsupportedOperation, ContextTooLong when no replica could ever honour the request."""
        groups = self.fleet.alike(model, call.operation)
        only = groups.only
        if only is not None and not tried and not self._verbose and refusal(groups.kinds[0], call) is None:
            if only.open and only.has_room():
                return only  # the usual case needs no choice
        states, perhaps = self.fitting(model, call)
        if self._verbose:
            log.debug("%s by %s, of: %s", model.name, model.policy, describe(states, tried, time.monotonic()))
        if self._several:
            for state in states:
                state.share_places()
        try:
            return self._choose(model, call, states, tried)
        except NoReplica as error:
            if not perhaps or isinstance(error, ModelBusy):
                raise
            return self._choose(model, call, perhaps, tried)

    def find_place(self, model: Model, call: Call, tried: Sequence[str], priority: int) -> ReplicaState:
        """A replica that can take a request of this priority now, without overtaking anybody who waits.

        Raises: as `choose`.
        """
        state = self.choose(model, call, tried)
        if self.waiting.depth and self.waiting.wants(state, priority):
            raise ModelBusy
        return state

    def prospects(self, model: Model, call: Call, tried: Sequence[str]) -> frozenset[ReplicaState]:
        """The replicas a request could wait for: none unless one of them is only full, or still loading."""
        now = time.monotonic()
        for states in self.fitting(model, call):
            left = [state for state in states if state.replica.id not in tried]
            if any(state.routable(now) or (state.health is Health.LOADING and not state.draining) for state in left):
                return frozenset(left)
        return frozenset()

    def _choose(self, model: Model, call: Call, states: list[ReplicaState], tried: Sequence[str]) -> ReplicaState:
        # Callers may see different replicas of a model, and requests fit different ones: each of these goes round by
        # itself, or requests that take turns would meet the same replica again and again.
        around = model.replicas[0].id, len(states), states[0].replica.id if states else ""
        turn = self._turns.get(around, -1) + (not tried)  # a second try takes nobody's turn
        if len(self._turns) > MOST_VIEWS:
            self._turns.clear()
        self._turns[around] = turn
        ask = Ask(time.monotonic(), turn, getrandbits(30), tried)
        if model.policy == "prefix_affinity":
            prefix = call.find_prefix()
            ask = ask._replace(warm=self.prefixes.warm(prefix), prompt=prefix.length)
        elif model.policy == "session_affinity":
            ask = ask._replace(session=call.session)
        return choose(model, states, ask)

    def note_sent(self, call: Call, replica: Replica) -> int:
        """A request goes to a replica, which will have its prompt in its cache. Returns the characters that are new
        there, or 0 when that is too little to measure by, or unknown."""
        if call.prefix is None:
            return 0
        new = self.prefixes.add(replica.id, call.prefix)
        return new if 2 * new >= call.prefix.length else 0

    def fitting(self, model: Model, call: Call) -> tuple[list[ReplicaState], list[ReplicaState]]:
        """The replicas that can honour the request, however they are doing, and those that perhaps can although their
        window seems small: for when none of the first is there.

        Raises: UnsupportedOperation, ContextTooLong when there is none at all.
        """
        groups = self.fleet.alike(model, call.operation)
        best, perhaps = fitting(groups.kinds, call)
        if len(best) == len(groups.kinds):
            return self.fleet.able(model, call.operation), []
        return groups.of(best), groups.of(perhaps)

    def look_elsewhere(
        self, model: Model, call: Call, failed: Replica, error: GatewayError, tried: list[str]
    ) -> bool:
        """After an engine has refused a request: whether one of another kind may honour it. Those that would refuse it
        as well count as tried from then on."""
        groups = self.fleet.alike(model, call.operation)
        kind = groups.kind_of(failed)
        if kind is None or len(groups.kinds) == 1:
            return False
        alike = [other for other in groups.kinds if fails_alike(other, kind, error)]
        tried.extend([state.replica.id for state in groups.of(alike)])
        best, perhaps = self.fitting(model, call)
        return any(state.replica.id not in tried for state in (*best, *perhaps))

    def look_over(self, now: float) -> None:
        """Called a few times a second: what follows from time alone."""
        self._verbose = log.isEnabledFor(logging.DEBUG)
        self.fleet.look_over(now)
        self.waiting.look_over(now)
        routing = self.snapshot.config.routing
        self.retries.ratio = routing.retry_budget
        self.retries.forget(now - self._looked_at)
        # An engine that was away has lost its cache; one that only pauses has not.
        self.prefixes.retain({state.replica.id for state in self.fleet if state.health not in AWAY})
        self.prefixes.tidy(routing.prefix_index)
        self._looked_at = now

    def set_draining(self, replica: str, draining: bool) -> None:
        """Of the replica of that name, if there is one."""
        state = self.fleet.named(replica)
        if state is not None:
            state.set_draining(draining, time.monotonic())

    def offer(self, replica: str) -> None:
        """Another worker has freed a place there."""
        state = self.fleet.named(replica)
        if state is not None and self.waiting.depth:
            self.waiting.offer(state, time.monotonic())

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
        if self.tracer is not None:
            self.tracer.add(finished)
        if self.content is not None:
            self.content.add(finished)
