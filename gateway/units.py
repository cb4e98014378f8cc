"""Durations, sizes and rates as people write them in YAML, turned into plain numbers, and back.

`Seconds`, `PositiveSeconds` and `Bytes` are what the configuration models use as field types; `Rate` is a value of
its own. Every parser raises `WrongValue`, whose message never repeats the text it was given: that text may be a secret
which a variable put in the wrong place.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

_LONGEST = 64  # characters: nobody writes a longer number, and Python slows down on huge ones
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_DURATION = re.compile(rf"(?:{_DURATION_PART.pattern})+")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)")
_RATE = re.compile(r"([0-9]+(?:_[0-9]+)*) ?/ ?([0-9]*)([a-z]+)")

_SECONDS_PER = {"d": Decimal(86400), "h": Decimal(3600), "m": Decimal(60), "s": Decimal(1), "ms": Decimal("0.001")}
_BYTES_PER = {
    "tib": 1 << 40, "gib": 1 << 30, "mib": 1 << 20, "kib": 1 << 10,
    "tb": 10**12, "gb": 10**9, "mb": 10**6, "kb": 10**3, "b": 1,
}  # fmt: skip
_SIZE_NAMES = {1 << 40: "TiB", 1 << 30: "GiB", 1 << 20: "MiB", 1 << 10: "KiB"}
_WINDOWS = {
    "s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60,
    "h": 3600, "hour": 3600, "d": 86400, "day": 86400,
}  # fmt: skip
_PERIODS = {"d": "day", "day": "day", "mo": "month", "month": "month"}
_WINDOW_NAMES = {1: "s", 60: "min", 3600: "hour", 86400: "day"}


class WrongValue(ValueError):
    """A value that cannot be used: str() is what is wrong, `hint` what to write instead."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `count` units (requests or tokens) in any window of `seconds`."""

    count: int
    seconds: int

    def __str__(self) -> str:
        return format_rate(self)


@dataclass(frozen=True, slots=True)
class BudgetRate:
    """At most `count` units in each calendar `period`, "day" or "month" in UTC."""

    count: int
    period: str

    def __str__(self) -> str:
        return f"{self.count}/{self.period}"


def parse_duration(value: object) -> float:
    """Seconds from "30s", "250ms", "5m", "1h", "2d", "1h30m", or a plain number of seconds.

    Raises: WrongValue: not a duration, negative, or not finite.
    """
    seconds = _plain_number(value)
    if seconds is None and isinstance(value, str) and len(value) <= _LONGEST and _DURATION.fullmatch(value.strip()):
        parts = _DURATION_PART.findall(value)
        seconds = float(sum((Decimal(number) * _SECONDS_PER[unit] for number, unit in parts), Decimal(0)))
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        raise WrongValue("not a duration", "write a number with a unit such as 250ms, 30s, 5m or 1h")
    return seconds


def format_duration(seconds: float) -> str:
    """The shortest text that `parse_duration` reads back as the same float."""
    exact = Decimal(repr(float(seconds)))
    for unit, size in _SECONDS_PER.items():
        if exact >= size and exact % size == 0:
            return f"{int(exact / size)}{unit}"
    return f"{exact:f}s" if exact else "0s"


def parse_size(value: object) -> int:
    """Bytes from "32MiB" (powers of 1024), "10MB" (powers of 1000), "512B", or a plain number of bytes.

    Raises: WrongValue: not a size, negative, or a bare K/M/G, which people read both ways.
    """
    hint = "write a number with a unit such as 64KiB, 32MiB or 10MB"
    number = _plain_number(value)
    if number is not None and math.isfinite(number) and number >= 0 and number == int(number):
        return int(str(value)) if isinstance(value, int | str) and "." not in str(value) else int(number)
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) and len(value) <= _LONGEST else None
    if match is None or match[2].lower() not in _BYTES_PER:
        raise WrongValue("not a size", hint)
    return int(Decimal(match[1]) * _BYTES_PER[match[2].lower()])


def format_size(size: int) -> str:
    """The shortest text that `parse_size` reads back as the same number of bytes."""
    for unit, name in _SIZE_NAMES.items():
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return f"{size}B"


