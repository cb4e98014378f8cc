"""The retry budget: second attempts are a share of the first ones, whatever the engines do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.retries import LEAST, MEMORY, RetryBudget

RATIO = 0.2


def after(requests: int, ratio: float = RATIO) -> RetryBudget:
    made = RetryBudget(ratio)
    for _ in range(requests):
        made.asked()
    return made


def taken(budget: RetryBudget) -> int:
    """How many retries it gives until it gives no more."""
    count = 0
    while count < 100_000 and budget.take():
        count += 1
    return count


def test_a_gateway_with_little_to_do_has_a_few_retries_all_the_same() -> None:
    assert taken(after(0)) == LEAST


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.2, 1.0])
def test_there_are_as_many_more_as_the_share_of_the_requests(ratio: float) -> None:
    assert taken(after(1000, ratio)) == LEAST + 1000 * ratio


def test_a_retry_that_is_refused_costs_nothing() -> None:
    budget = after(0)
    for _ in range(1000):
        budget.take()
    for _ in range(10):  # ten requests more are two retries more
        budget.asked()
    assert taken(budget) == 2


def test_what_is_left_is_what_can_be_taken() -> None:
    budget = after(100)
    for _ in range(7):
        assert budget.take()
    assert budget.left == 23 and taken(budget) == 23 and budget.left == 0


def test_spent_retries_come_back_with_time() -> None:
    budget = after(0)
    assert taken(budget) == LEAST
    for _ in range(int(4 * MEMORY)):
        budget.forget(0.25)
    assert taken(budget) == 6  # about two thirds after MEMORY seconds


def test_a_clock_that_stood_still_for_long_forgets_all_and_no_more() -> None:
    budget = after(1000)
    assert taken(budget) == 210
    budget.forget(1e9)
    assert taken(budget) == LEAST


def test_a_replica_that_dies_under_two_hundred_requests_a_second_is_no_storm() -> None:
    """All of its requests fail in the same moment, and each of them may be sent again."""
    budget = RetryBudget(RATIO)
    for _ in range(40):  # ten seconds
        for _ in range(50):
            budget.asked()
        budget.forget(0.25)
    assert taken(budget) >= 200  # as if each had been a second long, and all on one replica


STEPS = st.lists(
    st.one_of(st.just("ask"), st.just("take"), st.floats(0.01, 30.0), st.tuples(st.integers(1, 300), st.booleans())),
    max_size=80,
)


@given(STEPS, st.sampled_from([0.0, 0.2, 0.5]))
@settings(max_examples=200, deadline=None)
def test_in_any_order_retries_stay_within_the_share_and_ten_in_ten_seconds(steps: list[object], ratio: float) -> None:
    budget, asked, retries, seconds = RetryBudget(ratio), 0, 0, 0.0
    for step in steps:
        if isinstance(step, float):
            budget.forget(step)
            seconds += step
        elif isinstance(step, tuple):
            for _ in range(step[0]):
                if step[1]:
                    budget.asked()
                    asked += 1
                else:
                    retries += budget.take()
        elif step == "ask":
            budget.asked()
            asked += 1
        else:
            retries += budget.take()
        assert retries <= ratio * asked + LEAST * (1 + seconds / MEMORY) + 1e-6


def test_when_everything_fails_a_storm_stays_a_fifth_larger_than_its_requests() -> None:
    budget, asked, attempts = RetryBudget(RATIO), 0, 0
    for _ in range(4 * 60):
        for _ in range(50):
            budget.asked()
            asked += 1
            attempts += 1
            attempts += budget.take()  # and every request would like two more
            attempts += budget.take()
        budget.forget(0.25)
    assert 1.1 < attempts / asked <= 1.2 + 6 * LEAST / asked + LEAST / asked
