"""Which replica answers: who may, and who should. Pure functions over what is known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar, cast

from gateway.errors import GatewayError, ModelBusy, NoReplica, UnsupportedOperation
from gateway.types import Model, Replica

ALIKE = 1.1  # waits that differ by less than this factor are equal: what is measured is not that exact
OVERLOADED = 1.25  # times the mean number of open requests, from which on affinity counts no more
_ENTROPY = 1 << 30


class ReplicaView(Protocol):
    """What routing reads of a replica; `fleet.ReplicaState` is one, and so is any literal in a test."""

    @property
    def replica(self) -> Replica: ...
    @property
    def inflight(self) -> int: ...  # our own open requests
    @property
    def most(self) -> int: ...  # and how many there may be
    @property
    def open(self) -> bool: ...  # neither down, drained nor paused
    @property
    def wait(self) -> float: ...  # seconds until one more would be answered; only comparisons between replicas count
    @property
    def ttft(self) -> float | None: ...  # seconds to the first token, moving average
    @property
    def paused_until(self) -> float: ...
    def routable(self, now: float) -> bool: ...


class Ask(NamedTuple):
    """What a choice depends on besides the replicas. Chance and time come in here, so a choice can be repeated."""

    now: float  # steady clock, seconds
    sequence: int  # grows by one with every request
    entropy: int  # random, 30 bits
    tried: Collection[str] = ()  # ids of replicas this request has already failed on
    session: bytes = b""  # what session affinity goes by; empty = nothing
    warm: Mapping[str, float] | None = None  # share of the prompt (0-1) that a replica has in its cache, by id


View = TypeVar("View", bound=ReplicaView)
Policy: TypeAlias = Callable[[Sequence[ReplicaView], Ask], ReplicaView]


def least_load(views: Sequence[ReplicaView], ask: Ask) -> ReplicaView:
    """The shortest expected wait; of replicas that are about equal the one with the fewest of our requests, by chance
    where that is equal too."""
    most = min([view.wait for view in views]) * ALIKE
    best = [view for view in views if view.wait <= most]
    if len(best) > 1:
        fewest = min([view.inflight / view.replica.weight for view in best])
        best = [view for view in best if view.inflight / view.replica.weight == fewest]
    return best[ask.entropy % len(best)]


def power_of_two(views: Sequence[ReplicaView], ask: Ask) -> ReplicaView:
    """The one with the shorter expected wait of two picked by chance."""
    if len(views) < 2:
        return views[0]
    first = ask.entropy % len(views)
    second = (ask.entropy >> 15) % (len(views) - 1)
    one, other = views[first], views[second + (second >= first)]
    # Of equals the first, which is chance already: to draw again from the same bits would favour some places.
    return other if other.wait < one.wait else one


def round_robin(views: Sequence[ReplicaView], ask: Ask) -> ReplicaView:
    """One after the other."""
    return views[ask.sequence % len(views)]


def weighted(views: Sequence[ReplicaView], ask: Ask) -> ReplicaView:
    """By chance, in proportion to the weights."""
    drawn = ask.entropy / _ENTROPY * sum([view.replica.weight for view in views])
    for view in views:
        drawn -= view.replica.weight
        if drawn < 0:
            return view
    return views[-1]


POLICIES: dict[str, Policy] = {
    "least_load": least_load,
    "power_of_two": power_of_two,
    "round_robin": round_robin,
    "weighted": weighted,
}


def choose(model: Model, views: Sequence[View], ask: Ask) -> View:
    """The replica for the next attempt, of those whose engine knows the operation.

    Raises: UnsupportedOperation when there is none at all; NoReplica when none can now; ModelBusy when all are full.
    """
    tried = ask.tried
    if tried:
        views = [view for view in views if view.replica.id not in tried]
    free = [
        view
        for view in views
        if view.inflight < view.most and (view.open or (view.paused_until and view.routable(ask.now)))
    ]
    if len(free) == 1:
        return free[0]
    if not free:
        raise why_none(model, views, ask)
    if model.format_preference:
        free = _preferred(free, model.format_preference)
    return cast(View, POLICIES[model.policy](free, ask))


def _preferred(views: list[View], formats: tuple[str, ...]) -> list[View]:
    """The views of the first listed format that has any; formats that are not listed come last."""
    ranks = {name: rank for rank, name in enumerate(formats)}
    best = min(ranks.get(view.replica.format or "", len(formats)) for view in views)
    return [view for view in views if ranks.get(view.replica.format or "", len(formats)) == best]


def why_none(model: Model, views: Sequence[ReplicaView], ask: Ask) -> GatewayError:
    """What a caller is told for whom there is no replica. `views`: those not tried yet."""
    if not views and not ask.tried:
        return UnsupportedOperation(f"The model '{model.name}' does not offer this operation.", param="model")
    if any(view.routable(ask.now) for view in views):
        return ModelBusy()
    pauses = [view.paused_until - ask.now for view in views if view.paused_until > ask.now]
    return NoReplica(
        "No replica of this model is available at the moment. Send the request again later.",
        retry_after=min(pauses, default=5.0),
    )
