"""Which replica answers: who may, and who should. Pure functions over what is known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar, cast

from backends.base import Operation
from gateway.errors import GatewayError, NoReplica, UnsupportedOperation
from gateway.types import Model, Replica


class ReplicaView(Protocol):
    """What routing reads of a replica; `fleet.ReplicaState` is one, and so is any literal in a test."""

    @property
    def replica(self) -> Replica: ...
    @property
    def inflight(self) -> int: ...
    @property
    def ttft(self) -> float | None: ...
    @property
    def paused_until(self) -> float: ...
    def routable(self, now: float) -> bool: ...
    def has_room(self) -> bool: ...


class Ask(NamedTuple):
    """What a choice depends on besides the replicas. Chance and time come in here, so a choice can be repeated."""

    operation: Operation
    now: float  # steady clock, seconds
    sequence: int  # grows by one with every request
    entropy: int  # random, 30 bits
    tried: Collection[str] = ()  # ids of replicas this request has already failed on


View = TypeVar("View", bound=ReplicaView)
Policy: TypeAlias = Callable[[Sequence[ReplicaView], Ask], ReplicaView]


def pressure(view: ReplicaView) -> float:
    """Open requests a unit of weight would have after one more."""
    return (view.inflight + 1) / view.replica.weight


def least_load(views: Sequence[ReplicaView], ask: Ask) -> ReplicaView:
    """Fewest of our own open requests for its weight; equals share by chance."""
    best = [views[0]]
    lowest = pressure(views[0])
    for view in views[1:]:
        value = pressure(view)
        if value < lowest:
            best, lowest = [view], value
        elif value == lowest:
            best.append(view)
    return best[ask.entropy % len(best)]


def power_of_two(views: Sequence[ReplicaView], ask: Ask) -> ReplicaView:
    """The less loaded of two picked by chance."""
    if len(views) < 2:
        return views[0]
    first = ask.entropy % len(views)
    second = (ask.entropy >> 15) % (len(views) - 1)
    one, other = views[first], views[second + (second >= first)]
    # Of equals the first, which is chance already: to draw again from the same bits would favour some places.
    return other if pressure(other) < pressure(one) else one


def round_robin(views: Sequence[ReplicaView], ask: Ask) -> ReplicaView:
    """One after the other."""
    return views[ask.sequence % len(views)]


POLICIES: dict[str, Policy] = {"least_load": least_load, "power_of_two": power_of_two, "round_robin": round_robin}


def choose(model: Model, views: Sequence[View], ask: Ask) -> View:
    """The replica for the next attempt.

    Raises: UnsupportedOperation when no replica's engine can do it at all; NoReplica when none can now.
    """
    free = [
        view
        for view in views
        if view.routable(ask.now)
        and view.has_room()
        and view.replica.id not in ask.tried
        and ask.operation in view.replica.backend.paths
    ]
    if not free:
        raise _why_none(model, views, ask)
    if model.format_preference and len(free) > 1:
        free = _preferred(free, model.format_preference)
    return free[0] if len(free) == 1 else cast(View, POLICIES[model.policy](free, ask))


def _preferred(views: list[View], formats: tuple[str, ...]) -> list[View]:
    """The views of the first listed format that has any; formats that are not listed come last."""
    ranks = {name: rank for rank, name in enumerate(formats)}
    best = min(ranks.get(view.replica.format or "", len(formats)) for view in views)
    return [view for view in views if ranks.get(view.replica.format or "", len(formats)) == best]


def _why_none(model: Model, views: Sequence[ReplicaView], ask: Ask) -> GatewayError:
    able = [view for view in views if ask.operation in view.replica.backend.paths]
    if not able:
        return UnsupportedOperation(f"The model '{model.name}' does not offer this operation.", param="model")
    if any(view.routable(ask.now) and view.replica.id not in ask.tried for view in able):
        return _full()
    return _away(able, ask.now)


def _full() -> NoReplica:
    return NoReplica(
        "Every replica of this model is at its limit. Send the request again shortly.", code="model_busy", retry_after=1
    )


def _away(able: Sequence[ReplicaView], now: float) -> NoReplica:
    pauses = [view.paused_until - now for view in able if view.paused_until > now]
    return NoReplica(
        "No replica of this model is available at the moment. Send the request again later.",
        retry_after=min(pauses, default=5.0),
    )
