"""A window or budget whose truth is in Redis. This process spends an allowance that it has drawn beforehand.

A draw books the whole grant in Redis's current slice, so it may be spent until that slice ends, and for half a second
at most; then the rest is given back. The arithmetic is in window.lua.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from gateway.limits_redis.ledger import Demand, Ledger
from gateway.limits_redis.spans import span_of
from gateway.limits_redis.terms import MARGIN, Call, Condition, Desk, Reply, Script, Sent, Ticket, live_tickets
from gateway.types import Limit
from gateway.windows import WallClock, duration, header_template

HOLD = 0.5  # seconds for which a draw is kept at most: for as long others may miss what is not spent of it
REFUSED_FOR = 0.1  # seconds for which a refusal is repeated without asking again
_AMPLE = 1.5  # times what is likely to be spent meanwhile: the rest goes back with the next draw
_NOTHING = (0, 0.0, 0.0)
_SCRIPT = Script("window.lua")


class SharedCounter:
    """A `windows.Counter`, and a `terms.Party`."""

    __slots__ = (
        "__weakref__", "_condition", "_demand", "_desk", "_drawn", "_head", "_held", "_known", "_largest", "_ledger",
        "_left", "_limit", "_now", "_queue", "_refused", "_sent", "_settles", "_slice", "_span", "_spare", "_used_at",
        "_wait_until", "allowance", "expires", "mirror",
    )  # fmt: skip

    def __init__(self, name: str, limit: Limit, desk: Desk, condition: Condition, clock: WallClock) -> None:
        self._desk, self._condition = desk, condition
        self._span = span_of(name, limit, clock)
        self.mirror = self._span.mirror  # what this process itself has spent
        self._ledger, self._demand = Ledger(self._span), Demand()
        self._settles = limit.unit == "tokens"  # what is reserved of it gets corrected
        self.allowance = 0  # may be spent without asking
        self.expires = 0.0  # of the steady clock: not any more from then on
        self._slice = 0  # Redis's number of the slice in which the allowance is booked
        self._spare = 0  # what may be kept of a refund, in view of what was left
        self._largest = 0  # cost in the last draw
        self._left = limit.count  # in Redis, after the last call
        self._drawn = 0.0  # until when the last grant counts
        self._known = False  # Redis has booked for this process
        self._queue: list[Ticket] = []
        self._held: set[Ticket] = set()  # granted and not claimed
        self._sent: Sent | None = None
        self._refused = _NOTHING  # a cost, until when it need not be tried again, and when it fits
        self._now = self._wait_until = self._used_at = 0.0
        self.limit = limit

    # --- what admission does (windows.Counter)
    @property
    def limit(self) -> Limit:
        return self._limit

    @limit.setter
    def limit(self, limit: Limit) -> None:
        self._limit = self.mirror.limit = limit
        self._head = header_template(limit)
        self._refused = _NOTHING
        self._give_back()  # it was drawn under the old limit

    @property
    def used(self) -> int:
        return max(0, self._limit.count - self._room()) if self._condition.up else self.mirror.used

    def advance(self, now: float) -> None:
        self.mirror.advance(now)

    def has_room(self, cost: int, now: float) -> bool:
        self.mirror.advance(now)
        self._now = now
        return self.allowance >= cost or (not self._condition.up and self._has_room_alone(cost))

    def add(self, cost: int) -> None:
        self.mirror.add(cost)
        self._demand.spent += cost
        if self.allowance >= cost:
            self.allowance -= cost
            booked = self._slice
        else:
            booked = self._ledger.spend_alone(cost, self._now)
            self._desk.watch(self)
        if self._settles:
            self._ledger.remember(self._now, booked)

    def correct(self, booked_at: float, difference: int, now: float) -> None:
        """Adds a difference to what was reserved at `booked_at`: to the allowance while that is of the same slice."""
        self.mirror.correct(booked_at, difference, now)
        booked = self._ledger.recall(booked_at, difference)
        if booked == self._slice and now < self.expires:
            self.allowance -= difference
            if self.allowance < 0 or self.allowance > self._spare:
                self._trim()
        elif difference:
            self._owe(booked, difference)
        if difference < 0:
            self._refused = _NOTHING

    def remaining(self) -> int:
        if self._condition.up:
            return max(0, self._room())
        return max(0, self._condition.share(self._limit.count) - self.mirror.used)

    def wait(self, cost: int, now: float) -> float:
        """Seconds until `cost` fits, as Redis said when it was refused just now; 0 when it was not."""
        if self._condition.up:
            return max(0.0, self._wait_until - now)
        self.mirror.limit = replace(self._limit, count=self._condition.share(self._limit.count))
        return self.mirror.wait(cost, now)

    def reset(self, now: float) -> float:
        """Seconds until nothing of what this process has drawn counts any more."""
        if self._limit.period:
            return self.mirror.reset(now)
        return max(0.0, self._drawn - now) if self.used else 0.0

    def headers(self, now: float) -> bytes:
        return self._head % (self.remaining(), duration(self.reset(now)))

    def _room(self) -> int:
        return self._left + self.allowance

    def _has_room_alone(self, cost: int) -> bool:
        condition = self._condition
        if condition.on_failure == "local":
            return self.mirror.used + cost <= condition.share(self._limit.count)
        return condition.on_failure == "allow"

    # --- what `cover` does
    def ask(self, cost: int, moment: float) -> Ticket:
        """Holds room, or waits for it."""
        ticket = Ticket(cost)
        if moment >= self.expires:
            self._give_back()
        if self.allowance >= cost and moment < self.expires:
            self.allowance -= cost
            self._grant(ticket)
        elif cost > self._limit.count or not self._condition.up:
            ticket.refuse()
        elif cost == self._refused[0] and moment < self._refused[1]:
            ticket.refuse(self._refused[2] - moment)
        else:
            self._queue.append(ticket)
            self._desk.kick(self)
        return ticket

    def holds(self, ticket: Ticket, moment: float) -> bool:
        """The room for one that has waited often is booked after it had come, so it may be late: a limit that has room
        refuses nobody because this process is busy. What is drawn in store may not."""
        in_time = ticket.slice == self._slice and moment < self.expires
        return ticket.granted and (in_time or (ticket.may_be_late and not self._limit.period))

    def claim(self, ticket: Ticket, moment: float) -> None:
        """Takes what a ticket holds into the allowance, to be spent or given back next."""
        ticket.abandoned = True
        self._wait_until = moment + ticket.wait if ticket.wait else 0.0
        if ticket.granted:
            self._held.discard(ticket)
            if self.holds(ticket, moment):
                self.allowance += ticket.cost
            else:
                self._owe(ticket.slice, -ticket.cost)
            ticket.granted = False

    def _grant(self, ticket: Ticket) -> None:
        self._held.add(ticket)
        ticket.grant(self._slice)

    # --- what the desk does (terms.Party)
    def prepare(self, moment: float) -> Call | None:
        if self._sent is not None:
            return self._sent.call  # the same step once more: if Redis has taken it already, it says so
        self._turn(moment)
        tickets = live_tickets(self._queue)
        if tickets or moment >= self.expires:
            self._give_back()  # so that a draw sees all that is left
        elif self.allowance > self._spare:
            self._trim()
        corrections = self._ledger.take(moment)
        if not tickets and not corrections:
            return None
        if tickets:
            self._condition.draws += 1
        call = Call(_SCRIPT, self._span.key, self._arguments(tickets, corrections, moment))
        self._sent = Sent(call, moment, tickets)
        return call

    def accept(self, reply: Reply, moment: float) -> None:
        sent, step = cast(Sent, self._sent), cast("list[int]", reply)
        self._sent, self._used_at = None, moment
        if step[0] < 0:
            self._start_over(sent, moment)
        elif sent.call.key == self._span.key:
            self._known = True
            self._take(sent, step, moment)
        else:  # of a budget's period that is over
            for ticket in sent.tickets:
                ticket.try_again()
        if self._queue:
            self._desk.kick(self)

    def fail(self) -> None:
        for ticket in (*self._queue, *(self._sent.tickets if self._sent is not None else ())):
            ticket.abandoned = True  # a late grant is not theirs
            ticket.refuse()
        self._queue.clear()

    def tick(self, moment: float) -> bool:
        self._turn(moment)
        if moment >= self.expires:
            self._give_back()
        self._ledger.forget_old(moment)
        if self._ledger:
            self._desk.kick(self)
        return bool(self.allowance or self._ledger)

    def retire(self) -> None:
        """Gives back what is unspent, at the end of the process."""
        self._give_back()
        self._desk.kick(self)

    def is_idle(self, moment: float) -> bool:
        """True when forgetting it would forget nothing."""
        self.mirror.advance(moment)
        holds = self.allowance or self._held or self._queue or self._sent is not None or not self._ledger.is_empty
        return not holds and self.mirror.used == 0 and moment - self._used_at > max(self._span.seconds, HOLD)

    def _turn(self, moment: float) -> None:
        if self._span.turn(moment):
            self.allowance, self._known, self._refused = 0, False, _NOTHING
            self._ledger.turn()

    def _arguments(
        self, tickets: Sequence[Ticket], corrections: Sequence[tuple[int, int]], moment: float
    ) -> tuple[str | int, ...]:
        span = self._span
        self.mirror.advance(moment)
        must_be_known = self._known and (self.mirror.used != 0 or len(corrections) > 0)
        wish = int(self._demand.measure(moment) * HOLD * _AMPLE) if tickets else 0
        return (
            self._desk.process, self._desk.number(), self._limit.count, span.seconds, span.period, span.life(moment),
            self._condition.divisor, wish, int(must_be_known), len(corrections),
            *(number for pair in corrections for number in pair),
            *(ticket.cost for ticket in tickets),
        )  # fmt: skip

    def _take(self, sent: Sent, step: Sequence[int], moment: float) -> None:
        """Distributes what was granted."""
        granted, slice, rest, used, *waits = step
        left = rest / 1e6 if self._span.seconds else HOLD
        expires = min(sent.moment + min(left, HOLD), self._span.ends) - MARGIN
        in_time = moment < expires
        self._left = self._limit.count - used
        divisor = self._condition.divisor
        self._largest = max((ticket.cost for ticket in sent.tickets), default=self._largest)
        self._spare = self._left // (divisor // 2) if self._left >= divisor * self._largest else 0
        if granted:
            if self.allowance and (slice != self._slice or not in_time):  # refunds since the call was sent
                self._give_back()
            self._slice, self.expires = slice, expires
            self._drawn = sent.moment + left + self._span.seconds
        for ticket, wait in zip(sent.tickets, waits, strict=False):
            if wait:
                ticket.refuse(wait / 1e6 if self._span.seconds else self.reset(moment))
                self._refused = (ticket.cost, moment + min(REFUSED_FOR, ticket.wait), moment + ticket.wait)
            elif not ticket.abandoned and (in_time or (ticket.may_be_late and not self._limit.period)):
                granted -= ticket.cost
                self._grant(ticket)
            else:
                ticket.try_again()
        if in_time:
            self.allowance += granted
            self._desk.watch(self)
        elif granted:
            self._owe(slice, -granted)

    def _start_over(self, sent: Sent, moment: float) -> None:
        self._known, self.allowance, self.expires = False, 0, 0.0
        for ticket in self._held:
            ticket.granted = False
        self._held.clear()
        self._ledger.start_over(moment)
        self._queue[:0] = sent.tickets
        self._desk.kick(self)

    def _owe(self, slice: int, difference: int) -> None:
        if slice:
            self._ledger.owe(slice, difference)
            self._desk.watch(self)
            if -difference > self._spare:  # others may be waiting for it
                self._desk.kick(self)

    def _give_back(self) -> None:
        rest, self.allowance = self.allowance, 0
        if rest:
            self._owe(self._slice, -rest)

    def _trim(self) -> None:
        """Gives back what is too much to keep, or books what is missing."""
        keep = min(max(self.allowance, 0), self._spare // 2)
        excess, self.allowance = self.allowance - keep, keep
        self._owe(self._slice, -excess)
