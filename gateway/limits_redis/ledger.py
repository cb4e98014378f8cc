"""What Redis does not know yet of a counter, and where the reservations of running requests were booked."""

from __future__ import annotations

from gateway.limits_redis.spans import Span
from gateway.windows import SLICES

_DEMAND = 0.25  # seconds over which demand is measured


class Ledger:
    __slots__ = ("_alone", "_bookings", "_owed", "_span")

    def __init__(self, span: Span) -> None:
        self._span = span
        self._owed: dict[int, int] = {}  # Redis's slice -> difference
        self._alone: dict[int, int] = {}  # piece of the span -> spent without Redis
        # By the `now` of a reservation: its slice, or ~piece when it was spent without Redis; and how many there are.
        self._bookings: dict[float, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        """Whether anything is to be booked."""
        return bool(self._owed or self._alone)

    @property
    def is_empty(self) -> bool:
        return not (self._owed or self._alone or self._bookings)

    def owe(self, slice: int, difference: int) -> None:
        self._owed[slice] = self._owed.get(slice, 0) + difference

    def spend_alone(self, cost: int, now: float) -> int:
        """Where it was booked, for `remember`."""
        self._span.turn(now)
        piece = self._span.number(now)
        self._alone[piece] = self._alone.get(piece, 0) + cost
        return ~piece

    def remember(self, now: float, booked: int) -> None:
        earlier = self._bookings.get(now)
        self._bookings[now] = (booked, 1) if earlier is None else (min(booked, earlier[0]), earlier[1] + 1)

    def recall(self, booked_at: float, difference: int) -> int:
        """The slice in which a reservation was booked; 0 when there is none, or when that is already corrected here."""
        booked, times = self._bookings.pop(booked_at, (0, 1))
        if times > 1:
            self._bookings[booked_at] = (booked, times - 1)
        if booked < 0:
            self._alone[~booked] = self._alone.get(~booked, 0) + difference
            return 0
        return booked

    def take(self, moment: float) -> list[tuple[int, int]]:
        """All that is to be booked, by Redis's slice, or by minus the number of slices ago."""
        found = [pair for pair in self._owed.items() if pair[1]]
        for piece, difference in self._alone.items():
            age = self._span.age(piece, difference, moment)
            if age is not None and difference:
                found.append((-age, difference))
        self._owed.clear()
        self._alone.clear()
        return found

    def start_over(self, moment: float) -> None:
        """Redis has lost its memory: all that this process has spent is to be booked, net of what was owed."""
        self._span.mirror.advance(moment)
        self._owed.clear()
        self._alone = self._span.own()

    def forget_old(self, moment: float) -> None:
        """What no longer counts. Without Redis there would be more of it every second."""
        if len(self._alone) > 2 * SLICES:
            found = self._alone.items()
            self._alone = {piece: spent for piece, spent in found if self._span.age(piece, spent, moment) is not None}

    def turn(self) -> None:
        """Another period has begun: nothing of the old one matters any more."""
        self._owed.clear()
        self._alone = {piece: spent for piece, spent in self._alone.items() if piece == self._span.period}


class Demand:
    """How much is spent in a second, of late."""

    __slots__ = ("_rate", "_since", "spent")

    def __init__(self) -> None:
        self.spent = 0  # since `_since`
        self._rate = self._since = 0.0

    def measure(self, moment: float) -> float:
        elapsed = moment - self._since
        if elapsed >= _DEMAND:
            self._rate, self.spent, self._since = self.spent / elapsed, 0, moment
        return max(self._rate, self.spent / _DEMAND)
