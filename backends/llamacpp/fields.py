"""Reads one JSON object field by field; every complaint is a 400 that names the field. Pure."""

from __future__ import annotations

import math
from typing import Any

from backends.llamacpp.errors import ApiError, invalid

_TOKEN_LIMIT = 1 << 31


class Fields:
    """A request body. Absent and null mean the same: the default."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise invalid("The request body must be a JSON object.", None)
        self.body: dict[str, Any] = body

    def get(self, name: str) -> Any:
        """The value as it came, None when absent."""
        return self.body.get(name)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A finite number within [low, high]."""
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(name, "a number")
        if not (math.isfinite(value) and low <= value <= high):
            raise invalid(f"Invalid {name!r}: must be between {low:g} and {high:g}, got {value!r}.", name)
        return float(value)

    def integer(self, name: str, low: int, high: int = _TOKEN_LIMIT) -> int | None:
        """A whole number within [low, high]."""
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(name, "an integer")
        if not low <= value <= high:
            raise invalid(f"Invalid {name!r}: must be between {low} and {high}, got {value}.", name)
        return value

    def boolean(self, name: str) -> bool:
        """False when absent."""
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            raise wrong_type(name, "a boolean")
        return bool(value)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.body.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong_type(name, "a string")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """An object; empty when absent."""
        value = self.body.get(name)
        if value is not None and not isinstance(value, dict):
            raise wrong_type(name, "an object")
        return value or {}


def wrong_type(name: str, expected: str) -> ApiError:
    """A value of another JSON type than the field has."""
    return invalid(f"Invalid type for {name!r}: expected {expected}.", name)


def is_tokens(value: Any) -> bool:
    """Whether a value is a list of token ids (an empty list is not)."""
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
