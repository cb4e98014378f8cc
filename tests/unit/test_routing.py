"""Which replica answers: eligibility, spread and what the caller hears when there is none. Views are literals."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import OpenAICompatible
from gateway.errors import ModelBusy, NoReplica, UnsupportedOperation
from gateway.routing import ALIKE, POLICIES, Ask, choose, least_load, power_of_two, round_robin, weighted
from gateway.types import Endpoint, Model, Replica, Timeouts

BASE = Replica("r", "m", OpenAICompatible(), Endpoint("h", 80), "", "m", Timeouts(), {})
MODEL = Model("m", (), "least_load", (), (), (), 512, 0)


@dataclass
class View:
    replica: Replica
    inflight: int = 0
    most: int = 1_000_000
    open: bool = True
    unit: float = 1.0
    paused_until: float = 0.0
    trying: bool = False
    ttft: float | None = None
    prefill: float | None = None

    @property
    def wait(self) -> float:
        return (self.inflight + 1) * self.unit / self.replica.weight

    def routable(self, now: float) -> bool:
        return self.open or (bool(self.paused_until) and now >= self.paused_until and not self.trying)


def view(name: str, inflight: int = 0, weight: float = 1.0, *, form: str | None = None, **more: object) -> View:
    return View(replace(BASE, id=name, weight=weight, format=form), inflight, **more)  # type: ignore[arg-type]


def paused(name: str, until: float, **more: object) -> View:
    return view(name, open=False, paused_until=until, **more)  # type: ignore[arg-type]


def views(*inflight: int) -> list[View]:
    return [view("abcdefgh"[place], count) for place, count in enumerate(inflight)]


def ask(sequence: int = 0, entropy: int = 0, tried: Sequence[str] = ()) -> Ask:
    return Ask(100.0, sequence, entropy, tried)


def chosen(all_views: Sequence[View], policy: str = "least_load", given: Ask | None = None) -> str:
    return choose(replace(MODEL, policy=policy), all_views, given or ask()).replica.id


def spread(fleet: Sequence[View], policy: str, requests: int, *, stay: bool) -> Counter[str]:
    """Where that many requests go; with `stay` they all remain open."""
    random, hits = Random(3), Counter[str]()
    for sequence in range(requests):
        picked = choose(replace(MODEL, policy=policy), fleet, ask(sequence, random.getrandbits(30)))
        picked.inflight += stay
        hits[picked.replica.id] += 1
    return hits


# --- policies
def test_least_load_takes_the_shortest_expected_wait() -> None:
    for entropy in range(10):
        assert least_load(views(3, 1, 2), ask(entropy=entropy)).replica.id == "b"


def test_a_slow_replica_with_fewer_requests_is_the_longer_wait() -> None:
    slow, fast = view("slow", 1, unit=10.0), view("fast", 9)
    assert least_load([slow, fast], ask()).replica.id == "fast"


def test_least_load_counts_by_weight() -> None:
    big, small = view("big", 3, weight=4.0), view("small", 1)
    assert least_load([small, big], ask()).replica.id == "big"  # 4/4 against 2/1


def test_an_idle_fleet_prefers_the_heavier_replica() -> None:
    assert least_load([view("small"), view("big", weight=2.0)], ask()).replica.id == "big"


def test_of_waits_that_are_about_equal_the_fewest_open_requests_decide() -> None:
    """What is measured is not that exact: a replica that seems five per cent faster must not take a whole burst."""
    near, far = ALIKE - 0.01, ALIKE + 0.01
    assert least_load([view("quick", 2, unit=1.0), view("idle", 0, unit=3 * near)], ask()).replica.id == "idle"
    assert least_load([view("quick", 2, unit=1.0), view("idle", 0, unit=3 * far)], ask()).replica.id == "quick"


def test_equals_in_everything_are_drawn_by_lot() -> None:
    assert {least_load(views(0, 0, 0), ask(entropy=n)).replica.id for n in range(3)} == set("abc")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_equal_replicas_share_evenly(policy: str, count: int) -> None:
    hits = spread(views(*[0] * count), policy, 2000, stay=False)
    assert len(hits) == count
    assert all(abs(n - 2000 / count) <= 0.2 * 2000 / count for n in hits.values()), hits


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"weighted"}))
def test_a_burst_is_spread_by_our_own_count_without_any_news(policy: str) -> None:
    hits = spread(views(0, 0, 0), policy, 60, stay=True)
    assert all(16 <= hits[name] <= 24 for name in "abc"), hits


@pytest.mark.parametrize("policy", ["least_load", "weighted"])
def test_weights_are_shares(policy: str) -> None:
    fleet = [view("one"), view("three", weight=3.0), view("six", weight=6.0)]
    hits = spread(fleet, policy, 2000, stay=True)
    for name, share in (("one", 200), ("three", 600), ("six", 1200)):
        assert abs(hits[name] - share) <= 0.2 * share, hits


def test_a_weight_of_almost_nothing_gets_almost_nothing() -> None:
    hits = spread([view("a", weight=0.001), view("b")], "weighted", 2000, stay=False)
    assert hits["a"] <= 20


def test_the_last_grain_of_chance_falls_on_the_last_replica() -> None:
    """Shares that do not add up exactly in floating point leave no gap."""
    fleet = [view(name, weight=0.1) for name in "abcdefgh"]
    assert weighted(fleet, ask(entropy=2**30 - 1)).replica.id == "h"


@given(st.lists(st.integers(0, 9), min_size=2, max_size=6), st.integers(0, 2**30 - 1))
@settings(max_examples=150, deadline=None)
def test_power_of_two_never_takes_the_strictly_busiest(inflight: list[int], entropy: int) -> None:
    picked = power_of_two(views(*inflight), ask(entropy=entropy))
    assert picked.inflight < max(inflight) or inflight.count(max(inflight)) > 1


def test_power_of_two_compares_every_pair() -> None:
    random, fleet = Random(4), views(3, 2, 1, 0)
    hits = Counter(power_of_two(fleet, ask(entropy=random.getrandbits(30))).replica.id for _ in range(6000))
    # The idlest wins all of its pairs (3 of 6), the next one 2, then 1, the busiest none.
    assert [round(hits[name] / 1000) for name in "abcd"] == [0, 1, 2, 3]


LOADS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(LOADS, st.integers(0, 2**30 - 1), st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_policies_are_pure_choices_among_the_views(inflight: list[int], entropy: int, sequence: int) -> None:
    fleet, given_ask = views(*inflight), ask(sequence, entropy)
    for policy in POLICIES.values():
        assert policy(fleet, given_ask) is policy(fleet, given_ask)
        assert any(policy(fleet, given_ask) is view for view in fleet)
    assert least_load(fleet, given_ask).inflight == min(inflight)
    assert [v.inflight for v in fleet] == inflight


UNLIKE = st.lists(st.tuples(st.integers(0, 50), st.floats(0.001, 100)), min_size=1, max_size=8)


@given(UNLIKE, st.integers(0, 2**30 - 1))
@settings(max_examples=150, deadline=None)
def test_least_load_is_never_worse_than_the_best_by_more_than_measuring_is_exact(
    given_views: list[tuple[int, float]], entropy: int
) -> None:
    fleet = [view(str(place), count, unit=unit) for place, (count, unit) in enumerate(given_views)]
    best = min(v.wait for v in fleet)
    assert least_load(fleet, ask(entropy=entropy)).wait <= best * ALIKE


def test_round_robin_goes_round() -> None:
    fleet = views(5, 0, 9)
    assert [round_robin(fleet, ask(sequence=n)).replica.id for n in range(6)] == list("abcabc")


# --- formats
def test_the_first_listed_format_that_has_a_replica_is_taken() -> None:
    fleet = [view("g", form="gguf"), view("a", 50, form="awq"), view("none")]
    model = replace(MODEL, format_preference=("fp8", "awq", "gguf"))
    assert choose(model, fleet, ask()).replica.id == "a"
    assert choose(model, fleet, ask(tried=("a",))).replica.id == "g"  # away or tried: the next one
    assert choose(model, fleet, ask(tried=("a", "g"))).replica.id == "none"


def test_without_a_preference_formats_do_not_matter() -> None:
    assert chosen([view("g", 1, form="gguf"), view("a", 0, form="awq")]) == "a"


# --- who may
def test_only_those_that_may_are_asked() -> None:
    fleet = [
        view("down", open=False), view("full", 3, most=3), paused("paused", 101.0),
        paused("being tried", 99.0, trying=True), view("tried"), view("good", 9),
    ]  # fmt: skip
    for policy in POLICIES:
        assert {chosen(fleet, policy, ask(n, n * 7919, ("tried",))) for n in range(20)} == {"good"}


STATES = st.sampled_from(["good", "down", "full", "paused", "back", "tried"])


@given(st.lists(STATES, min_size=1, max_size=8), st.sampled_from(sorted(POLICIES)), st.integers(0, 2**30 - 1))
@settings(max_examples=200, deadline=None)
def test_whoever_may_be_asked_is_found_and_nobody_else(states: list[str], policy: str, entropy: int) -> None:
    make = {
        "good": lambda name: view(name, 2), "down": lambda name: view(name, open=False),
        "full": lambda name: view(name, 5, most=5), "paused": lambda name: paused(name, 100.5),
        "back": lambda name: paused(name, 99.5), "tried": view,
    }  # fmt: skip
    fleet = [make[state](f"{state}-{place}") for place, state in enumerate(states)]
    tried = [v.replica.id for v in fleet if v.replica.id.startswith("tried")]
    may = {v.replica.id for v in fleet if v.replica.id.startswith(("good", "back"))}
    try:
        assert chosen(fleet, policy, ask(entropy, entropy, tried)) in may
    except NoReplica:
        assert not may


def test_a_replica_whose_pause_is_over_is_asked_again() -> None:
    assert chosen([paused("a", 100.0)]) == "a"


def test_when_no_engine_can_do_it_at_all_the_request_is_wrong() -> None:
    with pytest.raises(UnsupportedOperation) as caught:
        chosen([])
    assert (caught.value.status, caught.value.param) == (400, "model")


def refused(fleet: Sequence[View], given: Ask | None = None) -> NoReplica:
    with pytest.raises(NoReplica) as caught:
        chosen(fleet, given=given)
    assert caught.value.status == 503
    return caught.value


def test_full_and_away_are_told_apart() -> None:
    full, away = refused([view("a", 3, most=3), view("b", open=False)]), refused([view("b", open=False)])
    assert (type(full), full.code, full.retry_after) == (ModelBusy, "model_busy", 1)
    assert (type(away), away.code, away.retry_after) == (NoReplica, "no_replica", 5.0)


def test_the_callers_wait_is_the_shortest_pause() -> None:
    error = refused([paused("a", 130.0), paused("b", 107.5), paused("c", 90.0, trying=True)])
    assert error.retry_after == 7.5


def test_nothing_is_left_when_all_were_tried() -> None:
    error = refused(views(0, 0), ask(tried=("a", "b")))
    assert (error.code, error.retry_after) == ("no_replica", 5.0)
