"""Which replica answers: who may, and who should. Pure functions over what is known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from math import inf, log
from typing import NamedTuple, Protocol, TypeAlias, TypeVar, cast

from gateway.errors import GatewayError, ModelBusy, NoReplica, UnsupportedOperation
from gateway.types import Model, Replica

ALIKE = 1.1  # waits that differ by less than this factor are equal: what is measured is not that exact
OVERLOADED = 1.5  # times the mean number of open requests, from which on affinity counts no more
PREFILL_COUNTS = 2.0  # what a warm cache saves counts for the request and for those that run beside it
_ENTROPY = 1 << 30
_WORD = (1 << 30) - 1  # numbers of one digit inside Python, which multiply fastest
_LOG_WORD = log(1 << 30)


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
    def prefill(self) -> float | None: ...  # seconds to read one character of a prompt that is not in its cache
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
    prompt: int = 0  # characters of which those are shares


View = TypeVar("View", bound=ReplicaView)
Policy: TypeAlias = Callable[[Sequence[ReplicaView], Ask], ReplicaView]


def least_load(views: Sequence[ReplicaView], ask: Ask) -> ReplicaView:
    """The shortest expected wait; of replicas that are about equal the one with the fewest of our requests, by chance
    where that is equal too."""
    most = min([view.wait for view in views]) * ALIKE
    best = [view for view in views if view.wait <= most]
    return least_busy(best, ask)


def least_busy(best: Sequence[ReplicaView], ask: Ask) -> ReplicaView:
    """The fewest of our requests, and chance where that is equal."""
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


def prefix_affinity(views: Sequence[ReplicaView], ask: Ask) -> ReplicaView:
    """The shortest expected wait, less the reading that a warm cache saves: of about equals the warmest. Where nobody
    has anything, or only overloaded replicas have, it is least_load."""
    warm = ask.warm
    having = [(share, view) for view in views if (share := warm.get(view.replica.id))] if warm else []
    if not having:
        return least_load(views, ask)
    most = most_open(views, sum([view.replica.weight for view in views]))
    costs = [
        (view.wait - saved(view, share, ask.prompt), share, view)
        for share, view in having
        if view.inflight <= most * view.replica.weight + 1
    ]
    shortest = min([view.wait for view in views])
    least = min([cost for cost, _, _ in costs], default=inf)
    if least > shortest * ALIKE:
        return least_load(views, ask)
    alike = [(share, view) for cost, share, view in costs if cost <= least + (ALIKE - 1) * shortest]
    warmest = max([share for share, _ in alike])
    return least_busy([view for share, view in alike if share == warmest], ask)


def saved(view: ReplicaView, share: float, prompt: int) -> float:
    """Seconds of waiting that a cache with `share` of a prompt of `prompt` characters is worth."""
    if view.prefill is None:  # nothing was measured yet: a whole prompt weighs as much as one request more
        return share * view.wait / (view.inflight + 1)
    return PREFILL_COUNTS * share * prompt * view.prefill


def session_affinity(views: Sequence[ReplicaView], ask: Ask) -> ReplicaView:
    """Every session has an order of all replicas that is its own, and takes the first one that is not overloaded.
    A replica that comes or goes moves no sessions but its own."""
    if not ask.session:
        return least_load(views, ask)
    weights = [view.replica.weight for view in views]
    most = most_open(views, sum(weights))
    session = int.from_bytes(ask.session) & _WORD | 1
    scores: list[float] = [session * seat & _WORD for seat in _seats(tuple([view.replica.id for view in views]))]
    if len(set(weights)) > 1:  # the logarithm keeps the order where weights are equal
        scores = [(log(score + 1) - _LOG_WORD) / weight for score, weight in zip(scores, weights, strict=True)]
    best = scores.index(max(scores))
    if views[best].inflight > most * weights[best] + 1:
        fit = [place for place, view in enumerate(views) if view.inflight <= most * weights[place] + 1]
        best = max(fit, key=scores.__getitem__)
    return views[best]


def most_open(views: Sequence[ReplicaView], weight: float) -> float:
    """Open requests for a weight of 1, of `weight` in all, above which (and one more) a replica is overloaded."""
    return OVERLOADED * sum([view.inflight for view in views]) / weight


@lru_cache(1024)
def _seats(replicas: tuple[str, ...]) -> list[int]:
    """A number for each replica, the same in every process. Its product with a session's, cut to size, is its score."""
    return [int.from_bytes(blake2b(one.encode(), digest_size=8).digest()) & _WORD | 1 for one in replicas]


POLICIES: dict[str, Policy] = {
    "least_load": least_load,
    "power_of_two": power_of_two,
    "round_robin": round_robin,
    "weighted": weighted,
    "prefix_affinity": prefix_affinity,
    "session_affinity": session_affinity,
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
