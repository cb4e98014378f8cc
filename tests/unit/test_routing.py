"""Which replica answers: eligibility, spread and what the caller hears when there is none. Views are literals."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import OpenAICompatible, Operation
from gateway.errors import NoReplica, UnsupportedOperation
from gateway.routing import POLICIES, Ask, choose, least_load, power_of_two, pressure, round_robin
from gateway.types import Endpoint, Model, Replica, Timeouts

CHAT_ONLY = OpenAICompatible(paths={Operation.CHAT: "/v1/chat/completions"})
BASE = Replica("r", "m", OpenAICompatible(), Endpoint("h", 80), "", "m", Timeouts(), {})
MODEL = Model("m", (), "least_load", (), (), (), 512, 0)


@dataclass
class View:
    replica: Replica
    inflight: int = 0
    up: bool = True
    room: bool = True
    paused_until: float = 0.0
    ttft: float | None = None

    def routable(self, now: float) -> bool:
        return self.up and now >= self.paused_until

    def has_room(self) -> bool:
        return self.room


def view(name: str, inflight: int = 0, weight: float = 1.0, *, chat_only: bool = False, **more: object) -> View:
    replica = replace(BASE, id=name, weight=weight, backend=CHAT_ONLY if chat_only else BASE.backend)
    return View(replica, inflight, **more)  # type: ignore[arg-type]


def views(*inflight: int) -> list[View]:
    return [view("abcdefgh"[place], count) for place, count in enumerate(inflight)]


def ask(sequence: int = 0, entropy: int = 0, operation: Operation = Operation.CHAT, tried: Sequence[str] = ()) -> Ask:
    return Ask(operation, 100.0, sequence, entropy, tried)


def chosen(all_views: Sequence[View], policy: str = "least_load", given: Ask | None = None) -> str:
    return choose(replace(MODEL, policy=policy), all_views, given or ask()).replica.id


# --- policies
def test_least_load_takes_the_fewest_open_requests() -> None:
    for entropy in range(10):
        assert least_load(views(3, 1, 2), ask(entropy=entropy)).replica.id == "b"


def test_least_load_counts_by_weight() -> None:
    big, small = view("big", 3, weight=4.0), view("small", 1, weight=1.0)
    assert least_load([small, big], ask()).replica.id == "big"  # (3+1)/4 against (1+1)/1
    assert pressure(big) == 1.0


def test_an_idle_fleet_prefers_the_heavier_replica() -> None:
    assert least_load([view("small"), view("big", weight=2.0)], ask()).replica.id == "big"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_equal_replicas_share_evenly(policy: str, count: int) -> None:
    random, hits = Random(1), Counter[str]()
    for sequence in range(2000):
        hits[chosen(views(*[0] * count), policy, ask(sequence, random.getrandbits(30)))] += 1
    assert len(hits) == count
    assert all(abs(n - 2000 / count) <= 0.2 * 2000 / count for n in hits.values()), hits


@pytest.mark.parametrize("policy", POLICIES)
def test_a_burst_is_spread_by_our_own_count_without_any_news(policy: str) -> None:
    random, fleet = Random(2), views(0, 0, 0)
    for sequence in range(60):
        name = chosen(fleet, policy, ask(sequence, random.getrandbits(30)))
        next(v for v in fleet if v.replica.id == name).inflight += 1
    assert all(16 <= v.inflight <= 24 for v in fleet), fleet


@given(st.lists(st.integers(0, 9), min_size=2, max_size=6), st.integers(0, 2**30 - 1))
@settings(max_examples=150, deadline=None)
def test_power_of_two_never_takes_the_strictly_busiest(inflight: list[int], entropy: int) -> None:
    picked = power_of_two(views(*inflight), ask(entropy=entropy))
    assert picked.inflight < max(inflight) or inflight.count(max(inflight)) > 1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 2**30 - 1), st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_policies_are_pure_choices_among_the_views(inflight: list[int], entropy: int, sequence: int) -> None:
    fleet, given_ask = views(*inflight), ask(sequence, entropy)
    for policy in POLICIES.values():
        assert policy(fleet, given_ask) is policy(fleet, given_ask)
        assert policy(fleet, given_ask) in fleet
    assert least_load(fleet, given_ask).inflight == min(inflight)
    assert [v.inflight for v in fleet] == inflight


def test_round_robin_goes_round() -> None:
    fleet = views(5, 0, 9)
    assert [round_robin(fleet, ask(sequence=n)).replica.id for n in range(6)] == list("abcabc")


# --- who may
def test_only_those_that_may_are_asked() -> None:
    fleet = [
        view("down", up=False), view("full", room=False), view("paused", paused_until=101.0),
        view("tried"), view("good", 9),
    ]  # fmt: skip
    for policy in POLICIES:
        assert {chosen(fleet, policy, ask(n, n * 7919, tried=("tried",))) for n in range(20)} == {"good"}


def test_a_replica_whose_pause_is_over_is_asked_again() -> None:
    assert chosen([view("a", paused_until=100.0)]) == "a"


def test_engines_that_cannot_do_it_are_passed_over() -> None:
    fleet = [view("chat", chat_only=True), view("all", 9)]
    assert chosen(fleet, given=ask(operation=Operation.EMBEDDINGS)) == "all"


def test_when_no_engine_can_do_it_at_all_the_request_is_wrong() -> None:
    with pytest.raises(UnsupportedOperation) as caught:
        chosen([view("a", chat_only=True, up=False)], given=ask(operation=Operation.EMBEDDINGS))
    assert (caught.value.status, caught.value.param) == (400, "model")


def test_when_an_able_engine_is_down_it_is_no_mistake_of_the_caller() -> None:
    with pytest.raises(NoReplica):
        chosen([view("a", chat_only=True), view("b", up=False)], given=ask(operation=Operation.EMBEDDINGS))


def refused(fleet: Sequence[View], given: Ask | None = None) -> NoReplica:
    with pytest.raises(NoReplica) as caught:
        chosen(fleet, given=given)
    assert caught.value.status == 503
    return caught.value


def test_full_and_away_are_told_apart() -> None:
    full, away = refused([view("a", room=False), view("b", up=False)]), refused([view("b", up=False)])
    assert (full.code, full.retry_after) == ("model_busy", 1)
    assert (away.code, away.retry_after) == ("no_replica", 5.0)


def test_the_callers_wait_is_the_shortest_pause() -> None:
    error = refused(
        [view("a", paused_until=130.0), view("b", paused_until=107.5), view("c", paused_until=90.0, up=False)]
    )
    assert error.retry_after == 7.5


def test_nothing_is_left_when_all_were_tried() -> None:
    assert refused(views(0, 0), ask(tried=("a", "b"))).retry_after == 5.0
