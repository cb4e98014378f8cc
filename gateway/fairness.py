"""Who is next among those who wait: priority classes, then tenants by weighted work, then the order of arrival.

Start-time fair queueing: every tenant with waiting requests has a tag, the virtual time at which its next request
begins. The smallest tag is served and grows by the request's work divided by the tenant's weight. Tenants that wait all
the time so get work in proportion to their weights, to within one request each and the credit of those that have used
less before. See docs/adr/0011-queue.md.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Generic, TypeAlias, TypeVar

Item = TypeVar("Item")
Server = TypeVar("Server")
SLACK = 64  # entries that may be out of date whatever their share

_Row: TypeAlias = "tuple[float, int, _Account[Item, Server]]"  # tag, tie-breaker, whose


class Ticket(Generic[Item, Server]):
    """One waiting request. `servers`: who could serve it; requests with the same ones form a lane."""

    __slots__ = ("account", "item", "number", "servers", "waits", "work")

    def __init__(
        self,
        account: _Account[Item, Server],
        item: Item,
        work: float,
        servers: frozenset[Server],
        number: int,
    ) -> None:
        self.account, self.item, self.work, self.servers, self.number = account, item, work, servers, number
        self.waits = True


class _Account(Generic[Item, Server]):
    """One tenant within a class."""

    __slots__ = ("lanes", "level", "row", "tag", "waiting", "weight")

    def __init__(self, level: _Class[Item, Server]) -> None:
        self.level = level
        self.weight = 1.0
        self.tag = -inf  # it has had nothing yet
        self.waiting = 0
        self.lanes: dict[frozenset[Server], OrderedDict[int, Ticket[Item, Server]]] = {}
        self.row: _Row[Item, Server] | None = None  # its entry in the heap; every other one of it is out of date

    def first(self, fits: Callable[[frozenset[Server]], bool]) -> Ticket[Item, Server] | None:
        heads = [next(iter(lane.values())) for servers, lane in self.lanes.items() if fits(servers)]
        return min(heads, key=_number) if heads else None

    def last(self) -> Ticket[Item, Server]:
        return max((next(reversed(lane.values())) for lane in self.lanes.values()), key=_number)

    def add(self, ticket: Ticket[Item, Server]) -> None:
        lane = self.lanes.setdefault(ticket.servers, OrderedDict())
        lane[ticket.number] = ticket
        if ticket.number < 0:
            lane.move_to_end(ticket.number, last=False)
        self.waiting += 1

    def drop(self, ticket: Ticket[Item, Server]) -> None:
        ticket.waits = False
        lane = self.lanes[ticket.servers]
        del lane[ticket.number]
        if not lane:
            del self.lanes[ticket.servers]
        self.waiting -= 1


class _Class(Generic[Item, Server]):
    """The tenants of one priority."""

    def __init__(self, credit: float) -> None:
        self.credit = credit
        self.accounts: dict[str, _Account[Item, Server]] = {}
        self.lanes: dict[frozenset[Server], int] = {}  # how many wait in each
        self.waiting = 0
        self.time = 0.0  # virtual: the tag that was served last
        self._heap: list[_Row[Item, Server]] = []
        self._clean_at = SLACK
        self._ties = count()

    def open(self, tenant: str, weight: float) -> _Account[Item, Server]:
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = _Account(self)
        account.weight = weight
        return account

    def add(self, ticket: Ticket[Item, Server]) -> None:
        account = ticket.account
        account.add(ticket)
        self.waiting += 1
        self.lanes[ticket.servers] = self.lanes.get(ticket.servers, 0) + 1
        if account.row is None:
            account.tag = max(account.tag, self.time - self.credit)
            self.enter(account)

    def enter(self, account: _Account[Item, Server]) -> None:
        account.row = (account.tag, next(self._ties), account)
        heappush(self._heap, account.row)
        self._tidy()

    def remove(self, ticket: Ticket[Item, Server]) -> None:
        account = ticket.account
        account.drop(ticket)
        if not account.waiting:
            account.row = None
        self.waiting -= 1
        self.lanes[ticket.servers] -= 1
        if not self.lanes[ticket.servers]:
            del self.lanes[ticket.servers]
        if not self.waiting:
            # Nobody waits, so nobody was kept waiting: debts end here, or a burst would be held against its tenant
            # hours later.
            self.accounts.clear()
            self._heap.clear()
            self.time = 0.0

    def take(self, fits: Callable[[frozenset[Server]], bool]) -> Ticket[Item, Server] | None:
        if not any(fits(servers) for servers in self.lanes):
            return None
        passed, heap = [], self._heap
        found = None
        while heap and found is None:
            row = heappop(heap)
            account = row[2]
            if account.row is row:
                found = account.first(fits)
                if found is None:
                    passed.append(row)  # none of its requests can use the place: it keeps its turn
        for row in passed:
            heappush(heap, row)
        if found is None:
            return None
        account = found.account
        self.time = max(self.time, account.tag)
        account.tag += found.work / account.weight
        account.row = None
        self.remove(found)
        if account.waiting:
            self.enter(account)
        return found

    def _tidy(self) -> None:
        """Forgets what is out of date once there may be as much of it as of the rest."""
        if len(self._heap) + len(self.accounts) <= self._clean_at:
            return
        for name, account in list(self.accounts.items()):
            if not account.waiting and account.tag <= self.time - self.credit:
                del self.accounts[name]
        self._heap = [row for row in self._heap if row[2].row is row]
        heapify(self._heap)
        self._clean_at = 2 * (len(self._heap) + len(self.accounts)) + SLACK


class FairQueue(Generic[Item, Server]):
    """Waiting requests in the order in which they are to be served."""

    def __init__(self, credit: float = 0.0) -> None:
        """`credit`: work, for each unit of weight, that a tenant can catch up on when it comes back."""
        self._credit = credit
        self._classes: dict[int, _Class[Item, Server]] = {}
        self._order: list[int] = []  # negated priorities, so that the highest comes first
        self._numbers = count(1)
        self.waiting = 0

    def push(
        self,
        item: Item,
        tenant: str,
        servers: frozenset[Server],
        *,
        weight: float = 1.0,
        priority: int = 0,
        work: float = 1.0,
        front: bool = False,
    ) -> Ticket[Item, Server]:
        """Adds a request. `work`: what it is expected to cost. `front`: before the tenant's others."""
        level = self._classes.get(priority)
        if level is None:
            level = self._classes[priority] = _Class(self._credit)
            insort(self._order, -priority)
        number = next(self._numbers)
        ticket = Ticket(level.open(tenant, weight), item, work, servers, -number if front else number)
        level.add(ticket)
        self.waiting += 1
        return ticket

    def remove(self, ticket: Ticket[Item, Server]) -> None:
        """Forgets a request that waits, wherever it stands; nothing is charged for it."""
        ticket.account.level.remove(ticket)
        self.waiting -= 1

    def take(self, server: Server) -> Ticket[Item, Server] | None:
        """Removes and charges the next request that this server can serve. Those before it that it cannot serve keep
        their turn."""
        for negated in self._order:
            ticket = self._classes[-negated].take(lambda servers: server in servers)
            if ticket is not None:
                self.waiting -= 1
                return ticket
        return None

    def settle(self, ticket: Ticket[Item, Server], work: float) -> None:
        """Replaces what a request that was taken was expected to cost by what it has cost."""
        account = ticket.account
        account.tag += (work - ticket.work) / account.weight
        ticket.work = work
        if account.row is not None:
            account.level.enter(account)

    def servers(self) -> set[Server]:
        """Everyone who could serve somebody who waits."""
        return {server for level in self._classes.values() for servers in level.lanes for server in servers}

    def wants(self, server: Server, priority: int) -> bool:
        """Whether somebody of this class or a higher one waits for that server."""
        return any(
            server in servers
            for negated in self._order
            if -negated >= priority
            for servers in self._classes[-negated].lanes
        )

    def ahead(self, tenant: str, priority: int) -> int:
        """Requests that are certain to be served before a new one of this tenant, unless somebody leaves."""
        above = sum(self._classes[-negated].waiting for negated in self._order if -negated > priority)
        level = self._classes.get(priority)
        account = level.accounts.get(tenant) if level is not None else None
        return above + (account.waiting if account is not None else 0)

    def displace(self, tenant: str, weight: float, priority: int) -> Ticket[Item, Server] | None:
        """Makes room for one more request of this tenant: removes the newest of whoever takes up the most room, of the
        lowest class first. None when that would be the tenant itself or one above it. Looks at every waiting tenant of
        one class: for queues that are full, where the alternative is a refusal."""
        lowest = next(self._occupied(), None)
        if lowest is None or lowest > priority:
            return None
        accounts = self._classes[lowest].accounts
        heaviest = max((one for one in accounts.values() if one.waiting), key=_room)
        if lowest == priority:
            own = accounts.get(tenant)
            if ((own.waiting if own is not None else 0) + 1) / weight >= _room(heaviest):
                return None
        ticket = heaviest.last()
        self.remove(ticket)
        return ticket

    def _occupied(self) -> Iterator[int]:
        """Priorities of those who wait, the lowest first."""
        return (-negated for negated in reversed(self._order) if self._classes[-negated].waiting)


def _number(ticket: Ticket[Item, Server]) -> int:
    return ticket.number


def _room(account: _Account[Item, Server]) -> float:
    return account.waiting / account.weight
