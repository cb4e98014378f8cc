"""Requests that run at the same time, over all processes. Each process leases slots; the arithmetic is in place.lua."""

from __future__ import annotations

from typing import cast

from gateway.limits_redis.terms import LEASE, MARGIN, Call, Condition, Desk, Reply, Script, Sent, Ticket, live_tickets

REFUSED_FOR = 0.02  # seconds for which a refusal is repeated without asking again
_SCRIPT = Script("place.lua")


class SharedPlace:
    """A `limits.Place`, and a `terms.Party`.

    A process that stood still for longer than the lease has lost its slots, perhaps to others. It takes what it runs
    again in any case, so for a while more may run than `most`.
    """

    __slots__ = (
        "__weakref__",
        "_base",
        "_condition",
        "_desk",
        "_idle",
        "_key",
        "_promised",
        "_queue",
        "_refused_until",
        "_renewed",
        "_restate",
        "_sent",
        "_spare",
        "expires",
        "free",
        "most",
        "running",
        "scope",
        "used_at",
    )

    def __init__(self, name: str, scope: str, most: int, desk: Desk, condition: Condition) -> None:
        self.scope, self.most = scope, most
        self._desk, self._condition, self._key = desk, condition, f"sekisho:place:{name}"
        self.running = 0
        self.free = 0  # slots held that nobody uses; below 0 when more runs than there are slots, without Redis
        self.expires = 0.0  # of the steady clock: no slot is held any more from then on
        self.used_at = 0.0  # when Redis was last asked
        self._promised = 0  # slots granted to tickets that have not claimed them yet
        self._base = 0  # slots that the last call said it keeps
        self._spare = 0  # free slots that may be kept in store
        self._idle = 0  # the fewest that were free since the last tick
        self._renewed = 0.0
        self._restate = False  # what Redis has made of the last call is unknown
        self._queue: list[Ticket] = []
        self._sent: Sent | None = None
        self._refused_until = 0.0

    # --- what admission does (limits.Place)
    def has_room(self) -> bool:
        return self.free > 0 or (not self._condition.up and self._has_room_alone())

    def take(self) -> None:
        self.running += 1
        self.free -= 1
        if self.free < self._idle:
            self._idle = self.free
        if self.free < 0:  # without Redis, which has to hear of it
            self._desk.watch(self)

    def leave(self) -> None:
        self.running -= 1
        self.free += 1
        if self.free > self._spare:
            self._desk.kick(self)

    def _has_room_alone(self) -> bool:
        condition = self._condition
        if condition.on_failure == "local":
            return self.running < condition.share(self.most)
        return condition.on_failure == "allow"

    # --- what `cover` does
    def ask(self, cost: int, moment: float) -> Ticket:
        """Holds a free slot, or waits for one."""
        ticket = Ticket(1)
        self._lapse(moment)
        if self.free > 0:
            self.free -= 1
            self._promised += 1
            ticket.grant()
        elif moment < self._refused_until or not self._condition.up:
            ticket.refuse()
        else:
            self._queue.append(ticket)
            self._desk.kick(self)
            self._desk.watch(self)
        return ticket

    def holds(self, ticket: Ticket, moment: float) -> bool:
        return ticket.granted and moment < self.expires

    def claim(self, ticket: Ticket, moment: float) -> None:
        """Makes what a ticket holds a free slot again, which is taken or given back next."""
        ticket.abandoned = True
        if ticket.granted:
            ticket.granted = False
            self._promised -= 1
            self.free += 1

    def _lapse(self, moment: float) -> None:
        if moment >= self.expires:
            self.free = min(self.free, 0)

    # --- what the desk does (terms.Party)
    def prepare(self, moment: float) -> Call | None:
        tickets = live_tickets(self._queue)
        self._lapse(moment)
        kept = max(0, min(self.free, self._spare))
        base = self.running + self._promised + kept
        is_due = self._restate or (base > 0 and moment - self._renewed >= LEASE / 3)
        if not tickets and self.free == kept and not is_due:
            return None
        self.free, self._base = kept, base
        wish = base // 4 + 1 if tickets else 0
        call = Call(
            _SCRIPT,
            self._key,
            (
                self._desk.process, self._desk.number(), base, len(tickets), wish, self._condition.divisor, self.most,
                int(LEASE * 1000),
            ),
        )  # fmt: skip
        self._sent = Sent(call, moment, tickets)
        return call

    def accept(self, reply: Reply, moment: float) -> None:
        sent = cast(Sent, self._sent)
        self._sent, self._restate, self.used_at = None, False, moment
        mine, others = cast("list[int]", reply)
        granted = mine - self._base
        waiting = [ticket for ticket in sent.tickets if not ticket.abandoned]
        for ticket in waiting[: max(0, granted)]:
            granted -= 1
            self._promised += 1
            ticket.grant()
        for ticket in waiting:
            if not ticket.granted:
                ticket.refuse()
                self._refused_until = moment + REFUSED_FOR
        self.free += max(0, granted)
        self._spare = max(0, self.most - others - mine) // self._condition.divisor
        self._renewed, self.expires = sent.moment, sent.moment + LEASE - MARGIN
        if self._queue or self.free > self._spare:
            self._desk.kick(self)
        self._desk.watch(self)

    def fail(self) -> None:
        """Whatever Redis has made of the call, the next one says again what is held."""
        if self._sent is not None:
            self._restate = True
            self._queue.extend(self._sent.tickets)
        for ticket in self._queue:
            ticket.abandoned = True
            ticket.refuse()
        self._queue.clear()

    def tick(self, moment: float) -> bool:
        """Gives back slots that nobody has used since the last tick, and renews the others when it is time."""
        self._lapse(moment)
        if self._idle > 0:
            self._spare = max(0, self.free - self._idle)
        self._idle = self.free
        if self.free > self._spare or moment - self._renewed >= LEASE / 3:
            self._desk.kick(self)
        return bool(self.running or self.free or self._promised or self._queue or self._restate)

    def retire(self) -> None:
        """Gives back all slots, at the end of the process."""
        self.running = self.free = self._spare = 0
        self._restate = True
        self._desk.kick(self)

    def is_idle(self, moment: float) -> bool:
        """True when forgetting it would forget nothing."""
        holds = self.running or self.free or self._promised or self._queue or self._sent is not None or self._restate
        return not holds and moment - self.used_at > LEASE
