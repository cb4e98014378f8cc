"""Points in time as callers write them and as answers show them. Inside they are Unix seconds."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

from gateway.units import WrongValue

_LAST = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
_UNIX = re.compile(r"[0-9]{9,12}(?:\.[0-9]{1,9})?")  # fewer digits are a date without hyphens, or a year


def read_moment(value: object) -> float:
    """Unix seconds from a date (its first instant, UTC), a time (UTC unless it says otherwise) or Unix seconds.

    Raises: WrongValue.
    """
    seconds = _seconds(value)
    if seconds is None or not 0 <= seconds <= _LAST:
        raise WrongValue("not a date or time", "write 2027-01-31, 2027-01-31T18:00:00Z or Unix seconds")
    return seconds


def _seconds(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) and abs(value) <= _LAST else None
    if not isinstance(value, str) or len(value) > 64:
        return None
    if _UNIX.fullmatch(value):
        return float(value)
    try:
        moment = datetime.fromisoformat(value)
        return moment.timestamp() if moment.tzinfo else moment.replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        return None


def iso(moment: float, precision: str = "seconds") -> str:
    """`2027-01-31T18:00:00Z`; `precision` is datetime.isoformat's, what is finer is cut off."""
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec=precision).replace("+00:00", "Z")


def iso_or_none(moment: float | None) -> str | None:
    return None if moment is None else iso(moment)


Moment = Annotated[float, BeforeValidator(read_moment), WithJsonSchema({"type": ["string", "number"]})]
