"""How many second attempts there may be: a share of the first ones, so that retries never make a storm of their own."""

from __future__ import annotations

LEAST = 10.0  # retries that are always allowed, for gateways with little to do
MEMORY = 10.0  # seconds after which a request counts for about a third


class RetryBudget:
    """Counts requests and retries of about the last ten seconds."""

    __slots__ = ("_requests", "_retries", "ratio")

    def __init__(self, ratio: float) -> None:
        """`ratio`: retries per request, 0.2 = a fifth more load at most; it may be changed at any time."""
        self.ratio = ratio
        self._requests = self._retries = 0.0

    def asked(self) -> None:
        """A first attempt."""
        self._requests += 1

    def take(self) -> bool:
        """Whether one more retry is allowed; it is counted then."""
        if self._retries + 1 > LEAST + self.ratio * self._requests:
            return False
        self._retries += 1
        return True

    @property
    def left(self) -> float:
        """How many more retries there may be at this moment."""
        return max(0.0, LEAST + self.ratio * self._requests - self._retries)

    def forget(self, seconds: float) -> None:
        """To be called a few times a second, with the time since the last call."""
        left = max(0.0, 1 - seconds / MEMORY)
        self._requests *= left
        self._retries *= left
