"""Leases over several counters: all or nothing, to the token, over reloads, and what a caller is told."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import LimitsConfig
from gateway.errors import QuotaExceeded, RateLimited, body
from gateway.limits import Lease, Limiter, LocalPlace, Place
from gateway.people import compile_limits
from gateway.types import Limit, Limits
from gateway.windows import Counter, Window

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
    window = limiter._counters.get(name)
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


def test_spent_room_comes_back_after_the_window_and_one_slice() -> None:
    limiter, limits = Limiter(), tokens(10)
    limiter.admit(limits, 0.5).reserve(10, 0.5)
    assert used(limiter, limits, 60.4) == 10
    assert used(limiter, limits, 61.0) == 0


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


# --- several windows, budgets and a model's own limits at once
COUNTS = st.integers(1, 12)
OPTIONAL = st.none() | COUNTS


def rules(scope: str, name: str, numbers: Sequence[int | None]) -> Limits:
    """Limits of every kind. Their windows are long: nothing leaves them while a test lasts."""
    hour, day, tokens_hour, tokens_day, budget_day, budget_month, concurrency = numbers
    return compile_limits(
        LimitsConfig.model_validate({
            "requests": [f"{count}/{window}" for count, window in ((hour, "hour"), (day, "day")) if count],
            "tokens": [f"{c}0/{window}" for c, window in ((tokens_hour, "hour"), (tokens_day, "day")) if c],
            "token_budget": [f"{c}0/{period}" for c, period in ((budget_day, "day"), (budget_month, "month")) if c],
            "concurrency": concurrency,
        }),
        scope,
        name,
    )  # fmt: skip


NUMBERS = st.tuples(OPTIONAL, OPTIONAL, OPTIONAL, OPTIONAL, OPTIONAL, OPTIONAL, OPTIONAL)


@dataclass
class Running:
    """A request between its admission and its end."""

    lease: Lease
    holds: list[Limits]  # whose places it has taken
    reserved: dict[str, int] = field(default_factory=dict)  # by counter


class House:
    """A limiter, and beside it what every counter has to show."""

    def __init__(self, caller: Limits, model: Limits) -> None:
        self.limiter, self.caller, self.model = Limiter(), caller, model
        self.limiter.clock.offset = 1.7e9
        self.running: list[Running] = []
        self.expected = {name: 0 for limits in (caller, model) for name, _ in (*limits.requests, *limits.tokens)}

    def open(self, cost: int, now: float) -> None:
        """As the pipeline does it: the caller's limits, then the model's, joined; given back when one refuses."""
        request = self._admitted(self.caller, now)
        if request is None:
            return
        if self._reserved(request, request.lease, self.caller, cost, now):
            own = self._admitted(self.model, now)
            if own is not None:
                request.lease.join(own.lease)
                request.holds.append(self.model)
                if self._reserved(request, own.lease, self.model, cost, now):
                    self.running.append(request)
                    return
        self.close(request, now)

    def _admitted(self, limits: Limits, now: float) -> Running | None:
        try:
            lease = self.limiter.admit(limits, now)
        except RateLimited:
            return None
        for name, _ in limits.requests:
            self.expected[name] += 1
        return Running(lease, [limits])

    def _reserved(self, request: Running, lease: Lease, limits: Limits, cost: int, now: float) -> bool:
        try:
            lease.reserve(cost, now)
        except RateLimited:
            return False
        for name, _ in limits.tokens:
            self.expected[name] += cost
            request.reserved[name] = cost
        return True

    def settle(self, request: Running, tokens: int, now: float) -> None:
        request.lease.settle(tokens, now)
        for name, cost in request.reserved.items():
            self.expected[name] += tokens - cost
        request.reserved.clear()

    def close(self, request: Running, now: float) -> None:
        request.lease.close(now)
        for name, cost in request.reserved.items():
            self.expected[name] -= cost

    def check(self, now: float) -> None:
        assert {name: spent(self.limiter, name, now) for name in self.expected} == self.expected
        for limits in (self.caller, self.model):
            for name, most in limits.concurrency:
                assert self.limiter.running(name) == sum(limits in request.holds for request in self.running) <= most
            for name, limit in limits.requests:
                assert self.expected[name] <= limit.count


STEPS = st.lists(st.tuples(st.sampled_from(["open", "open", "settle", "close"]), st.integers(1, 60)), max_size=40)


@given(NUMBERS, NUMBERS, NUMBERS, STEPS)
@settings(max_examples=250, deadline=None)
def test_a_refusal_anywhere_spends_nothing_that_closing_does_not_give_back(
    tenant: Sequence[int | None],
    key: Sequence[int | None],
    model: Sequence[int | None],
    steps: list[tuple[str, int]],
) -> None:
    """Every counter shows what is reserved and what was used, whichever of them said no; only requests stay counted."""
    house = House(rules("tenant", "t", tenant) + rules("key", "t/k", key), rules("model", "m", model))
    for number, (step, amount) in enumerate(steps):
        now = 1000 + number * 0.25
        if step == "open":
            house.open(amount, now)
        elif house.running:
            request = house.running[amount % len(house.running)]
            if step == "settle":
                house.settle(request, amount, now)
            else:
                house.running.remove(request)
                house.close(request, now)
        house.check(now)
    for request in house.running:
        house.close(request, 2000)
    house.running.clear()
    house.check(2000)


@given(st.permutations(["settle", "settle again", "join", "close"]), st.integers(0, 90), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_joined_lease_balances_in_every_order(order: list[str], tokens_used: int, reserves: bool) -> None:
    limiter = Limiter()
    caller, model = rules("key", "t/k", (9, 9, 9, 9, 9, 9, 9)), rules("model", "m", (9, 9, 9, 9, 9, 9, 9))
    lease, own = limiter.admit(caller, 0.0), limiter.admit(model, 0.0)
    lease.reserve(50, 0.0)
    if reserves:
        own.reserve(50, 0.0)
    for step in order:
        if step == "join":
            lease.join(own)
        elif step == "close":
            lease.close(1.0)
        else:
            lease.settle(tokens_used, 1.0)
    if order.index("close") < order.index("join"):
        own.close(1.0)  # joined too late to be closed with the other
    settled = min(order.index("settle"), order.index("settle again"))
    with_close = order.index("close")
    caller_used = tokens_used if settled < with_close else 0
    model_used = tokens_used if reserves and order.index("join") < settled < with_close else 0
    assert {spent(limiter, name, 1.0) for name, _ in caller.tokens} == {caller_used}
    assert {spent(limiter, name, 1.0) for name, _ in model.tokens} == {model_used}
    assert limiter.running("key:t/k") == limiter.running("model:m") == 0


def test_of_several_windows_each_one_refuses_for_itself() -> None:
    limiter = Limiter()
    limits = compile_limits(LimitsConfig.model_validate({"requests": ["2/s", "3/min"]}), "key", "t/k")
    for now in (0.1, 0.2):
        limiter.admit(limits, now)
    assert "2 requests per second" in refused(lambda: limiter.admit(limits, 0.3)).message
    limiter.admit(limits, 1.3)
    error = refused(lambda: limiter.admit(limits, 3.0))
    assert "3 requests per minute" in error.message
    assert error.retry_after == pytest.approx(58.0)


# --- budgets
def budgets(*rates: str) -> Limits:
    return compile_limits(LimitsConfig.model_validate({"token_budget": rates}), "tenant", "t")


def test_a_spent_budget_is_a_quota_with_the_time_until_the_next_period() -> None:
    limiter, limits = Limiter(), budgets("100/day", "1000/month")
    limiter.clock.offset = 1_772_323_200.0 + 86_400 * 9 + 82_800  # 23:00 of 10 March 2026
    lease = limiter.admit(limits, 0.0)
    lease.reserve(90, 0.0)
    lease.settle(100, 0.0)
    error = refused(lambda: limiter.admit(limits, 1.0).reserve(1, 1.0))
    assert isinstance(error, QuotaExceeded)
    assert (error.type, error.code, error.retry_after) == ("insufficient_quota", "insufficient_quota", 3599.0)
    assert "100 tokens per day, 100 used, 1 requested" in error.message
    limiter.admit(limits, 3600.0).reserve(100, 3600.0)
    spent_by_month = refused(lambda: limiter.admit(limits, 3601.0).reserve(1, 3601.0))
    assert "per day" in spent_by_month.message
    assert spent(limiter, "tenant:t:budget/month", 3601.0) == 200


def test_a_request_larger_than_a_budget_is_not_told_to_wait() -> None:
    error = refused(lambda: Limiter().admit(budgets("100/day"), 0.0).reserve(101, 0.0))
    assert (error.code, error.retry_after) == ("request_too_large_for_limit", None)


def test_what_an_earlier_process_has_spent_of_a_budget_counts() -> None:
    limiter, limits = Limiter(), budgets("100/day")
    ((name, limit),) = limits.tokens
    limiter.seed(name, limit, 0, 1.0)
    limiter.seed(name, limit, 95, 1.0)
    limiter.admit(limits, 2.0).reserve(5, 2.0)
    refused(lambda: limiter.admit(limits, 3.0).reserve(1, 3.0))
    limiter.admit(limits, 86_400.0).reserve(100, 86_400.0)  # the clock shows 1970: a day later is another day


# --- counters that are kept elsewhere
class Elsewhere:
    """A store within reach that has room for one more of everything at each visit."""

    def __init__(self) -> None:
        self.counters: dict[str, Window] = {}
        self.visits: list[tuple[int, int, int]] = []  # counters, places, cost

    def counter(self, key: str, limit: Limit) -> Counter:
        counter = self.counters.setdefault(key, Window(limit))
        counter.limit = limit
        return counter

    def place(self, key: str, scope: str, most: int) -> Place:
        return LocalPlace(scope, most)

    async def cover(self, counters: Sequence[Counter], places: Sequence[Place], cost: int, now: float) -> None:
        self.visits.append((len(counters), len(places), cost))


def test_shared_counters_are_drawn_from_before_each_step_and_never_seeded() -> None:
    store = Elsewhere()
    limiter = Limiter(store)
    limits = compile_limits(
        LimitsConfig.model_validate({"requests": ["5/s", "9/min"], "tokens": "100/min", "concurrency": 2}), "key", "t/k"
    )

    async def one() -> Lease:
        await limiter.cover_request(limits, 0.0)
        lease = limiter.admit(limits, 0.0)
        await limiter.cover_tokens(limits, 70, 0.0)
        lease.reserve(70, 0.0)
        return lease

    lease = asyncio.run(one())
    assert store.visits == [(2, 1, 1), (1, 0, 70)]
    lease.settle(30, 1.0)
    assert store.counters["key:t/k:tokens/60"].used == 30
    ((name, limit),) = limits.tokens
    limiter.seed(name, limit, 50, 1.0)
    assert store.counters["key:t/k:tokens/60"].used == 30


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


@pytest.mark.parametrize("shared", [False, True], ids=["here", "elsewhere"])
def test_a_request_that_began_before_a_reload_brings_no_old_limit_back(shared: bool) -> None:
    """A model's limits are looked up after the body was read: the reload may have come in between."""
    limiter = Limiter(Elsewhere() if shared else None)
    old, new = requests(100), requests(3)
    limiter.admit(new, 0.0)
    limiter.forget_accounts()
    limiter.admit(new, 1.0)
    limiter.admit(old, 1.0)
    assert "3 requests per minute" in refused(lambda: limiter.admit(old, 1.0)).message
    assert "3 requests per minute" in refused(lambda: limiter.admit(new, 1.0)).message


