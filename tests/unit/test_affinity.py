"""Policies that keep prompt caches warm: who is drawn where, how strongly, and who is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import OpenAICompatible, Operation
from gateway.call import Call
from gateway.config import Config, RoutingConfig
from gateway.fleet import LoadTable
from gateway.replica_state import Health, ReplicaState
from gateway.routing import OVERLOADED, Ask, choose, least_load, prefix_affinity, session_affinity
from gateway.state import Gateway
from gateway.types import Endpoint, Model, Replica, Tenant, Timeouts

BASE = Replica("r", "m", OpenAICompatible(), Endpoint("h", 80), "", "m", Timeouts(), {})
PROMPT = "Once upon a time. " * 100


@dataclass
class View:
    replica: Replica
    inflight: int = 0
    unit: float = 1.0
    prefill: float | None = None
    most: int = 1000
    open: bool = True
    ttft: float | None = None
    paused_until: float = 0.0

    @property
    def wait(self) -> float:
        return (self.inflight + 1) * self.unit

    def routable(self, now: float) -> bool:
        return self.open


def view(name: str, inflight: int = 0, unit: float = 1.0, prefill: float | None = None, weight: float = 1.0) -> View:
    return View(replace(BASE, id=name, weight=weight), inflight, unit, prefill)


def ask(entropy: int = 0, warm: dict[str, float] | None = None, prompt: int = 1000, session: bytes = b"") -> Ask:
    return Ask(100.0, 0, entropy, (), session, warm, prompt)


UNITS, RATES = st.sampled_from([0.1, 1.0, 3.0]), st.sampled_from([None, 1e-4, 1e-3])
VALUES = st.tuples(st.integers(0, 20), UNITS, RATES, st.sampled_from([1.0, 2.0]))
FLEETS = st.lists(VALUES, min_size=1, max_size=8).map(
    lambda fleet: [view(f"r{number}", *given) for number, given in enumerate(fleet)]
)
SHARES = st.dictionaries(st.sampled_from([f"r{at}" for at in range(10)]), st.floats(0.01, 1.0), max_size=8)
ENTROPY = st.integers(0, 2**30 - 1)


def overloaded(one: View, fleet: Sequence[View]) -> bool:
    mean = sum(other.inflight for other in fleet) / sum(other.replica.weight for other in fleet)
    return one.inflight > OVERLOADED * mean * one.replica.weight + 1


# --- prefix affinity
@given(FLEETS, ENTROPY, st.sampled_from([None, {}, {"elsewhere": 1.0}]))
@settings(max_examples=150, deadline=None)
def test_where_nobody_has_the_prompt_it_is_least_load(
    fleet: list[View], entropy: int, warm: dict[str, float] | None
) -> None:
    given_ask = ask(entropy, warm)
    assert prefix_affinity(fleet, given_ask) is least_load(fleet, given_ask)


@given(FLEETS, SHARES, ENTROPY)
@settings(max_examples=300, deadline=None)
def test_warmth_draws_to_nobody_who_is_overloaded(fleet: list[View], warm: dict[str, float], entropy: int) -> None:
    given_ask = ask(entropy, warm)
    picked = prefix_affinity(fleet, given_ask)
    assert picked in fleet
    if overloaded(picked, fleet):
        assert picked is least_load(fleet, given_ask)


def test_of_equals_the_warmest_is_taken() -> None:
    fleet = [view(name) for name in "abcd"]
    for entropy in range(20):
        assert prefix_affinity(fleet, ask(entropy, {"b": 0.5, "c": 0.9, "d": 0.4})).replica.id == "c"


def test_of_equally_warm_ones_the_least_busy_and_then_chance() -> None:
    fleet = [view("a", 9, 0.01, 1e-3), view("b", 8, 0.01, 1e-3), view("c", 8, 0.01, 1e-3), view("d", 8, 0.01, 1e-3)]
    warm = {"a": 0.9, "b": 0.9, "c": 0.9}
    assert {prefix_affinity(fleet, ask(entropy, warm)).replica.id for entropy in range(20)} == {"b", "c"}


def test_a_warm_cache_is_worth_waiting_for_as_long_as_reading_takes() -> None:
    fleet = [view("warm", 9, 0.1, prefill=1e-4), view("cold", 8, 0.1, prefill=1e-4)]
    assert prefix_affinity(fleet, ask(warm={"warm": 1.0}, prompt=10_000)).replica.id == "warm"  # 1 s against 0.1 s
    assert prefix_affinity(fleet, ask(warm={"warm": 1.0}, prompt=10)).replica.id == "cold"
    assert prefix_affinity(fleet, ask(warm={"warm": 0.001}, prompt=10_000)).replica.id == "cold"


def test_while_nothing_was_measured_a_prompt_weighs_as_much_as_a_request() -> None:
    for ahead, expected in ((0, "warm"), (1, "warm"), (2, "cold")):
        fleet = [view("warm", 5 + ahead), view("cold", 5)]
        assert prefix_affinity(fleet, ask(warm={"warm": 1.0})).replica.id == expected


def test_an_overloaded_replica_gets_no_credit() -> None:
    fleet = [view("warm", 10, 0.1, 1.0), *(view(name, 4, 0.1, 1.0) for name in "abc")]
    assert prefix_affinity(fleet, ask(warm={"warm": 1.0})).replica.id != "warm"  # 10 > 1.5 * 5.5 + 1
    fleet[0].inflight = 6
    assert prefix_affinity(fleet, ask(warm={"warm": 1.0})).replica.id == "warm"


def test_the_policies_can_be_named_in_a_model() -> None:
    model = Model("m", (), "prefix_affinity", (), (), (), 512, 0)
    fleet = [view("a"), view("b"), view("c")]
    assert choose(model, fleet, ask(warm={"b": 1.0})).replica.id == "b"
    model = replace(model, policy="session_affinity")
    assert len({choose(model, fleet, ask(entropy, session=b"s")).replica.id for entropy in range(9)}) == 1


# --- what reading costs
def state(name: str = "a") -> ReplicaState:
    return ReplicaState(replace(BASE, id=name))


def test_reading_is_measured_by_the_character_and_only_where_most_was_new() -> None:
    one = state()
    one.succeeded(10.0, 0.0, 1.0, 0.1, cold=1000)
    one.succeeded(10.0, 0.0, 0.001, 0.1)  # a hit says nothing of what reading costs
    assert one.prefill == pytest.approx(1e-3)
    for _ in range(50):
        one.succeeded(10.0, 0.0, 4.0, 0.1, cold=1000)
    assert one.prefill == pytest.approx(4e-3, rel=0.01)


def test_who_was_never_measured_reads_like_its_peers() -> None:
    table = LoadTable()
    table.adopt([replace(BASE, id=name) for name in "abcd"] + [replace(BASE, id="x", model="other")])
    for one, seconds in zip(table, (1.0, 2.0, 9.0), strict=False):
        one.succeeded(10.0, 0.0, seconds, 0.1, cold=1000)
    table.look_over(11.0)
    assert {one.replica.id: one.prefill for one in table} == {"a": 1e-3, "b": 2e-3, "c": 9e-3, "d": 2e-3, "x": None}


# --- session affinity
def sessions(count: int) -> list[bytes]:
    return [asked(user=f"user {number}").session for number in range(count)]


def asked(session_id: bytes = b"", tenant: str = "t", **body: object) -> Call:
    call = Call(Operation.CHAT, b"", {"model": "m", "messages": [{"role": "user", "content": PROMPT}], **body})
    call.tenant, call.session_id = Tenant(tenant, salt=tenant), session_id
    return call


def homes(fleet: Sequence[View], wanted: Sequence[bytes]) -> dict[bytes, str]:
    return {session: session_affinity(fleet, ask(session=session)).replica.id for session in wanted}


WEIGHTED = st.dictionaries(st.text("abcdef", min_size=1), st.sampled_from([0.5, 1.0, 3.0]), min_size=2, max_size=8)


@given(WEIGHTED, st.randoms(use_true_random=False), ENTROPY)
@settings(max_examples=60, deadline=None)
def test_a_session_stays_whatever_the_order_and_the_chance(
    weights: dict[str, float], random: Random, entropy: int
) -> None:
    fleet = [view(name, weight=weight) for name, weight in weights.items()]
    shuffled = fleet.copy()
    random.shuffle(shuffled)
    for session in sessions(20):
        first = session_affinity(fleet, ask(0, session=session))
        assert session_affinity(shuffled, ask(entropy, session=session)) is first


@given(WEIGHTED)
@settings(max_examples=60, deadline=None)
def test_a_replica_that_goes_or_comes_moves_no_sessions_but_its_own(weights: dict[str, float]) -> None:
    fleet = [view(name, weight=weight) for name, weight in weights.items()]
    wanted = sessions(100)
    before = homes(fleet, wanted)
    for gone in fleet:
        after = homes([one for one in fleet if one is not gone], wanted)
        moved = {session for session in wanted if before[session] != after[session]}
        assert moved == {session for session in wanted if before[session] == gone.replica.id}


def test_sessions_are_shared_out_by_weight() -> None:
    fleet = [view("a"), view("b"), view("c", weight=2.0)]
    counts = Counter(homes(fleet, sessions(8000)).values())
    assert all(abs(counts[name] - share) < 0.1 * share for name, share in (("a", 2000), ("b", 2000), ("c", 4000)))


def test_equal_replicas_get_equally_many_sessions() -> None:
    counts = Counter(homes([view(f"m/vllm-{number:08x}") for number in range(16)], sessions(16_000)).values())
    assert len(counts) == 16 and max(counts.values()) <= 1.2 * min(counts.values())


@given(st.lists(st.integers(0, 20), min_size=2, max_size=6), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_an_overloaded_replica_passes_to_the_next_in_the_sessions_order(inflight: list[int], number: int) -> None:
    session, names = sessions(number + 1)[-1], "abcdef"[: len(inflight)]
    order, left = [], [view(name) for name in names]
    while left:  # the order is what remains when the first is taken away
        order.append(session_affinity(left, ask(session=session)).replica.id)
        left = [one for one in left if one.replica.id != order[-1]]
    fleet = [view(name, count) for name, count in zip(names, inflight, strict=True)]
    by_name = {one.replica.id: one for one in fleet}
    expected = next(name for name in order if not overloaded(by_name[name], fleet))
    assert session_affinity(fleet, ask(session=session)).replica.id == expected


def test_without_a_session_it_is_least_load() -> None:
    fleet = [view("a", 3), view("b", 1), view("c", 2)]
    assert session_affinity(fleet, ask()).replica.id == "b" and asked().session == b""


def test_the_header_names_the_session_and_else_the_user() -> None:
    assert asked(b"s", user="u").session == asked(b"s").session != asked(user="u").session
    assert asked(b"u").session == asked(user="u").session
    assert asked(user=7).session == asked(user="").session == b""


def test_the_same_session_of_another_tenant_is_another_session() -> None:
    assert asked(b"s", "t").session != asked(b"s", "u").session
    assert asked(b"b", "a").session != asked(b"", "ab").session


def test_every_process_sends_a_session_to_the_same_replica() -> None:
    program = (
        "from tests.unit.test_affinity import *\n"
        "print(sorted(homes([view(name) for name in 'abcdef'], sessions(50)).items()))"
    )
    found = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True, timeout=60
        )
        found.add(done.stdout)
    assert len(found) == 1


# --- the gateway's part
class Life:
    """A gateway's records without its sockets: three replicas of one model."""

    def __init__(self, policy: str = "prefix_affinity") -> None:
        replicas = tuple(replace(BASE, id=f"m/{name}") for name in "abc")
        self.model = Model("m", (), policy, (), (), replicas, 512, 0)
        self.snapshot = SimpleNamespace(config=Config())
        self.gateway = Gateway(self.snapshot, None, None, None)  # type: ignore[arg-type]
        self.gateway.fleet.adopt(replicas)

    def send(self, call: Call) -> str:
        one = self.gateway.choose(self.model, call, ())
        self.gateway.note_sent(call, one.replica)
        return one.replica.id

    def state(self, name: str) -> ReplicaState:
        return next(one for one in self.gateway.fleet if one.replica.id == name)