def parse_rate(value: object) -> Rate:
    """A Rate from "600/min", "10/s", "5000/hour", "20000000/day" or, for odd windows, "100/30s".

    Raises: WrongValue: not a rate, or a count or window of zero.
    """
    if isinstance(value, Rate):
        return value
    match = _RATE.fullmatch(value.strip().lower()) if isinstance(value, str) and len(value) <= _LONGEST else None
    if match is not None and match[3] in _WINDOWS:
        count, seconds = int(match[1]), int(match[2] or 1) * _WINDOWS[match[3]]
        if count > 0 and seconds > 0:
            return Rate(count, seconds)
    raise WrongValue("not a rate", "write a whole count and a window such as 10/s, 600/min, 5000/hour or 100000/day")


def parse_budget(value: object) -> BudgetRate:
    """A BudgetRate from "20000000/day" or "500000000/month".

    Raises: WrongValue: another form or period, or a count of zero.
    """
    if isinstance(value, BudgetRate):
        return value
    match = _RATE.fullmatch(value.strip().lower()) if isinstance(value, str) and len(value) <= _LONGEST else None
    if match is not None and not match[2] and match[3] in _PERIODS and int(match[1]) > 0:
        return BudgetRate(int(match[1]), _PERIODS[match[3]])
    raise WrongValue("not a budget", "write a whole count and a period, as in 20000000/day or 500000000/month")


def one_or_more(value: object) -> object:
    """A single value as a list of one: most limits have one window, and nobody wants brackets for it. None is none."""
    if value is None:
        return []
    return value if isinstance(value, list | tuple) else [value]


def different_windows(rates: tuple[Rate, ...]) -> tuple[Rate, ...]:
    """Raises: WrongValue: two rates for windows of the same length, which would share one counter."""
    _different([rate.seconds for rate in rates])
    return rates


def different_periods(budgets: tuple[BudgetRate, ...]) -> tuple[BudgetRate, ...]:
    """Raises: WrongValue: two budgets for the same period."""
    _different([budget.period for budget in budgets])
    return budgets


def _different(windows: Sequence[int | str]) -> None:
    if len(set(windows)) < len(windows):
        raise WrongValue("two limits for the same window", "keep the smaller one")


def format_rate(rate: Rate) -> str:
    """The text that `parse_rate` reads back as an equal Rate."""
    return f"{rate.count}/{_WINDOW_NAMES.get(rate.seconds) or f'{rate.seconds}s'}"


def _plain_number(value: object) -> float | None:
    """`value` as a number when it is one or is written as one without a unit, else None. Booleans are not numbers."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and len(value) <= _LONGEST and _NUMBER.fullmatch(value.strip()):
        return float(value)
    if isinstance(value, int) and abs(value) > 1 << 62:
        return math.inf  # float() of an int beyond 1e308 raises; no duration or size is that long
    return float(value) if isinstance(value, int | float) else None


def _number_or(pattern: str) -> WithJsonSchema:
    """JSON Schema of a number with or without a unit; `${` lets a variable stand in its place."""
    return WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": pattern}]})


_SECONDS_JSON = _number_or(r"^([0-9.]+(ms|s|m|h|d)?)+$|\$\{")
_BYTES_JSON = _number_or(r"^[0-9.]+ ?([KMGTkmgt]?i?[Bb])?$|\$\{")
_RATE_JSON = {"type": "string", "pattern": r"^[0-9_]+ ?/ ?[0-9]*(s|sec|second|m|min|minute|h|hour|d|day)$|\$\{"}
_BUDGET_JSON = {"type": "string", "pattern": r"^[0-9_]+ ?/ ?(d|day|mo|month)$|\$\{"}


def _one_or_several(item: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [item, {"type": "array", "items": item}, {"type": "null"}]})


Seconds = Annotated[float, BeforeValidator(parse_duration), _SECONDS_JSON]
PositiveSeconds = Annotated[float, BeforeValidator(parse_duration), Field(gt=0), _SECONDS_JSON]
Bytes = Annotated[int, BeforeValidator(parse_size), Field(gt=0), _BYTES_JSON]
_AS_TEXT = PlainSerializer(str, return_type=str)
RateField = Annotated[Rate, BeforeValidator(parse_rate), _AS_TEXT]
Rates = Annotated[
    tuple[RateField, ...],
    BeforeValidator(one_or_more),
    AfterValidator(different_windows),
    _one_or_several(_RATE_JSON),
]
BudgetField = Annotated[BudgetRate, BeforeValidator(parse_budget), _AS_TEXT]
Budgets = Annotated[
    tuple[BudgetField, ...],
    BeforeValidator(one_or_more),
    AfterValidator(different_periods),
    _one_or_several(_BUDGET_JSON),
]