def test_a_request_that_began_before_a_reload_brings_no_old_concurrency_back() -> None:
    limiter = Limiter()
    old, new = Limits(concurrency=(("model:m", 100),)), Limits(concurrency=(("model:m", 2),))
    for limits in (new, old):
        limiter.admit(limits, 0.0)
    for limits in (new, old):
        assert "2 requests at a time" in refused(lambda limits=limits: limiter.admit(limits, 0.0)).message  # type: ignore[misc]


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


def test_a_full_model_tells_nobody_what_others_have_used() -> None:
    limiter = Limiter()
    model = rules("model", "m", (7, None, 5, None, None, None, 1))
    lease = limiter.admit(model, 0.0)
    lease.reserve(37, 0.0)
    refusals = [refused(lambda: limiter.admit(model, 0.0))]
    lease.close(0.0)
    for now in range(5):
        again = limiter.admit(model, now)
        again.reserve(10, now)
        again.settle(9, now)
        again.close(now)
    refusals += [refused(lambda: limiter.admit(model, 9.0).reserve(29, 9.0))]
    assert [error.status for error in refusals] == [429, 429]
    assert all("this model" in error.message for error in refusals)
    assert not any(word in body(error).decode() for error in refusals for word in ("used", "37", "45"))


def test_headers_speak_of_the_callers_limits_and_not_of_the_models() -> None:
    limiter = Limiter()
    lease = limiter.admit(rules("key", "t/k", (9, None, 9, None, None, None, None)), 0.0)
    own = limiter.admit(rules("model", "m", (5, None, 5, None, None, None, None)), 0.0)
    lease.join(own)
    lease.reserve(10, 0.0)
    own.reserve(10, 0.0)
    shown = headers(lease, 0.0)
    assert (shown["x-ratelimit-limit-requests"], shown["x-ratelimit-limit-tokens"]) == ("9", "90")


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
