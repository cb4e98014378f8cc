"""What a limiter remembers over reloads and what not, and which of several limits a refusal names."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import LimitsConfig
from gateway.errors import RateLimited
from gateway.limits import SWEEP_FROM, Lease, Limiter
from gateway.people import compile_limits
from gateway.types import Limits

ALL = {"requests": "9/min", "tokens": "100/min", "token_budget": "500/day", "concurrency": 4}
NOON = 1_772_323_200.0 + 12 * 3600  # of a day in 2026


def limits_of(name: str, **config: object) -> Limits:
    return compile_limits(LimitsConfig.model_validate(config or ALL), "key", name)


def limiter_at_noon() -> Limiter:
    limiter = Limiter()
    limiter.clock.offset = NOON
    return limiter


def refused(act: Callable[[], object]) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        act()
    return caught.value


def known(limiter: Limiter) -> set[str]:
    """Names under which the limiter keeps anything."""
    gc.collect()
    kept = (limiter._counters, limiter._places, limiter._limits, limiter._most)
    return {name for names in kept for name in list(names)}


def reload(limiter: Limiter) -> None:
    """One after which nothing is left that does not count; otherwise that comes with the next thousand names."""
    limiter._sweep_at = 0
    limiter.forget_accounts()


# --- what is forgotten
def test_keys_that_come_and_go_leave_little_behind() -> None:
    """Each is used for a moment. What is known stays within twice what counts, and a fixed number."""
    limiter = limiter_at_noon()
    for hour in range(20):
        for number in range(200):
            limits = limits_of(f"t/key_{hour}_{number}", requests="9/min", tokens="100/min", concurrency=4)
            lease = limiter.admit(limits, hour * 3600.0)
            lease.reserve(50, hour * 3600.0)
            lease.close(hour * 3600.0)
        del lease
        limiter.forget_accounts()
        assert len(known(limiter)) <= SWEEP_FROM + 2 * 600, hour


def test_what_counts_is_kept_however_many_reloads_there_are() -> None:
    limiter = limiter_at_noon()
    lease = limiter.admit(limits_of("t/k"), 0.0)
    lease.reserve(90, 0.0)
    for second in range(1, 4):
        reload(limiter)
        limits = limits_of("t/k")
        other = limiter.admit(limits, float(second))
        assert "90 used" in refused(lambda other=other, second=second: other.reserve(20, float(second))).message  # type: ignore[misc]
        other.close(float(second))
        assert limiter.running("key:t/k") == 1
    lease.close(5.0)
    assert limiter.running("key:t/k") == 0


def test_a_budget_that_an_earlier_process_has_spent_is_kept_before_anybody_asks_for_it() -> None:
    limiter = limiter_at_noon()
    limits = limits_of("t/k", token_budget="500/day")
    ((name, limit),) = limits.tokens
    limiter.seed(name, limit, 480, 5.0)
    reload(limiter)
    gc.collect()
    again = limits_of("t/k", token_budget="500/day")
    assert "480 used" in refused(lambda: limiter.admit(again, 6.0).reserve(21, 6.0)).message
    gc.collect()  # the refusal's traceback has seen the counter
    limiter.clock.offset += 86400  # what a day has used is nothing to the next
    limiter.admit(limits, 7.0)
    reload(limiter)
    assert known(limiter) == set()


def test_a_late_word_on_an_earlier_process_brings_no_old_limit_back() -> None:
    """The database may take its time to answer, and the limit be another one by then."""
    limiter = limiter_at_noon()
    old, new = limits_of("t/k", token_budget="500/day"), limits_of("t/k", token_budget="100/day")
    limiter.admit(new, 0.0)
    ((name, limit),) = old.tokens
    limiter.seed(name, limit, 60, 1.0)
    assert "100 tokens per day, 60 used" in refused(lambda: limiter.admit(new, 2.0).reserve(50, 2.0)).message


def test_a_request_that_waits_for_its_body_over_a_reload_spends_from_the_same_books() -> None:
    """Nothing of it counts yet when the limiter forgets what nobody uses."""
    limiter = limiter_at_noon()
    limits = limits_of("t/k", tokens="100/min")
    early = limiter.admit(limits, 0.0)
    reload(limiter)
    late = limiter.admit(limits_of("t/k", tokens="100/min"), 1.0)
    early.reserve(80, 2.0)
    assert "80 used" in refused(lambda: late.reserve(30, 2.0)).message


class Twin:
    """Does the same to a limiter that is reloaded and to one that is not."""

    def __init__(self) -> None:
        self.limiters = limiter_at_noon(), limiter_at_noon()
        self.leases: list[tuple[Lease, Lease]] = []
        self.now = 0.0

    def admit(self, limits: Limits, cost: int) -> None:
        words = []
        made = []
        for limiter in self.limiters:
            try:
                lease = limiter.admit(limits, self.now)
            except RateLimited as error:
                words.append(error.message)
                continue
            made.append(lease)
            try:
                lease.reserve(cost, self.now)
                words.append("")
            except RateLimited as error:
                words.append(error.message)
        assert words[0] == words[1]
        if made:
            self.leases.append((made[0], made[1]))

    def end(self, index: int, used: int) -> None:
        if self.leases:
            for lease in self.leases.pop(index % len(self.leases)):
                lease.settle(used, self.now)
                lease.close(self.now)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, 1), st.integers(1, 60)),
        st.tuples(st.just("end"), st.integers(0, 5), st.integers(0, 80)),
        st.tuples(st.just("wait"), st.sampled_from([0, 1, 30, 61, 90000]), st.just(0)),
        st.tuples(st.just("reload"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(plan=STEPS)
@settings(max_examples=200, deadline=None)
def test_reloads_at_any_time_change_no_decision(plan: list[tuple[str, int, int]]) -> None:
    twin, people = Twin(), [limits_of("t/a"), limits_of("t/b")]
    for what, number, cost in plan:
        if what == "admit":
            twin.admit(people[number], cost)
        elif what == "end":
            twin.end(number, cost)
        elif what == "wait":
            twin.now += number
        else:
            reload(twin.limiters[0])


# --- which limit a refusal names
def test_of_several_full_limits_the_one_that_lasts_longest_is_named() -> None:
    """Whoever comes back when he was told to is not refused by the next one."""
    limiter = limiter_at_noon()
    limits = limits_of("t/k", requests=["1/s", "2/min", "3/hour"])
    limiter.admit(limits, 0.0)
    limiter.admit(limits, 1.5)
    error = refused(lambda: limiter.admit(limits, 1.6))
    assert "2 requests per minute" in error.message and error.retry_after == pytest.approx(59.4)
    limiter.admit(limits, 1.6 + 59.4)
    error = refused(lambda: limiter.admit(limits, 61.1))
    assert "3 requests per hour" in error.message and error.retry_after == pytest.approx(3660 - 61.1)


def test_a_request_that_never_fits_is_told_so_also_while_another_limit_is_full() -> None:
    limiter = limiter_at_noon()
    limits = limits_of("t/k", tokens=["100/s", "60/min"])
    limiter.admit(limits, 0.0).reserve(50, 0.0)
    error = refused(lambda: limiter.admit(limits, 0.1).reserve(70, 0.1))
    assert error.code == "request_too_large_for_limit" and error.retry_after is None


SPENT = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 40)), max_size=12)


@given(spent=SPENT, cost=st.integers(1, 60), counts=st.tuples(*[st.integers(20, 90)] * 3))
@settings(max_examples=200, deadline=None)
def test_whoever_waits_as_long_as_he_is_told_fits(
    spent: list[tuple[float, int]], cost: int, counts: tuple[int, int, int]
) -> None:
    limiter = limiter_at_noon()
    second, minute, day = counts
    limits = limits_of("t/k", tokens=[f"{second}/s", f"{minute}/min"], token_budget=[f"{day}/day", f"{day * 3}/month"])
    now = 0.0
    for pause, tokens in spent:
        now += pause
        try:
            limiter.admit(limits, now).reserve(tokens, now)
        except RateLimited:
            continue
    try:
        limiter.admit(limits, now).reserve(cost, now)
    except RateLimited as error:
        if error.code == "request_too_large_for_limit":
            assert cost > min(counts)
        else:
            assert error.retry_after is not None
            later = now + error.retry_after + 0.001
            limiter.admit(limits, later).reserve(cost, later)


def test_headers_of_a_refusal_speak_of_the_limit_that_it_names() -> None:
    limiter = limiter_at_noon()
    limits = limits_of("t/k", requests=["1/s", "1/min"])
    lease = limiter.admit(limits, 0.0)
    assert "per minute" in refused(lambda: limiter.admit(limits, 0.1)).message
    for lines in (limiter.headers(limits, 0.1), lease.headers(0.1)):
        shown = dict(line.split(": ") for line in lines.decode().splitlines())
        assert shown["x-ratelimit-remaining-requests"] == "0" and shown["x-ratelimit-reset-requests"] == "1m1s"
