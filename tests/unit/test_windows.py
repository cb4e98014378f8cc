"""Counters for every order of requests and every clock: sliding windows, and budgets of a calendar day or month."""

import calendar
import math
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.types import Limit
from gateway.windows import SLICES, Budget, WallClock, Window, duration, period_of

DAY = 86400.0
SECONDS = st.sampled_from([1, 7, 60, 3600, 86400])
START = st.sampled_from([0.0, 0.5, 1234.567, 1e6, 1.7e9])
PERIODS = st.sampled_from(["day", "month"])
MOMENTS = st.floats(0, 4_102_444_800.0)  # 1970 to 2100, the year 2000 and many leap years among them


def moment(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


# --- sliding windows
@given(SECONDS, START, st.integers(1, 20), st.lists(st.tuples(st.floats(0, 0.7), st.integers(1, 6)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_no_stretch_of_the_window_admits_more_than_the_limit(
    seconds: int, start: float, count: int, steps: list[tuple[float, int]]
) -> None:
    window, now = Window(Limit(count, seconds, "tokens", "key")), start
    admitted: list[tuple[float, int]] = []
    for pause, cost in steps:
        now += pause * seconds
        if window.has_room(cost, now):
            window.add(cost)
            admitted.append((now, cost))
    for first, _ in admitted:
        assert sum(cost for at, cost in admitted if first <= at < first + seconds) <= count


@given(
    SECONDS,
    START,
    st.integers(1, 20),
    st.lists(st.tuples(st.floats(0, 0.4), st.integers(1, 8)), max_size=30),
    st.integers(1, 8),
)
@settings(max_examples=150, deadline=None)
def test_the_wait_for_a_window_is_honest(
    seconds: int, start: float, count: int, steps: list[tuple[float, int]], cost: int
) -> None:
    """After the time a refusal names it fits; well before it does not."""
    window, now = Window(Limit(count, seconds, "tokens", "key")), start
    for pause, amount in steps:
        now += pause * seconds
        window.advance(now)
        if window.has_room(amount, now):
            window.add(amount)
    wait = window.wait(cost, now)
    assert 0 <= wait <= seconds * (SLICES + 1) / SLICES * (1 + 1e-9)
    if cost > count:
        return
    assert (wait == 0) == window.has_room(cost, now)
    if wait > 0.01 * seconds:
        assert not window.has_room(cost, now + wait - 0.005 * seconds)
    assert window.has_room(cost, now + wait + 1e-6 * seconds)


@given(SECONDS, START, st.lists(st.tuples(st.floats(0, 0.4), st.integers(0, 8)), max_size=30))
@settings(max_examples=100, deadline=None)
def test_the_reset_of_a_window_is_when_nothing_counts_any_more(
    seconds: int, start: float, steps: list[tuple[float, int]]
) -> None:
    window, now = Window(Limit(100, seconds, "tokens", "key")), start
    for pause, amount in steps:
        now += pause * seconds
        window.advance(now)
        window.add(amount)
    reset = window.reset(now)
    assert (reset > 0) == (window.used > 0)
    window.advance(now + reset + 1e-6 * seconds)
    assert window.used == 0


def test_a_steady_clock_that_steps_back_changes_nothing() -> None:
    window = Window(Limit(10, 60, "tokens", "key"))
    window.advance(100.0)
    window.add(4)
    window.advance(50.0)
    assert window.used == 4
    window.advance(162.0)
    assert window.used == 0


# --- the calendar
@given(PERIODS, MOMENTS)
@settings(max_examples=300, deadline=None)
def test_periods_hold_their_moment_and_follow_each_other_without_a_gap(period: str, when: float) -> None:
    begin, end = period_of(period, when)
    assert begin <= when < end
    assert begin % DAY == end % DAY == 0
    assert period_of(period, begin) == period_of(period, end - 0.001) == (begin, end)
    assert period_of(period, end)[0] == end


@given(MOMENTS)
@settings(max_examples=200, deadline=None)
def test_a_month_is_as_long_as_the_calendar_says_and_begins_with_its_first(when: float) -> None:
    begin, end = period_of("month", when)
    first = datetime.fromtimestamp(begin, UTC)
    assert first.day == 1
    assert (end - begin) / DAY == calendar.monthrange(first.year, first.month)[1]


@pytest.mark.parametrize(
    ("period", "when", "begin", "end"),
    [
        ("day", "2024-02-28T23:59:59", "2024-02-28", "2024-02-29"),
        ("day", "2024-02-29T00:00:00", "2024-02-29", "2024-03-01"),
        ("month", "2024-02-29T12:00:00", "2024-02-01", "2024-03-01"),
        ("month", "2023-02-28T23:59:59", "2023-02-01", "2023-03-01"),
        ("month", "2100-02-28T12:00:00", "2100-02-01", "2100-03-01"),  # not a leap year
        ("month", "2025-12-31T23:59:59", "2025-12-01", "2026-01-01"),
        ("month", "2026-01-31T00:00:00", "2026-01-01", "2026-02-01"),
    ],
)
def test_periods_are_those_of_utc(period: str, when: str, begin: str, end: str) -> None:
    assert period_of(period, moment(when)) == (moment(begin), moment(end))


# --- budgets
def budget(count: int, period: str = "day", begins_at: str | float = "2026-03-10T12:00:00") -> Budget:
    """One whose steady clock shows 0 at that date."""
    return budget_by(clock(begins_at), count, period)


def budget_by(clock: WallClock, count: int, period: str = "day") -> Budget:
    return Budget(Limit(count, 86400, "tokens", "tenant", period), clock)


def clock(begins_at: str | float) -> WallClock:
    return WallClock(moment(begins_at) if isinstance(begins_at, str) else begins_at)


PAUSES = st.one_of(st.floats(0, 3600), st.floats(0, 3 * DAY), st.floats(0, 40 * DAY))
# The machine's clock is set now and then, by less than a day; how far off it is then.
ERRORS = st.one_of(st.just(0.0), st.floats(-DAY * 0.45, DAY * 0.45))


@given(PERIODS, MOMENTS, st.integers(1, 20), st.lists(st.tuples(PAUSES, ERRORS, st.integers(1, 8)), max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_period_admits_more_than_the_budget_however_the_clock_is_set(
    period: str, start: float, count: int, steps: list[tuple[float, float, int]]
) -> None:
    """A period lasts until the clock first shows the next one: setting it back begins none a second time."""
    wall = clock(start)
    counter = budget_by(wall, count, period)
    now = latest = 0.0
    admitted: dict[float, int] = {}
    for pause, error, cost in steps:
        now += pause
        wall.offset = start + max(error, -start)
        latest = max(latest, now + wall.offset)
        if counter.has_room(cost, now):
            counter.add(cost)
            begin, _ = period_of(period, latest)
            admitted[begin] = admitted.get(begin, 0) + cost
    assert all(total <= count for total in admitted.values())


@given(
    PERIODS,
    MOMENTS,
    st.lists(st.tuples(PAUSES, ERRORS, st.booleans(), st.integers(0, 9), st.integers(0, 99)), max_size=60),
)
@settings(max_examples=200, deadline=None)
def test_corrections_reach_the_period_of_their_booking_or_none(
    period: str, start: float, steps: list[tuple[float, float, bool, int, int]]
) -> None:
    wall = clock(start)
    counter = budget_by(wall, 10**9, period)
    now, latest = 0.0, 0.0
    booked: list[tuple[float, float, int]] = []  # when, in which period, how much
    expected: dict[float, int] = {}
    for pause, error, book, amount, pick in steps:
        now += pause + 0.001
        wall.offset = start + max(error, -start)
        latest = max(latest, now + wall.offset)
        current, _ = period_of(period, latest)
        if book or not booked:
            assert counter.has_room(amount, now)
            counter.add(amount)
            booked.append((now, current, amount))
            expected[current] = expected.get(current, 0) + amount
        else:
            at, begin, reserved = booked.pop(pick % len(booked))
            counter.correct(at, amount - reserved, now)
            expected[begin] += amount - reserved
        counter.advance(now)
        assert counter.used == expected.get(current, 0) >= 0


@given(PERIODS, MOMENTS, st.integers(1, 20), st.lists(st.tuples(PAUSES, st.integers(1, 8)), max_size=20))
@settings(max_examples=200, deadline=None)
def test_the_wait_for_a_budget_and_its_reset_are_honest(
    period: str, start: float, count: int, steps: list[tuple[float, int]]
) -> None:
    counter, now = budget(count, period, start), 0.0
    counter.advance(now)
    for pause, cost in steps:
        now += pause
        if counter.has_room(cost, now):
            counter.add(cost)
    cost = min(steps[-1][1] if steps else 1, count)
    wait, reset = counter.wait(cost, now), counter.reset(now)
    assert now + start + reset == pytest.approx(period_of(period, now + start)[1], abs=0.01)
    assert wait in (0.0, reset)
    assert (wait == 0) == counter.has_room(cost, now)
    if wait > 1:
        assert not counter.has_room(cost, now + wait - 0.5)
    assert counter.has_room(cost, now + wait + 0.01)
    counter.advance(now + reset + 0.01)
    assert counter.used == 0 and counter.remaining() == count


def test_a_budget_begins_anew_at_midnight_and_not_a_day_after_it_was_spent() -> None:
    counter = budget(100, "day", "2026-03-10T23:59:00")
    assert counter.has_room(100, 0.0)
    counter.add(100)
    assert not counter.has_room(1, 59.9)
    assert counter.wait(1, 59.0) == pytest.approx(1.0)
    assert counter.has_room(100, 60.0)


def test_a_budget_of_a_month_ends_with_the_month() -> None:
    for begins_at, left in (("2024-02-28T12:00:00", 1.5), ("2023-02-28T12:00:00", 0.5), ("2026-12-30T00:00:00", 2.0)):
        counter = budget(10, "month", begins_at)
        counter.advance(0.0)
        counter.add(10)
        assert counter.reset(0.0) == pytest.approx(left * DAY)
        assert not counter.has_room(1, left * DAY - 1)
        assert counter.has_room(10, left * DAY + 1)


def test_a_clock_that_was_far_ahead_does_not_block_a_budget_until_the_day_it_showed() -> None:
    wall = clock("2027-06-01T12:00:00")
    counter = budget_by(wall, 10)
    assert counter.has_room(6, 0.0)
    counter.add(6)
    wall.offset = moment("2026-03-10T12:00:00")  # set right
    assert not counter.has_room(5, 1.0)  # what was spent stays spent
    assert counter.has_room(4, 1.0)
    assert counter.reset(1.0) == pytest.approx(DAY / 2 - 1)
    assert counter.has_room(10, DAY / 2)


def test_a_clock_set_back_over_midnight_gives_the_budget_back_once_only() -> None:
    wall = clock("2026-03-11T00:00:01")
    counter = budget_by(wall, 10)
    counter.advance(0.0)
    counter.add(10)
    wall.offset -= 2.0  # 23:59:59 of the day before
    assert not counter.has_room(1, 0.5)
    assert counter.wait(1, 0.5) == pytest.approx(DAY + 0.5)
    assert not counter.has_room(1, 10.0)  # past midnight for the second time
    assert counter.has_room(10, DAY + 1.0)


def test_a_request_that_began_days_ago_cannot_turn_the_calendar_back() -> None:
    """A body may take days to arrive, and its tokens are set aside at the time the request began."""
    counter = budget(10)
    counter.advance(5 * DAY)
    counter.add(10)
    assert not counter.has_room(1, 0.0)
    assert not counter.has_room(1, 5 * DAY + 1)


def test_a_changed_budget_keeps_what_was_spent() -> None:
    counter = budget(10)
    counter.advance(0.0)
    counter.add(8)
    counter.limit = Limit(20, 86400, "tokens", "tenant", "day")
    assert (counter.remaining(), counter.has_room(12, 1.0), counter.has_room(13, 1.0)) == (12, True, False)
    counter.limit = Limit(5, 86400, "tokens", "tenant", "day")
    assert counter.remaining() == 0
    assert b"x-ratelimit-limit-tokens: 5\r\n" in counter.headers(1.0)


def test_headers_of_a_budget_name_the_time_until_the_next_period() -> None:
    counter = budget(1000, "day", "2026-03-10T22:30:00")
    counter.advance(0.0)
    counter.add(1)
    assert counter.headers(0.0).decode().splitlines() == [
        "x-ratelimit-limit-tokens: 1000", "x-ratelimit-remaining-tokens: 999", "x-ratelimit-reset-tokens: 1h30m0s",
    ]  # fmt: skip


# --- durations
@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.12, "120ms"), (0.0001, "1ms"), (1, "1s"), (1.01, "2s"), (59.94, "1m0s"), (60, "1m0s"),
     (359.2, "6m0s"), (3600, "1h0m0s"), (86399.5, "24h0m0s"), (31 * DAY, "744h0m0s")],
)  # fmt: skip
def test_durations_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds).decode() == text


@given(st.floats(0, 3e6))
@settings(max_examples=100, deadline=None)
def test_a_duration_is_never_shorter_than_the_truth(seconds: float) -> None:
    text = duration(seconds).decode()
    if text.endswith("ms"):
        value = int(text[:-2]) / 1000
    else:
        hours, _, rest = text.rpartition("h")
        minutes, _, rest = rest.rpartition("m")
        value = int(hours or 0) * 3600 + int(minutes or 0) * 60 + float(rest[:-1])
    assert seconds <= value <= math.ceil(seconds)
