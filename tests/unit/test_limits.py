"""Windows, leases and headers, for every order of requests and every clock."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import RateLimited
from gateway.limits import SLICES, Lease, Limiter, Window, duration
from gateway.types import Limit, Limits

SECONDS = st.sampled_from([1, 7, 60, 3600, 86400])
START = st.sampled_from([0.0, 0.5, 1234.567, 1e6, 1.7e9])


def tokens(count: int, seconds: int = 60, key: str = "key:t/k:tokens") -> Limits:
    return Limits(tokens=((key, Limit(count, seconds, "tokens", "key")),))


def requests(count: int, seconds: int = 60, key: str = "key:t/k:requests") -> Limits:
    return Limits(requests=((key, Limit(count, seconds, "requests", "key")),))


def used(limiter: Limiter, limits: Limits, now: float) -> int:
    (name,) = [name for name, _ in (*limits.tokens, *limits.requests)]
    return spent(limiter, name, now)


def spent(limiter: Limiter, name: str, now: float) -> int:
    """What counts under a name now; a name nobody has used yet has spent nothing."""
    window = limiter._windows.get(name)
    if window is None:
        return 0
    window.advance(now)
    return window.used


def refused(act: Callable[[], object]) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        act()
    assert caught.value.status == 429
    return caught.value


@given(SECONDS, START, st.integers(1, 20), st.lists(st.tuples(st.floats(0, 0.7), st.integers(1, 6)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_no_stretch_of_the_window_admits_more_than_the_limit(
    seconds: int, start: float, count: int, steps: list[tuple[float, int]]
) -> None:
    limiter, limits, now = Limiter(), tokens(count, seconds), start
    admitted: list[tuple[float, int]] = []
    for pause, cost in steps:
        now += pause * seconds
        before = used(limiter, limits, now)
        lease = limiter.admit(limits, now)
        try:
            lease.reserve(cost, now)
        except RateLimited:
            assert used(limiter, limits, now) == before  # a refusal spends nothing
        else:
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
def test_wait_is_honest(seconds: int, start: float, count: int, steps: list[tuple[float, int]], cost: int) -> None:
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
def test_reset_is_when_nothing_counts_any_more(seconds: int, start: float, steps: list[tuple[float, int]]) -> None:
    window, now = Window(Limit(100, seconds, "tokens", "key")), start
    for pause, amount in steps:
        now += pause * seconds
        window.advance(now)
        window.add(amount)
    reset = window.reset(now)
    assert (reset > 0) == (window.used > 0)
    window.advance(now + reset + 1e-6 * seconds)
    assert window.used == 0


def test_spent_room_comes_back_after_the_window_and_one_slice() -> None:
    limiter, limits = Limiter(), tokens(10)
    limiter.admit(limits, 0.5).reserve(10, 0.5)
    assert used(limiter, limits, 60.4) == 10
    assert used(limiter, limits, 61.0) == 0


def test_a_clock_that_steps_back_changes_nothing() -> None:
    window = Window(Limit(10, 60, "tokens", "key"))
    window.advance(100.0)
    window.add(4)
    window.advance(50.0)
    assert window.used == 4
    window.advance(162.0)
    assert window.used == 0


# --- reserve and settle
class Books:
    """Leases over a time, with what should be booked kept beside."""

    def __init__(self) -> None:
        self.limiter, self.limits = Limiter(), tokens(10**9, 86400)
        self.open: list[tuple[Lease, int]] = []
        self.expected = 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["open", "settle", "close", "reload", "both"]), st.integers(0, 500)), max_size=60
    )
)
@settings(max_examples=150, deadline=None)
def test_reserved_and_settled_balance_to_the_token(steps: list[tuple[str, int]]) -> None:
    """Whatever the order, and over reloads: what counts is what is reserved now plus what was really used."""
    books = Books()
    for now, (step, amount) in enumerate(steps):
        if step == "reload":
            books.limits = tokens(10**9 + amount, 86400)
        elif step == "open":
            lease = books.limiter.admit(books.limits, now)
            lease.reserve(amount, now)
            books.open.append((lease, amount))
            books.expected += amount
        elif books.open:
            lease, reserved = books.open.pop(amount % len(books.open))
            if step == "close":
                lease.close(now)
                books.expected -= reserved
            else:
                lease.settle(amount, now)
                books.expected += amount - reserved
                if step == "both":
                    lease.settle(amount + 1, now)  # only the first counts
                    lease.close(now)
        assert used(books.limiter, books.limits, now) == books.expected
    later = len(steps) + 90_000
    assert used(books.limiter, books.limits, later) == 0
    assert used(books.limiter, books.limits, later + 90_000) == 0


def test_settling_after_the_slice_has_left_changes_nothing() -> None:
    limiter, limits = Limiter(), tokens(100)
    lease = limiter.admit(limits, 0.0)
    lease.reserve(50, 0.0)
    lease.settle(10, 1000.0)
    assert used(limiter, limits, 1000.0) == 0


def test_settling_counts_as_long_as_the_slice_does() -> None:
    limiter, limits = Limiter(), tokens(100)
    lease = limiter.admit(limits, 0.5)
    lease.reserve(50, 0.5)
    lease.settle(10, 60.5)
    assert used(limiter, limits, 60.5) == 10
    assert used(limiter, limits, 61.0) == 0


def test_an_answer_longer_than_reserved_is_charged_in_full() -> None:
    limiter, limits = Limiter(), tokens(100)
    lease = limiter.admit(limits, 0.0)
    lease.reserve(50, 0.0)
    lease.settle(130, 1.0)
    assert used(limiter, limits, 1.0) == 130
    refused(lambda: limiter.admit(limits, 2.0).reserve(1, 2.0))


def test_of_twenty_at_the_same_instant_only_those_that_fit_are_admitted() -> None:
    limiter, limits, admitted = Limiter(), tokens(500), 0
    for _ in range(20):
        lease = limiter.admit(limits, 5.0)
        try:
            lease.reserve(175, 5.0)
        except RateLimited:
            continue
        admitted += 1
    assert admitted == 2
    assert used(limiter, limits, 5.0) == 350


def test_small_requests_far_below_the_limit_are_never_refused() -> None:
    limiter, limits = Limiter(), tokens(1000)
    for i in range(200):
        lease = limiter.admit(limits, i * 0.01)
        lease.reserve(700, i * 0.01)
        lease.settle((0, 1, 2)[i % 3], i * 0.01)
        lease.close(i * 0.01)
    assert used(limiter, limits, 2.0) == sum((0, 1, 2)[i % 3] for i in range(200))


def test_every_window_has_to_fit_before_any_is_spent() -> None:
    limiter = Limiter()
    wide, narrow = Limit(1000, 3600, "tokens", "tenant"), Limit(10, 60, "tokens", "key")
    limits = Limits(tokens=(("a", wide), ("b", narrow)))
    refused(lambda: limiter.admit(limits, 0.0).reserve(11, 0.0))
    assert spent(limiter, "a", 0.0) == 0
    limiter.admit(limits, 0.0).reserve(10, 0.0)
    assert (spent(limiter, "a", 0.0), spent(limiter, "b", 0.0)) == (10, 10)


def test_tenants_and_keys_do_not_share_unless_named_so() -> None:
    limiter = Limiter()
    limiter.admit(requests(1, key="key:t/a:requests"), 0.0)
    limiter.admit(requests(1, key="key:t/b:requests"), 0.0)
    refused(lambda: limiter.admit(requests(1, key="key:t/a:requests"), 0.0))


# --- reload
def test_a_reload_keeps_what_was_spent() -> None:
    limiter = Limiter()
    for _ in range(5):
        limiter.admit(requests(5), 10.0)
    assert used(limiter, requests(5), 11.0) == 5
    limiter.admit(requests(6), 11.0)
    refused(lambda: limiter.admit(requests(6), 11.0))
    refused(lambda: limiter.admit(requests(3), 11.0))
    assert b"reset-requests: 0ms" not in limiter.admit(requests(9), 12.0).headers(12.0)
    assert used(limiter, requests(9), 80.0) == 0


def test_a_request_that_runs_over_a_reload_settles_in_the_same_books() -> None:
    limiter = Limiter()
    lease = limiter.admit(tokens(1000), 0.0)
    lease.reserve(1000, 0.0)
    limiter.admit(tokens(1000), 1.0)
    assert used(limiter, tokens(1000), 1.0) == 1000
    lease.settle(100, 2.0)
    assert used(limiter, tokens(1000), 2.0) == 100
    assert used(limiter, tokens(1000), 1000.0) == 0


def test_a_refused_request_of_before_a_reload_does_not_bring_the_old_limits_back() -> None:
    limiter, old, new = Limiter(), requests(100), requests(2)
    limiter.admit(old, 0.0)
    limiter.forget_accounts()
    limiter.admit(new, 1.0)
    limiter.headers(old, 1.0)
    refused(lambda: limiter.admit(new, 1.0))


def test_headers_of_a_refusal_say_what_is_left() -> None:
    limiter, limits = Limiter(), requests(1)
    limiter.admit(limits, 0.0)
    refused(lambda: limiter.admit(limits, 1.0))
    assert b"x-ratelimit-remaining-requests: 0\r\n" in limiter.headers(limits, 1.0)
    assert b"x-ratelimit-remaining-requests: 1\r\n" in limiter.headers(limits, 100.0)


# --- concurrency
@given(st.integers(1, 4), st.lists(st.integers(0, 9), max_size=60))
@settings(max_examples=100, deadline=None)
def test_concurrency_is_exact_and_returns_to_zero(most: int, steps: list[int]) -> None:
    limiter = Limiter()
    limits = Limits(concurrency=(("key:t/k", most), ("tenant:t", most + 1)))
    leases: list[Lease] = []
    for step in steps:
        if step < 5:
            if len(leases) < most:
                leases.append(limiter.admit(limits, 0.0))
            else:
                assert refused(lambda: limiter.admit(limits, 0.0)).retry_after == 1
        elif leases:
            leases.pop(step % len(leases)).close(0.0)
        assert limiter.running("key:t/k") == limiter.running("tenant:t") == len(leases)
    for lease in leases:
        lease.close(0.0)
    assert limiter.running("key:t/k") == limiter.running("tenant:t") == 0


def test_a_refusal_by_rate_takes_no_place_and_one_by_concurrency_no_request() -> None:
    limiter = Limiter()
    limits = Limits(requests=requests(1).requests, concurrency=(("key:t/k", 1),))
    lease = limiter.admit(limits, 0.0)
    refused(lambda: limiter.admit(limits, 0.0))
    assert used(limiter, requests(1), 0.0) == 1
    lease.close(0.0)
    refused(lambda: limiter.admit(limits, 0.0))
    assert limiter.running("key:t/k") == 0


def test_a_refused_reservation_still_has_to_be_closed_and_frees_its_place() -> None:
    limiter = Limiter()
    limits = Limits(tokens=tokens(5).tokens, concurrency=(("key:t/k", 1),))
    for _ in range(3):
        lease = limiter.admit(limits, 0.0)
        refused(lambda lease=lease: lease.reserve(6, 0.0))  # type: ignore[misc]
        lease.close(0.0)
    assert limiter.running("key:t/k") == 0
    assert used(limiter, tokens(5), 0.0) == 0


# --- what the caller is told
def test_a_refusal_says_how_long() -> None:
    limiter = Limiter()
    limiter.admit(requests(1), 37.0)
    error = refused(lambda: limiter.admit(requests(1), 75.0))
    assert error.retry_after == pytest.approx(23.0)
    assert "1 requests per minute" in error.message
    assert "key" in error.message


def test_a_request_that_never_fits_is_told_so() -> None:
    error = refused(lambda: Limiter().admit(tokens(10), 0.0).reserve(11, 0.0))
    assert error.code == "request_too_large_for_limit"
    assert error.retry_after is None


def headers(lease: Lease, now: float) -> dict[str, str]:
    return dict(line.split(": ") for line in lease.headers(now).decode().splitlines())


def test_headers_speak_of_the_tightest_limit() -> None:
    limiter = Limiter()
    limits = Limits(
        requests=(("a", Limit(100, 3600, "requests", "tenant")), ("b", Limit(10, 60, "requests", "key"))),
        tokens=(("c", Limit(1000, 60, "tokens", "tenant")), ("d", Limit(5000, 86400, "tokens", "tenant"))),
    )
    lease = limiter.admit(limits, 0.0)
    lease.reserve(400, 0.0)
    assert headers(lease, 0.0) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "1m1s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "600",
        "x-ratelimit-reset-tokens": "1m1s",
    }


def test_headers_never_go_below_zero_and_are_absent_without_a_limit() -> None:
    limiter = Limiter()
    lease = limiter.admit(tokens(10), 0.0)
    lease.reserve(10, 0.0)
    lease.settle(50, 0.0)
    assert headers(lease, 0.0)["x-ratelimit-remaining-tokens"] == "0"
    assert limiter.admit(Limits(concurrency=(("k", 5),)), 0.0).headers(0.0) == b""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.12, "120ms"), (0.0001, "1ms"), (1, "1s"), (1.01, "2s"), (59.94, "1m0s"), (60, "1m0s"),
     (359.2, "6m0s"), (3600, "1h0m0s"), (86399.5, "24h0m0s")],
)  # fmt: skip
def test_durations_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds).decode() == text


@given(st.floats(0, 1e6))
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
