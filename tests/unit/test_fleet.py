"""Health of replicas: what failures, pauses and probes do to where requests go."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import EngineLoad, ModelFormat, OpenAICompatible
from gateway.fleet import FAILURES_TO_OPEN, FIRST_PAUSE, LONGEST_PAUSE, Health, LoadTable, ReplicaState
from gateway.types import Endpoint, Replica, Timeouts

REPLICA = Replica(
    "m/vllm-1", "m", OpenAICompatible(kind="vllm"), Endpoint("h", 80), "", "m", Timeouts(), {}, max_inflight=2
)


def state(health: Health = Health.UP) -> ReplicaState:
    made = ReplicaState(REPLICA)
    made.health = health
    return made


@contextmanager
def running(made: ReplicaState) -> Iterator[None]:
    """A request that is open on the replica."""
    trial = made.begin()
    yield
    made.end(trial)


def opened(now: float = 100.0) -> ReplicaState:
    made = state()
    for _ in range(FAILURES_TO_OPEN):
        made.failed(now)
    return made


# --- the breaker
def test_three_failures_in_a_row_set_a_replica_aside() -> None:
    made = state()
    for _ in range(2):
        made.failed(100.0)
        assert made.routable(100.0)
    made.failed(100.0)
    assert not made.routable(100.0)
    assert not made.routable(104.9)
    assert made.routable(105.0)


def test_a_success_between_them_starts_the_count_again() -> None:
    made = state()
    for _ in range(20):
        made.failed(1.0)
        made.failed(1.0)
        made.succeeded(None)
    assert made.routable(1.0)


def test_after_the_pause_a_single_request_tries() -> None:
    made = opened()
    assert made.routable(105.0)
    with running(made):
        assert not made.routable(105.0)
        assert not made.routable(1000.0)
    assert made.routable(105.0)


def test_the_pause_doubles_with_every_failed_trial_up_to_a_bound() -> None:
    made, now, pauses = opened(0.0), 0.0, []
    for _ in range(7):
        pauses.append(made.paused_until - now)
        now = made.paused_until
        assert made.routable(now)
        made.failed(now)
        assert not made.routable(now)
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0]


def test_a_successful_trial_opens_the_gate_for_all_and_forgets_the_pauses() -> None:
    made = opened(0.0)
    made.failed(5.0)
    made.failed(15.0)
    with running(made):
        made.succeeded(0.1)
        assert made.routable(16.0)
    for _ in range(3):
        made.failed(20.0)
    assert made.paused_until == 20.0 + FIRST_PAUSE


def test_requests_that_fail_together_are_one_breakdown() -> None:
    """An engine that dies under twenty requests is tried again after the first pause, not after the longest."""
    made = state()
    for i in range(20):
        made.failed(100.0 + i * 0.01)
    assert 105.0 <= made.paused_until < 106.0


def test_a_429_pauses_without_counting_as_a_failure() -> None:
    made = state()
    for _ in range(20):
        made.asked_to_wait(100.0, 7.0)
    assert not made.routable(106.9)
    assert made.routable(107.0)
    with running(made):
        assert made.routable(107.0)  # no trial: all may come back
    assert made.failures == 0


def test_a_429_pause_is_bounded_and_never_shortens_another() -> None:
    made = state()
    made.asked_to_wait(0.0, 10_000.0)
    assert made.paused_until == LONGEST_PAUSE
    made.asked_to_wait(1.0, 2.0)
    assert made.paused_until == LONGEST_PAUSE
    for _ in range(3):
        made.failed(2.0)
    assert made.paused_until == LONGEST_PAUSE


def test_an_old_429_does_not_lengthen_the_first_pause() -> None:
    made = state()
    made.asked_to_wait(0.0, 1.0)
    for _ in range(3):
        made.failed(100.0)
    assert made.paused_until == 105.0


@given(
    st.lists(st.tuples(st.sampled_from(["fail", "ok", "wait", "probe", "probe fail"]), st.floats(0, 50)), max_size=40)
)
@settings(max_examples=150, deadline=None)
def test_a_replica_always_comes_back_within_the_longest_pause(steps: list[tuple[str, float]]) -> None:
    made, now = state(), 0.0
    for step, pause in steps:
        now += pause
        if step == "fail":
            made.failed(now)
        elif step == "ok":
            made.succeeded(0.1)
            assert made.paused_until == 0.0
        elif step == "wait":
            made.asked_to_wait(now, pause)
        elif step == "probe":
            made.probe_succeeded()
        else:
            made.probe_failed(Health.DOWN, "x")
        assert made.paused_until <= now + LONGEST_PAUSE
    made.probe_succeeded()
    assert made.routable(now + LONGEST_PAUSE)


def test_time_to_first_token_is_a_moving_average() -> None:
    made = state()
    made.succeeded(None)
    assert made.ttft is None
    made.succeeded(1.0)
    made.succeeded(2.0)
    assert made.ttft == pytest.approx(1.2)


# --- probes
def test_an_unknown_replica_may_be_tried_but_a_loading_or_dead_one_not() -> None:
    assert [state(health).routable(0.0) for health in (Health.UNKNOWN, Health.UP, Health.LOADING, Health.DOWN)] == [
        True, True, False, False,
    ]  # fmt: skip


def test_one_failed_probe_is_not_the_end() -> None:
    made = state()
    made.probe_failed(Health.DOWN, "timeout")
    assert made.routable(0.0)
    made.probe_failed(Health.DOWN, "timeout")
    assert not made.routable(0.0)
    assert (made.health, made.detail) == (Health.DOWN, "timeout")


def test_alternating_probes_do_not_flap() -> None:
    made = state()
    for _ in range(50):
        made.probe_failed(Health.DOWN, "x")
        assert made.health is Health.UP
        made.probe_succeeded()


def test_what_never_was_up_is_down_at_once() -> None:
    for health in (Health.UNKNOWN, Health.LOADING):
        made = state(health)
        made.probe_failed(Health.DOWN, "refused")
        assert made.health is Health.DOWN


def test_loading_takes_effect_at_once_and_ends_with_a_good_probe() -> None:
    made = state()
    made.probe_failed(Health.LOADING, "status 503")
    assert not made.routable(0.0)
    made.probe_succeeded()
    assert made.routable(0.0)
    assert made.detail == ""


def test_busy_is_not_down() -> None:
    made = state()
    with running(made):
        for _ in range(10):
            made.probe_failed(Health.DOWN, "timeout")
        assert made.health is Health.UP
        made.failed(0.0)  # but when its requests fail too, it is
        made.probe_failed(Health.DOWN, "timeout")
        assert not made.routable(1.0)


def test_a_replica_that_comes_back_starts_without_debts() -> None:
    made = opened(0.0)
    made.probe_failed(Health.DOWN, "x")
    made.probe_failed(Health.DOWN, "x")
    made.probe_succeeded()
    assert made.routable(0.0)
    assert made.failures == 0


def test_good_probes_do_not_close_an_open_breaker() -> None:
    """Alive is not the same as able to answer."""
    made = opened(100.0)
    made.probe_succeeded()
    assert not made.routable(100.0)


def test_draining_gets_nothing_new() -> None:
    made = state()
    made.draining = True
    assert not made.routable(0.0)


# --- room
def test_room() -> None:
    made = state()
    with running(made):
        assert made.has_room()
        with running(made):
            assert not made.has_room()
    made.replica = replace(REPLICA, max_inflight=None)
    made.inflight = 10_000
    assert made.has_room()


# --- the table
def test_a_reload_keeps_what_is_known_of_replicas_that_stay() -> None:
    table, other = LoadTable(), replace(REPLICA, id="m/vllm-2")
    table.adopt([REPLICA, other])
    kept, gone = table.of(REPLICA), table.of(other)
    kept.failed(1.0)
    kept.inflight = 1
    changed = replace(REPLICA, weight=3.0)
    table.adopt([changed])
    assert table.of(changed) is kept
    assert (kept.replica.weight, kept.failures, kept.inflight) == (3.0, 1, 1)
    assert list(table) == [kept]
    assert table.of(other) is not gone


def test_a_request_on_an_old_snapshot_still_finds_a_state() -> None:
    assert LoadTable().of(REPLICA).replica is REPLICA


def samples(table: LoadTable, now: float = 0.0) -> dict[str, dict[tuple[str, ...], float]]:
    return {
        family.name: {tuple(sample.labels.values()): sample.value for sample in family.samples}
        for family in table.gauges(now)
    }


def test_gauges() -> None:
    table = LoadTable()
    silent = replace(REPLICA, id="m/x-2", format=None, backend=OpenAICompatible())
    table.adopt([replace(REPLICA, format=ModelFormat.SAFETENSORS), silent])
    first = table.of(REPLICA)
    first.inflight, first.load = 2, EngineLoad(running=0, waiting=3, kv_used=0.25)
    for _ in range(3):
        table.of(silent).failed(0.0)
    assert samples(table) == {
        "sekisho_replica_up": {
            ("m", "m/vllm-1", "vllm", "safetensors"): 1.0, ("m", "m/x-2", "openai_compatible", ""): 0.0,
        },
        "sekisho_inflight_requests": {("m", "m/vllm-1"): 2.0, ("m", "m/x-2"): 0.0},
        "sekisho_replica_running": {("m", "m/vllm-1"): 0.0},  # said to be zero; the other one did not say
        "sekisho_replica_waiting": {("m", "m/vllm-1"): 3.0},
        "sekisho_replica_kv_usage_ratio": {("m", "m/vllm-1"): 0.25},
    }  # fmt: skip