def test_a_prompt_goes_where_it_went_before() -> None:
    life = Life()
    first = life.send(asked())
    assert {life.send(asked()) for _ in range(20)} == {first}


def test_what_is_new_to_a_replica_is_told_as_long_as_it_is_most() -> None:
    life = Life()
    call = asked()
    one = life.gateway.choose(life.model, call, ()).replica
    assert life.gateway.note_sent(call, one) == call.find_prefix().length
    assert life.gateway.note_sent(call, one) == 0


def test_other_policies_never_read_the_prompt() -> None:
    for policy in ("least_load", "round_robin", "session_affinity"):
        life, call = Life(policy), asked(b"s")
        life.send(call)
        assert call.prefix is None and len(life.gateway.prefixes) == 0


@pytest.mark.parametrize("health", [Health.DOWN, Health.LOADING])
def test_a_replica_that_was_away_is_warm_no_more(health: Health) -> None:
    life = Life()
    first = life.send(asked())
    life.state(first).health = health
    life.gateway.look_over(200.0)
    assert life.gateway.prefixes.warm(asked().find_prefix()) == {}


def test_a_replica_that_only_pauses_keeps_its_cache() -> None:
    life = Life()
    first = life.send(asked())
    life.state(first).asked_to_wait(200.0, 5.0)
    life.gateway.look_over(200.0)
    assert life.gateway.prefixes.warm(asked().find_prefix()).keys() == {first}


def test_a_replica_that_is_configured_no_more_is_forgotten() -> None:
    life = Life()
    first = life.send(asked())
    life.gateway.fleet.adopt([one for one in life.model.replicas if one.id != first])
    life.gateway.look_over(200.0)
    assert life.gateway.prefixes.warm(asked().find_prefix()) == {}


def test_a_reload_changes_the_budget_of_retries_and_the_memory() -> None:
    life = Life()
    life.send(asked())
    life.snapshot.config = Config(routing=RoutingConfig(retry_budget=0.5, prefix_index=1))
    life.gateway.look_over(200.0)
    assert life.gateway.retries.ratio == 0.5
    assert len(life.gateway.prefixes) == 0


@pytest.mark.parametrize("wrong", [{"retry_budget": 1.5}, {"retry_budget": -0.1}, {"prefix_index": "0B"}])
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        RoutingConfig(**wrong)  # type: ignore[arg-type]


def test_the_usual_settings() -> None:
    assert (Config().routing.prefix_index, Config().routing.retry_budget) == (64 << 20, 0.2)
