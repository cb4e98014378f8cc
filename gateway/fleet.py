"""What the fleet is doing: one small record per replica, kept over reloads, and what follows for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median

from prometheus_client.core import Metric

from backends.base import Capability, EngineLoad, ModelCard, Operation
from gateway.fit import Kind, kind_of
from gateway.metrics import gauge
from gateway.replica_state import ReplicaState
from gateway.types import Model, Replica
from gateway.workers.places import Places

STALE = 20.0  # seconds after which an engine's own word is no longer believed
IDLE = 30.0  # seconds without an answer after which what was measured is doubted
MOST_COMBINATIONS = 256  # of kinds of replicas that are remembered for each view
MOST_VIEWS = 4096  # callers' views of models that are remembered between two reloads


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
