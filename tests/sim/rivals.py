"""Ways to choose that the product does not have, to be compared with those it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from gateway.replica_state import SMOOTHING, ReplicaState


class Seen(NamedTuple):
    """What the rivals know of a replica beside its state."""

    state: ReplicaState
    tokens: int  # of open requests: prompts, and answers as long as they will be, which no gateway knows
    shared: float  # seconds of a whole answer divided by the requests that ran together, moving average


Rival: TypeAlias = Callable[[Seen], float]

RIVALS: dict[str, Rival] = {
    "fewest open": lambda seen: seen.state.inflight,
    "fewest tokens": lambda seen: seen.tokens,
    "EWMA of TTFT": lambda seen: (seen.state.ttft or 0.0) * (seen.state.inflight + 1),
    "shared time": lambda seen: seen.shared * (seen.state.inflight + 1),
    "without reading": lambda seen: (seen.state.inflight + 1) * seen.state.unit,
}


class Ledger:
    """Keeps what rivals know."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self._shared: dict[str, float] = {}

    def begun(self, name: str, tokens: int) -> None:
        self.tokens[name] = self.tokens.get(name, 0) + tokens

    def ended(self, state: ReplicaState, tokens: int, seconds: float | None) -> None:
        """`seconds`: that a good answer took. The replica has one open request less already."""
        name = state.replica.id
        self.tokens[name] -= tokens
        if seconds is not None:
            shared = seconds / (state.inflight + 1)
            before = self._shared.get(name, shared)
            self._shared[name] = before + SMOOTHING * (shared - before)

    def choose(self, rival: Rival, states: Sequence[ReplicaState], entropy: int) -> ReplicaState:
        costs = [rival(self._seen(state)) for state in states]
        best = [state for state, cost in zip(states, costs, strict=True) if cost == min(costs)]
        return best[entropy % len(best)]

    def _seen(self, state: ReplicaState) -> Seen:
        name = state.replica.id
        return Seen(state, self.tokens.get(name, 0), self._shared.get(name, 1.0))
