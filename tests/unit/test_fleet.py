"""Health of replicas: what failures, pauses and probes do to where requests go. Times are literals."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import EngineLoad, ModelFormat, OpenAICompatible, Operation
from gateway.fleet import IDLE, STALE, LoadTable
from gateway.replica_state import (
    FAILURES_TO_OPEN,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    SLOW_START,
    STEADY,
    Health,
    ReplicaState,
    describe,
)
from gateway.routing import Ask, choose
from gateway.types import Endpoint, Model, Replica, Timeouts

REPLICA = Replica(
    "m/vllm-1", "m", OpenAICompatible(kind="vllm"), Endpoint("h", 80), "", "m", Timeouts(), {}, max_inflight=2
)


def state(health: Health = Health.UP, **changes: Any) -> ReplicaState:
    made = ReplicaState(replace(REPLICA, **changes))
    made.health = health
    made.weigh(0.0)
    return made


def model(*replicas: Replica) -> Model:
    return Model("m", (), "least_load", (), (), replicas, 512, 0)


@contextmanager
def running(made: ReplicaState) -> Iterator[bool]:
    """A request that is open on the replica; whether it is the trial."""
    trial = made.begin()
    yield trial
    made.end(trial)


def answered(made: ReplicaState, now: float, seconds: float = 0.1) -> None:
    """One request that goes well."""
    trial = made.begin()
    made.end(trial)
    made.succeeded(now, now - seconds, None, None, trial=trial)


def refused(made: ReplicaState, now: float) -> None:
    """One request that fails."""
    trial = made.begin()
    made.end(trial)
    made.failed(now, trial=trial)


def opened(now: float = 100.0) -> ReplicaState:
    made = state()
    for _ in range(FAILURES_TO_OPEN):
        refused(made, now)
    return made


# --- the breaker
def test_three_failures_in_a_row_set_a_replica_aside() -> None:
    made = state()
    for _ in range(2):
        refused(made, 100.0)
        assert made.routable(100.0)
    refused(made, 100.0)
    assert not made.routable(100.0)
    assert not made.routable(104.9)
    assert made.routable(105.0)


def test_failures_that_never_come_three_in_a_row_set_it_aside_by_their_share() -> None:
    """Every second request: half of the callers would have to try twice for ever."""
    made, requests = state(), 0
    while made.routable(1.0) and requests < 40:
        (refused if requests % 2 else answered)(made, 1.0)
        requests += 1
    assert not made.routable(1.0) and requests <= 20


def test_a_failure_now_and_then_is_no_reason() -> None:
    made = state()
    for number in range(1000):
        (answered if number % 5 else refused)(made, 1.0)
        assert made.routable(1.0)


@given(st.lists(st.booleans(), max_size=200))
@settings(max_examples=200, deadline=None)
def test_below_a_quarter_of_failures_and_two_in_a_row_nothing_is_set_aside(outcomes: list[bool]) -> None:
    made = state()
    for good in outcomes:
        if not good:
            refused(made, 1.0)
        for _ in range(3):
            answered(made, 1.0)
        assert made.routable(1.0)


def test_after_the_pause_a_single_request_tries() -> None:
    made = opened()
    assert made.routable(105.0)
    with running(made) as trial:
        assert trial
        assert not made.routable(105.0)
        assert not made.routable(1000.0)
        with running(made) as other:
            assert not other
        assert not made.routable(105.0)  # the trial is still the one that decides
    assert made.routable(105.0)


def test_the_pause_doubles_with_every_failed_trial_up_to_a_bound() -> None:
    made, now, pauses = opened(0.0), 0.0, []
    for _ in range(7):
        pauses.append(made.paused_until - now)
        now = made.paused_until
        assert made.routable(now)
        refused(made, now)
        assert not made.routable(now)
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0]


def test_a_successful_trial_opens_the_gate_for_all_and_after_a_steady_minute_forgets_the_pauses() -> None:
    made = opened(0.0)
    refused(made, 5.0)
    answered(made, 15.0)
    assert made.routable(15.0) and made.failures == 0
    for _ in range(3):
        refused(made, 15.0 + STEADY)
    assert made.paused_until == 15.0 + STEADY + FIRST_PAUSE


def test_one_that_breaks_again_soon_is_left_alone_for_longer() -> None:
    made = opened(0.0)
    answered(made, 5.0)
    for _ in range(3):
        refused(made, 6.0)
    assert made.paused_until == 6.0 + 2 * FIRST_PAUSE


def test_requests_that_fail_together_are_one_breakdown() -> None:
    """An engine that dies under twenty requests is tried again after the first pause, not after the longest."""
    made = state()
    trials = [made.begin() for _ in range(20)]
    for number, trial in enumerate(trials):
        made.end(trial)
        made.failed(100.0 + number * 0.01, trial=trial)
    assert not any(trials) and 105.0 <= made.paused_until < 106.0


def test_an_old_request_that_fails_late_is_no_failed_trial() -> None:
    made = state()
    old = made.begin()
    for _ in range(3):
        refused(made, 100.0)
    made.end(old)
    made.failed(140.0, trial=old)
    assert made.paused_until == 105.0


def test_an_answer_to_an_old_request_says_nothing_of_a_replica_that_was_set_aside() -> None:
    made = state()
    old = made.begin()
    for _ in range(3):
        refused(made, 100.0)
    made.end(old)
    made.succeeded(101.0, 90.0, None, None, trial=old)
    assert not made.routable(101.0)
    assert made.paused_until == 105.0


def test_a_long_stream_need_not_end_to_have_been_a_good_trial() -> None:
    made = opened(0.0)
    assert made.begin()
    made.end_trial(7.0)  # its first token
    assert made.routable(7.0) and not made.trying and not made.begin()
    for _ in range(3):
        made.failed(8.0)  # and if it was too good to be true, all counts as ever
    assert not made.routable(8.0)


def test_a_trial_without_a_verdict_leaves_the_question_to_the_next() -> None:
    made = opened(0.0)
    made.end(made.begin())  # the client left, or the request was wrong
    assert made.routable(5.0)
    with running(made) as trial:
        assert trial


def share_of_requests(fails: Any, seconds: float = 60.0, rate: float = 50.0) -> float:
    """Which share of the requests of a minute goes to a replica that fails as told, beside two good ones."""
    table, random, hits = LoadTable(), Random(5), 0
    table.adopt([replace(REPLICA, id=f"m/{name}", max_inflight=None) for name in ("bad", "good", "better")])
    fleet = list(table)
    for number in range(int(seconds * rate)):
        now = 100.0 + number / rate
        table.look_over(now)
        picked = choose(model(), fleet, Ask(now, number, random.getrandbits(30)))
        if picked is fleet[0]:
            hits += 1
            (refused if fails(hits) else answered)(picked, now)
        else:
            answered(picked, now)
    return hits / (seconds * rate)


def test_a_replica_that_fails_at_once_gets_next_to_nothing() -> None:
    """However idle it looks: it has no open requests, and its answers come within a millisecond."""
    assert 0 < share_of_requests(lambda hits: True) <= 0.01


def test_a_replica_that_fails_every_second_time_gets_little() -> None:
    assert 0 < share_of_requests(lambda hits: hits % 2) <= 0.05


# --- an engine that asks for a pause
def test_a_429_pauses_exactly_as_long_as_asked_and_never_breaks() -> None:
    made = state()
    for _ in range(20):
        made.asked_to_wait(100.0, 7.0)
    assert not made.routable(106.9)
    assert made.routable(107.0)
    with running(made) as trial:
        assert not trial and made.routable(107.0)  # all may come back
    assert made.failures == 0 and not made.broken


def test_an_answer_does_not_cut_the_asked_pause_short() -> None:
    made = state()
    with running(made):
        made.asked_to_wait(100.0, 7.0)
    made.succeeded(101.0, 99.0, None, None)
    assert not made.routable(106.9) and made.routable(107.0)


def test_when_the_asked_pause_is_over_the_replica_is_as_before() -> None:
    made = state()
    made.asked_to_wait(100.0, 7.0)
    before = made.wait
    made.weigh(107.0)
    assert made.open and made.paused_until == 0.0 and made.wait == before  # no slow start: it was healthy all along


def test_a_429_pause_is_bounded_and_never_shortens_another() -> None:
    made = state()
    made.asked_to_wait(0.0, 10_000.0)
    assert made.paused_until == LONGEST_PAUSE
    made.asked_to_wait(1.0, 2.0)
    assert made.paused_until == LONGEST_PAUSE
    for _ in range(3):
        refused(made, 2.0)
    assert made.paused_until == LONGEST_PAUSE


def test_an_old_429_does_not_lengthen_the_first_pause() -> None:
    made = state()
    made.asked_to_wait(0.0, 1.0)
    for _ in range(3):
        refused(made, 100.0)
    assert made.paused_until == 105.0


STEPS = st.tuples(st.sampled_from(["fail", "ok", "wait", "probe", "probe fail", "drop"]), st.floats(0, 50))


@given(st.lists(STEPS, max_size=60))
@settings(max_examples=200, deadline=None)
def test_whatever_happens_a_replica_can_be_tried_within_the_longest_pause(steps: list[tuple[str, float]]) -> None:
    made, now, open_trials = state(), 0.0, []
    for step, pause in steps:
        now += pause
        if step == "fail":
            refused(made, now)
        elif step == "ok":
            answered(made, now)
        elif step == "wait":
            made.asked_to_wait(now, pause)
        elif step == "drop":
            open_trials.append(made.begin())
            made.end(open_trials[-1])
        elif step == "probe":
            made.probe_succeeded(now)
        else:
            made.probe_failed(Health.DOWN, "x", now)
        assert made.paused_until <= now + LONGEST_PAUSE
        assert made.broken or made.failures < FAILURES_TO_OPEN
    for _ in range(16):
        made.probe_succeeded(now)
    assert made.inflight == 0 and made.routable(now + LONGEST_PAUSE)


@given(st.lists(st.sampled_from(["begin", "good", "bad", "pause"]), max_size=80))
@settings(max_examples=200, deadline=None)
def test_there_is_never_more_than_one_trial(steps: list[str]) -> None:
    made, now, trials = opened(0.0), 0.0, []
    for step in steps:
        now += 1.0
        if step == "begin":
            trials.append(made.begin())
        elif step == "pause":
            now += 30.0
        elif trials:
            trial = trials.pop(0)
            made.end(trial)
            if step == "good":
                made.succeeded(now, now - 1, None, None, trial=trial)
            else:
                made.failed(now, trial=trial)
        assert sum(trials) <= 1
        assert made.trying == (sum(trials) == 1)


# --- what is measured
def test_times_are_moving_averages_and_unknown_until_measured() -> None:
    made = state()
    made.succeeded(1.0, 0.0, None, None)
    assert (made.ttft, made.tpot) == (None, None)
    made.succeeded(2.0, 0.0, 1.0, 0.1)
    made.succeeded(4.0, 0.0, 2.0, 0.2)
    assert (made.ttft, made.tpot) == (pytest.approx(1.2), pytest.approx(0.12))


def test_how_fast_an_engine_is_does_not_depend_on_how_long_its_answers_are() -> None:
    made, other = state(), state()
    made.succeeded(10.0, 0.0, 1.0, 0.1, tokens=91)
    other.succeeded(1.2, 0.0, 1.0, 0.1, tokens=3)
    assert made.service == pytest.approx(0.1) and other.service == pytest.approx(0.1)


def test_each_open_request_makes_the_next_one_wait_longer() -> None:
    made = state(max_inflight=None)
    made.succeeded(2.0, 0.0, None, None)
    waits = [made.wait]
    for _ in range(3):
        made.begin()
        waits.append(made.wait)
    assert waits == [2.0, 4.0, 6.0, 8.0]
    for _ in range(3):
        made.end(False)
    assert made.wait == 2.0


def test_weight_divides_the_wait() -> None:
    assert state(weight=4.0).wait == pytest.approx(state().wait / 4)


def test_a_full_cache_makes_waits_longer_and_half_a_one_does_not() -> None:
    made = state()
    waits = []
    for used in (None, 0.0, 0.5, 0.9, 0.95, 1.0):
        made.load_read(EngineLoad(kv_used=used), 1.0)
        waits.append(made.wait)
    assert waits[:4] == [1.0] * 4 and waits[4:] == [pytest.approx(3.0), pytest.approx(5.0)]


def test_requests_of_others_count_and_our_own_are_not_counted_twice() -> None:
    made = state(max_inflight=None)
    for _ in range(3):
        made.begin()
    made.load_read(EngineLoad(running=4, waiting=4), 1.0)
    assert made.foreign == 5 and made.wait == 9.0
    made.load_read(EngineLoad(running=2, waiting=0), 1.0)
    assert made.foreign == 0 and made.wait == 4.0


def test_an_engine_that_does_not_say_is_not_an_idle_one() -> None:
    made = state()
    made.load_read(EngineLoad(running=4), 1.0)
    made.load_read(EngineLoad(waiting=2), 2.0)
    assert made.foreign == 0 and made.load.running is None and made.load_read_at == 2.0


def test_what_an_engine_said_long_ago_is_unknown_again() -> None:
    table = LoadTable()
    table.adopt([REPLICA])
    made = table.of(REPLICA)
    made.load_read(EngineLoad(running=9, kv_used=0.99, prefix_hits=0.5), 100.0)
    table.look_over(100.0 + STALE)
    assert made.foreign == 9
    table.look_over(100.1 + STALE)
    assert (made.foreign, made.load, made.wait) == (0, EngineLoad(), 1.0)


def measured(table: LoadTable, name: str, service: float, now: float) -> ReplicaState:
    made = next(found for found in table if found.replica.id == name)
    made.succeeded(now, now - service, None, None)
    return made


def test_a_replica_that_was_never_measured_counts_as_its_peers_do() -> None:
    table = LoadTable()
    table.adopt([replace(REPLICA, id=name) for name in "abcd"])
    for name, service in (("a", 1.0), ("b", 3.0), ("c", 9.0)):
        measured(table, name, service, 100.0)
    table.look_over(101.0)
    assert [made.wait for made in table] == [1.0, 3.0, 9.0, 3.0]


def test_peers_are_the_replicas_of_the_same_model() -> None:
    table = LoadTable()
    table.adopt([REPLICA, replace(REPLICA, id="x", model="other")])
    measured(table, REPLICA.id, 50.0, 100.0)
    table.look_over(101.0)
    assert [made.wait for made in table] == [50.0, 1.0]


def test_a_slow_answer_long_ago_keeps_nobody_away_for_ever() -> None:
    table = LoadTable()
    table.adopt([replace(REPLICA, id=name) for name in "abc"])
    for name in "abc":
        measured(table, name, 100.0 if name == "c" else 1.0, 100.0)
    slow = list(table)[2]
    table.look_over(100.0 + IDLE)
    assert slow.wait == 100.0  # not doubted yet
    for number in range(4 * 600):
        table.look_over(101.0 + IDLE + number / 4)
    assert slow.wait == pytest.approx(1.0, rel=0.05)


def test_a_replica_that_is_working_is_not_doubted() -> None:
    table = LoadTable()
    table.adopt([replace(REPLICA, id=name) for name in "abc"])
    for name in "abc":
        measured(table, name, 100.0 if name == "c" else 1.0, 100.0)
    slow = list(table)[2]
    slow.begin()
    for number in range(400):
        table.look_over(200.0 + number)
    assert slow.service == 100.0


# --- slow start
@pytest.mark.parametrize("how", ["trial", "probe"])
def test_who_comes_back_gets_its_share_bit_by_bit(how: str) -> None:
    made = opened(0.0)
    if how == "trial":
        answered(made, 10.0, 1.0)
    else:
        for _ in range(2):
            made.probe_failed(Health.DOWN, "x", 5.0)
        for _ in range(2):
            made.probe_succeeded(10.0)
    waits = []
    for passed in (0.0, 0.05, 0.25, 0.5, 0.75, 1.0, 2.0):
        made.weigh(10.0 + passed * SLOW_START)
        waits.append(made.wait)
    assert waits == [pytest.approx(n) for n in (10.0, 10.0, 4.0, 2.0, 4 / 3, 1.0, 1.0)]


def test_a_first_word_of_health_is_no_reason_for_a_slow_start() -> None:
    made = ReplicaState(REPLICA)
    made.probe_succeeded(10.0)
    assert made.wait == 1.0


def test_a_reload_does_not_begin_a_slow_start_again() -> None:
    made = opened(0.0)
    answered(made, 10.0, 1.0)
    made.weigh(10.0 + 2 * SLOW_START)
    made.adopt(replace(REPLICA, weight=2.0))
    assert made.wait == 0.5


# --- probes
def test_an_unknown_replica_may_be_tried_but_a_loading_or_dead_one_not() -> None:
    assert [state(health).routable(0.0) for health in (Health.UNKNOWN, Health.UP, Health.LOADING, Health.DOWN)] == [
        True, True, False, False,
    ]  # fmt: skip


def test_one_failed_probe_is_not_the_end() -> None:
    made = state()
    made.probe_failed(Health.DOWN, "timeout", 0.0)
    assert made.routable(0.0) and made.undecided
    made.probe_failed(Health.DOWN, "timeout", 0.0)
    assert not made.routable(0.0) and not made.undecided
    assert (made.health, made.detail) == (Health.DOWN, "timeout")


def test_one_good_probe_is_not_a_return() -> None:
    made = state(Health.DOWN)
    made.probe_succeeded(0.0)
    assert not made.routable(0.0) and made.undecided
    made.probe_failed(Health.DOWN, "x", 0.0)
    made.probe_succeeded(0.0)
    assert not made.routable(0.0)
    made.probe_succeeded(0.0)
    assert made.routable(0.0) and not made.undecided


def test_alternating_probes_do_not_flap() -> None:
    made = state()
    for _ in range(50):
        made.probe_failed(Health.DOWN, "x", 0.0)
        assert made.health is Health.UP
        made.probe_succeeded(0.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_health_path_that_answers_by_chance_soon_stops_changing_anything(seed: int) -> None:
    """An engine that flaps every second looks like that to somebody who asks every five."""
    random, made, changes, now = Random(seed), state(), 0, 0.0
    for _ in range(1000):
        now += 1.0 if made.undecided else 5.0
        before = made.health
        if random.random() < 0.5:
            made.probe_succeeded(now)
        else:
            made.probe_failed(Health.DOWN, "x", now)
        changes += made.health is not before
    assert changes <= 16


def test_one_that_stays_up_is_trusted_again() -> None:
    made, now = state(), 0.0
    for _ in range(6):  # it falls six times in short order
        for _ in range(2):
            made.probe_failed(Health.DOWN, "x", now)
        for _ in range(16):
            made.probe_succeeded(now)
        assert made.health is Health.UP
    for _ in range(2):
        made.probe_failed(Health.DOWN, "x", now + STEADY)
    for _ in range(2):
        made.probe_succeeded(now + STEADY)
    assert made.health is Health.UP


def test_what_never_was_up_is_down_at_once() -> None:
    for health in (Health.UNKNOWN, Health.LOADING):
        made = state(health)
        made.probe_failed(Health.DOWN, "refused", 0.0)
        assert made.health is Health.DOWN


def test_loading_takes_effect_at_once_and_ends_with_a_good_probe() -> None:
    made = state()
    made.probe_failed(Health.LOADING, "status 503", 0.0)
    assert not made.routable(0.0)
    made.probe_succeeded(0.0)
    assert made.routable(0.0)
    assert made.detail == ""


def test_busy_is_not_down() -> None:
    made = state()
    with running(made):
        for _ in range(10):
            made.probe_failed(Health.DOWN, "timeout", 0.0)
        assert made.health is Health.UP
        made.failed(0.0)  # but when its requests fail too, it is
        made.probe_failed(Health.DOWN, "timeout", 0.0)
        assert not made.routable(1.0)


def test_a_replica_that_comes_back_starts_without_debts() -> None:
    made = opened(0.0)
    refused(made, 5.0)
    for _ in range(2):
        made.probe_failed(Health.DOWN, "x", 6.0)
    for _ in range(2):
        made.probe_succeeded(7.0)
    assert made.routable(7.0) and made.failures == 0 and made.failing == 0
    for _ in range(3):
        refused(made, 7.0 + STEADY)
    assert made.paused_until == 7.0 + STEADY + FIRST_PAUSE


def test_good_probes_do_not_close_an_open_breaker() -> None:
    """Alive is not the same as able to answer."""
    made = opened(100.0)
    for _ in range(20):
        made.probe_succeeded(100.0)
    assert not made.routable(100.0)


def test_draining_gets_nothing_new() -> None:
    made = state()
    made.set_draining(True, 0.0)
    assert not made.routable(0.0) and not made.open
    made.set_draining(False, 0.0)
    assert made.routable(0.0)


# --- in words
def words(made: ReplicaState, now: float = 100.0) -> str:
    return made.reason(now)


def test_operators_are_told_why_a_replica_gets_requests_or_not() -> None:
    broken, resting, back, drained, loading = opened(98.0), state(), opened(90.0), state(), state()
    resting.asked_to_wait(99.0, 3.0)
    answered(back, 95.0)
    drained.set_draining(True, 0.0)
    loading.probe_failed(Health.LOADING, "status 503", 0.0)
    full = state()
    assert not full.begin() and not full.begin()
    told = state(), state(Health.UNKNOWN), broken, resting, back, drained, loading, full
    assert [words(made) for made in told] == [
        "takes requests", "takes requests, not probed yet", "set aside after failures, tried again in 3.0 s",
        "asked to be left alone for 2.0 s", "takes requests, slow start for 15.0 s", "drained by an operator",
        "loading: status 503", "full, 2 of 2 requests open",
    ]  # fmt: skip
    assert words(broken, 104.0) == "set aside after failures, the next request tries it"
    broken.begin()
    assert words(broken, 104.0) == "set aside after failures, one request is trying it"


@given(st.lists(STEPS, max_size=30), st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_reason_never_contradicts_the_choice(steps: list[tuple[str, float]], draining: bool) -> None:
    made, now = state(), 0.0
    made.set_draining(draining, now)
    for step, pause in steps:
        now += pause
        if step == "fail":
            refused(made, now)
        elif step == "ok":
            answered(made, now)
        elif step == "wait":
            made.asked_to_wait(now, pause)
        elif step == "drop":
            made.begin()
        elif step == "probe":
            made.probe_succeeded(now)
        else:
            made.probe_failed(Health.DOWN, "x", now)
        takes = made.reason(now).startswith("takes requests") or made.reason(now).endswith("next request tries it")
        assert takes == (made.routable(now) and made.has_room())


def test_a_choice_in_one_line() -> None:
    one, other = state(), state(id="m/vllm-2")
    other.begin()
    assert describe([one, other], ["m/vllm-1"], 0.0) == (
        "m/vllm-1 tried already, wait 1.000 s, 0 open; m/vllm-2 takes requests, wait 2.000 s, 1 open"
    )


# --- room
def test_room() -> None:
    made = state()
    with running(made):
        assert made.has_room()
        with running(made):
            assert not made.has_room()
    made.adopt(replace(REPLICA, max_inflight=None))
    made.inflight = 10_000
    assert made.has_room()


# --- the table
def test_a_reload_keeps_what_is_known_of_replicas_that_stay() -> None:
    table, other = LoadTable(), replace(REPLICA, id="m/vllm-2")
    table.adopt([REPLICA, other])
    kept, gone = table.of(REPLICA), table.of(other)
    kept.failed(1.0)
    kept.begin()
    changed = replace(REPLICA, weight=4.0, max_inflight=7)
    table.adopt([changed])
    assert table.of(changed) is kept
    assert (kept.replica.weight, kept.most, kept.failures, kept.inflight, kept.wait) == (4.0, 7, 1, 1, 0.5)
    assert list(table) == [kept]
    assert table.of(other) is not gone


def test_a_request_on_an_old_snapshot_still_finds_a_state() -> None:
    assert LoadTable().of(REPLICA).replica is REPLICA


def test_only_replicas_whose_engine_knows_the_operation_are_able() -> None:
    chat_only = replace(
        REPLICA, id="chat", backend=OpenAICompatible(paths={Operation.CHAT: "/v1/chat/completions"})
    )
    table, seen = LoadTable(), model(REPLICA, chat_only)
    table.adopt(seen.replicas)
    assert [made.replica.id for made in table.able(seen, Operation.CHAT)] == ["m/vllm-1", "chat"]
    assert [made.replica.id for made in table.able(seen, Operation.EMBEDDINGS)] == ["m/vllm-1"]
    assert table.able(seen, Operation.CHAT) is table.able(seen, Operation.CHAT)  # looked up once


def test_after_a_reload_the_able_ones_are_those_of_the_new_fleet() -> None:
    table, before = LoadTable(), model(REPLICA)
    table.adopt(before.replicas)
    old = table.able(before, Operation.CHAT)
    table.adopt([replace(REPLICA, id="new")])
    after = model(replace(REPLICA, id="new"))
    assert [made.replica.id for made in table.able(after, Operation.CHAT)] == ["new"]
    assert table.able(before, Operation.CHAT) is not old


def test_views_of_ever_new_models_do_not_pile_up() -> None:
    table = LoadTable()
    table.adopt([REPLICA])
    for _ in range(10_000):
        assert len(table.able(model(REPLICA), Operation.CHAT)) == 1
    assert len(table._able) <= 4096


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
    first.inflight, first.load = 2, EngineLoad(running=0, waiting=3, kv_used=0.25, prefix_hits=0.75)
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
        "sekisho_replica_prefix_hit_ratio": {("m", "m/vllm-1"): 0.75},
    }  # fmt: skip
