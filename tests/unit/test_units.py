"""Durations, sizes and rates: what people write, what comes out, and the way back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.units import (
    BudgetRate,
    Rate,
    WrongValue,
    different_periods,
    different_windows,
    format_duration,
    format_rate,
    format_size,
    one_or_more,
    parse_budget,
    parse_duration,
    parse_rate,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("250ms", 0.25),
        ("5m", 300.0),
        ("1h", 3600.0),
        ("2d", 172_800.0),
        ("1h30m", 5400.0),
        ("0s", 0.0),
        ("0.1s", 0.1),
        (" 3s ", 3.0),
        (15, 15.0),
        (2.5, 2.5),
        ("45", 45.0),
        (0, 0.0),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "s",
        "-1s",
        "1 s",
        "1x",
        "1m-",
        "٣s",
        "nan",
        "inf",
        "1e3",
        True,
        None,
        -1,
        float("nan"),
        float("inf"),
        10**400,
        [],
        "9" * 400 + "s",
    ],
)
def test_not_durations(wrong: object) -> None:
    with pytest.raises(WrongValue) as caught:
        parse_duration(wrong)
    assert "30s" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("32MiB", 32 << 20),
        ("10MB", 10_000_000),
        ("64KiB", 65_536),
        ("1.5GiB", 3 << 29),
        ("512B", 512),
        ("7 kb", 7000),
        (1024, 1024),
        ("1024", 1024),
        (9_007_199_254_740_993, 9_007_199_254_740_993),
        (0, 0),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "wrong", ["", "32M", "10k", "-1MiB", "MiB", "1.5", 1.5, -1, True, None, "1e3", float("inf"), 10**400]
)
def test_not_sizes(wrong: object) -> None:
    with pytest.raises(WrongValue):
        parse_size(wrong)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("600/min", Rate(600, 60)),
        ("10/s", Rate(10, 1)),
        ("5000/hour", Rate(5000, 3600)),
        ("20000000/day", Rate(20_000_000, 86_400)),
        ("20_000_000 / day", Rate(20_000_000, 86_400)),
        ("100/30s", Rate(100, 30)),
        ("1/Minute", Rate(1, 60)),
    ],
)
def test_rates(text: str, rate: Rate) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "wrong", ["", "600", 600, "/min", "0/s", "5/0s", "-5/s", "5/fortnight", "1.5/s", None, "5/", "1__0/s"]
)
def test_not_rates(wrong: object) -> None:
    with pytest.raises(WrongValue):
        parse_rate(wrong)


def test_a_rate_reads_as_it_is_written() -> None:
    assert str(Rate(600, 60)) == "600/min"
    assert format_rate(Rate(5, 30)) == "5/30s"
    with pytest.raises(AttributeError):
        Rate(1, 1).count = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("20000000/day", BudgetRate(20_000_000, "day")),
        ("500_000_000 / month", BudgetRate(500_000_000, "month")),
        ("1/d", BudgetRate(1, "day")),
        (" 7/Mo ", BudgetRate(7, "month")),
        (BudgetRate(3, "day"), BudgetRate(3, "day")),
    ],
)
def test_budgets(text: object, budget: BudgetRate) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    "wrong", ["", "600", 600, "/day", "0/day", "5/2day", "5/30d", "-5/day", "5/hour", "5/m", "5/year", "1.5/day", None]
)
def test_not_budgets(wrong: object) -> None:
    with pytest.raises(WrongValue) as caught:
        parse_budget(wrong)
    assert "/month" in caught.value.hint


@pytest.mark.parametrize(
    ("given", "items"),
    [("10/s", ["10/s"]), (["10/s", "600/min"], ["10/s", "600/min"]), (None, []), ([], []), ((), ()), (5, [5])],
)
def test_one_value_is_a_list_of_one(given: object, items: object) -> None:
    assert one_or_more(given) == items


def test_every_window_may_be_limited_once() -> None:
    """Two limits would share one counter, and every request would count twice."""
    rates = (Rate(10, 1), Rate(600, 60), parse_rate("5/30s"))
    assert different_windows(rates) is rates
    for same in ((Rate(10, 60), parse_rate("9/min")), (Rate(1, 86400), parse_rate("9/24hour"))):
        with pytest.raises(WrongValue):
            different_windows(same)
    different_periods((BudgetRate(1, "day"), BudgetRate(1, "month")))
    with pytest.raises(WrongValue):
        different_periods((BudgetRate(1, "day"), BudgetRate(2, "day")))


@pytest.mark.parametrize(
    ("seconds", "text"), [(90.0, "90s"), (0.25, "250ms"), (7200.0, "2h"), (0.0, "0s"), (1e-5, "0.00001s")]
)
def test_durations_are_shown_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(min_value=0, max_value=1e9, allow_subnormal=False).filter(lambda value: not 0 < value < 1e-30))
def test_durations_round_trip(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(min_value=0, max_value=1 << 62))
def test_sizes_round_trip(size: int) -> None:
    assert parse_size(format_size(size)) == size
    assert parse_size(size) == size


@given(st.builds(Rate, st.integers(1, 10**15), st.integers(1, 10**7)))
def test_rates_round_trip(rate: Rate) -> None:
    assert parse_rate(format_rate(rate)) == rate


@given(st.builds(BudgetRate, st.integers(1, 10**15), st.sampled_from(["day", "month"])))
def test_budgets_round_trip(budget: BudgetRate) -> None:
    assert parse_budget(str(budget)) == budget


@given(st.text())
def test_no_text_breaks_a_parser_or_is_repeated(text: str) -> None:
    for parse in (parse_duration, parse_size, parse_rate, parse_budget):
        try:
            parse(text)
        except WrongValue as wrong:
            assert len(text) < 8 or text not in f"{wrong} {wrong.hint}"
