"""The queue: who is next, what is handed to whom, and that nothing is lost or counted twice in any order of events."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import OpenAICompatible
from gateway.errors import ModelBusy
from gateway.fairness import FairQueue, Ticket
from gateway.replica_state import Health, ReplicaState
from gateway.types import Endpoint, Replica, Tenant, Timeouts
from gateway.waiting import STALE, Pace, Waiter, WaitingRoom, Wish

Queue = FairQueue[Any, str]
ANY = frozenset({"a"})
TENANTS = "xyz"
WEIGHTS = {"x": 1.0, "y": 2.0, "z": 0.5}
CREDITS = st.sampled_from([0.0, 0.0, 30.0])


def push(queue: Queue, tenant: str, **more: Any) -> Ticket[Any, str]:
    more.setdefault("servers", ANY)
    return queue.push(more.pop("item", tenant), tenant, **more)


def order(queue: Queue, server: str = "a") -> str:
    """Items in the order in which they are served."""
    found = []
    while (ticket := queue.take(server)) is not None:
        found.append(ticket.item)
    return "".join(found)


# --- the order
@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 50), st.booleans()), max_size=80), CREDITS)
def test_tenants_that_wait_get_work_by_weight_to_within_one_request_each(
    events: list[tuple[str, int, bool]], credit: float
) -> None:
    """Over every stretch of time in which both of two tenants wait, for every order of arrivals and services."""
    queue = Queue(credit)
    largest: dict[str, int] = defaultdict(int)
    for tenant, work, _ in events:
        largest[tenant] = max(largest[tenant], work)
    waiting, served = dict.fromkeys(TENANTS, 0), dict.fromkeys(TENANTS, 0.0)
    stretches: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairwise("xyzx")}

    def look() -> None:
        for (one, other), seen in stretches.items():
            if not (waiting[one] and waiting[other]):
                seen.clear()
                continue
            seen.append(served[one] / WEIGHTS[one] - served[other] / WEIGHTS[other])
            bound = largest[one] / WEIGHTS[one] + largest[other] / WEIGHTS[other] + credit
            assert max(seen) - min(seen) <= bound + 1e-6

    def serve() -> None:
        ticket = queue.take("a")
        assert ticket is not None
        waiting[ticket.item] -= 1
        served[ticket.item] += ticket.work
        look()

    for tenant, work, then_serve in events:
        push(queue, tenant, weight=WEIGHTS[tenant], work=float(work))
        waiting[tenant] += 1
        look()
        if then_serve:
            serve()
    while queue.waiting:
        serve()


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(-1, 1)), max_size=40))
def test_higher_classes_come_first_and_a_tenants_requests_in_order(arrivals: list[tuple[str, int]]) -> None:
    queue = FairQueue[tuple[str, int, int], str]()
    for number, (tenant, priority) in enumerate(arrivals):
        queue.push((tenant, priority, number), tenant, ANY, priority=priority)
    served = []
    while (ticket := queue.take("a")) is not None:
        served.append(ticket.item)
    assert [item[1] for item in served] == sorted((item[1] for item in served), reverse=True)
    for tenant in TENANTS:
        for priority in (-1, 0, 1):
            numbers = [item[2] for item in served if item[:2] == (tenant, priority)]
            assert numbers == sorted(numbers)
    assert len(served) == len(arrivals)


SERVERS = st.sampled_from([frozenset("a"), frozenset("b"), frozenset("ab")])
ARRIVAL = st.tuples(st.just("push"), st.sampled_from(TENANTS), SERVERS, st.integers(-1, 1), st.booleans())
SERVICE = st.tuples(st.just("take"), st.sampled_from("ab"))
LEAVING = st.tuples(st.just("remove"), st.integers(0, 100))
COST = st.tuples(st.just("settle"), st.integers(0, 100), st.integers(0, 500))


@settings(max_examples=300)
@given(st.lists(st.one_of(ARRIVAL, ARRIVAL, SERVICE, LEAVING, COST), max_size=100))
def test_nobody_is_lost_or_served_twice_and_a_place_is_left_only_when_nobody_can_use_it(steps: list[Any]) -> None:
    queue = Queue()
    here: list[Ticket[Any, str]] = []
    gone: list[Ticket[Any, str]] = []
    for step in steps:
        match step:
            case ("push", tenant, servers, priority, front):
                here.append(
                    push(queue, tenant, item=priority, servers=servers, priority=priority, front=front, work=7.0)
                )
            case ("take", server):
                able = [ticket for ticket in here if server in ticket.servers]
                ticket = queue.take(server)
                assert (ticket is None) == (not able)
                if ticket is not None:
                    assert ticket in able and ticket.item == max(one.item for one in able)
                    here.remove(ticket)
                    gone.append(ticket)
            case ("remove", place) if here:
                ticket = here.pop(place % len(here))
                queue.remove(ticket)
            case ("settle", place, work) if gone:
                queue.settle(gone[place % len(gone)], float(work))
        assert queue.waiting == len(here) and all(ticket.waits for ticket in here)
        assert queue.servers() == {server for ticket in here for server in ticket.servers}
    for server in "ab":
        while (ticket := queue.take(server)) is not None:
            here.remove(ticket)
    assert not here and queue.waiting == 0


def test_a_request_that_cannot_use_a_place_keeps_its_turn() -> None:
    queue = Queue()
    push(queue, "x", item="1", servers=frozenset("b"))
    push(queue, "y", item="2")
    push(queue, "y", item="3", servers=frozenset("ab"))
    assert [queue.take("a").item, queue.take("b").item, queue.take("b").item] == ["2", "1", "3"]  # type: ignore[union-attr]


def test_a_second_attempt_goes_before_its_tenants_others_and_not_before_other_tenants() -> None:
    queue = Queue()
    for item in "12":
        push(queue, "x", item=item)
    push(queue, "y", item="A")
    push(queue, "x", item="0", front=True)
    assert order(queue) == "0A12"


def test_what_a_request_has_really_cost_decides_when_its_tenant_is_next() -> None:
    queue = Queue()
    for item in "123":
        push(queue, "x", item=item, work=100.0)
        push(queue, "y", item=item.translate(str.maketrans("123", "ABC")), work=100.0)
    first = queue.take("a")
    assert first is not None and first.item == "1"
    queue.settle(first, 1.0)  # an answer much shorter than it might have been
    assert order(queue) == "A2B3C" or order(queue) == "2A3BC"
    for item in "123":
        push(queue, "x", item=item, work=100.0)
        push(queue, "y", item="ABC"[int(item) - 1], work=100.0)
    first = queue.take("a")
    assert first is not None
    queue.settle(first, 10_000.0)
    assert order(queue) == "ABC23"


def test_a_tenant_that_was_away_has_no_claim_on_the_time_before() -> None:
    queue = Queue()
    for _ in range(10):
        push(queue, "x", work=10.0)
    for _ in range(5):
        queue.take("a")
    for _ in range(5):
        push(queue, "y", work=10.0)
    assert order(queue) in ("yxyxyxyxyx", "xyxyxyxyxy")


def test_one_that_was_passed_over_does_not_turn_the_time_back_for_newcomers() -> None:
    queue = Queue()
    push(queue, "x", servers=frozenset("b"))
    for _ in range(4):
        push(queue, "y", work=10.0)
    served = [queue.take(server) for server in "aaab"]
    assert [ticket.item for ticket in served if ticket is not None] == ["y", "y", "y", "x"]
    for _ in range(3):
        push(queue, "z", work=10.0)
    assert order(queue) in ("zyzz", "zzyz")


def test_a_tenant_that_has_used_less_than_its_share_catches_up_as_far_as_its_credit_goes() -> None:
    queue = Queue(25.0)
    for _ in range(20):
        push(queue, "x", work=10.0)
    for _ in range(10):
        queue.take("a")
    for _ in range(6):
        push(queue, "y", work=10.0)
    assert order(queue).startswith(("yyyxyx", "yyyyxy"))


def test_debts_end_when_nobody_waits() -> None:
    queue = Queue()
    push(queue, "x", work=1e6)
    queue.take("a")
    push(queue, "x", item="1", work=1.0)
    push(queue, "y", item="2", work=1.0)
    assert order(queue) == "12"


@pytest.mark.parametrize(
    ("newcomer", "priority", "served"),
    [("y", 0, "xxy"), ("x", 0, "xxx"), ("y", -1, "xxx"), ("x", 1, "xxx"), ("y", 1, "yxx")],
)
def test_in_a_full_queue_room_is_shared_by_class_and_weight(newcomer: str, priority: int, served: str) -> None:
    """The newest request of whoever takes up the most room gives way, unless the newcomer would take up as much."""
    queue = Queue()
    newest = [push(queue, "x") for _ in range(3)][-1]
    displaced = queue.displace(newcomer, 1.0, priority)
    if displaced is not None:
        assert displaced is newest and not displaced.waits
        push(queue, newcomer, priority=priority)
    assert sorted(order(queue)) == sorted(served)
    assert (displaced is not None) == ((newcomer, priority) in [("y", 0), ("x", 1), ("y", 1)])


def test_a_weight_is_a_share_of_the_room_too() -> None:
    queue = Queue()
    for _ in range(2):
        push(queue, "y", weight=2.0)
    assert queue.displace("x", 1.0, 0) is None
    push(queue, "y", weight=2.0)
    displaced = queue.displace("x", 1.0, 0)
    assert displaced is not None and displaced.item == "y"


def calls(act: Callable[[], object]) -> int:
    """Calls of Python and C functions: exact where a timing is noisy."""
    count = 0

    def profile(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_the_number_of_waiting_requests_does_not_change_what_one_costs() -> None:
    costs = []
    for waiting in (20, 20_000):
        queue = Queue()
        tickets = [push(queue, TENANTS[number % 3]) for number in range(waiting)]
        costs.append((
            calls(lambda queue=queue: push(queue, "x")),  # type: ignore[misc]
            calls(lambda queue=queue: queue.take("a")),  # type: ignore[misc]
            calls(lambda queue=queue, ticket=tickets[waiting // 2]: queue.remove(ticket)),  # type: ignore[misc]
        ))  # fmt: skip
    assert costs[0] == costs[1]


def test_heaps_and_tables_stay_small_under_endless_change() -> None:
    queue, most = Queue(), 0
    push(queue, "always")
    for number in range(5000):
        ticket = push(queue, f"t{number}")
        push(queue, "always")
        if number % 2:
            queue.remove(ticket)
        for _ in range(2 - number % 2):
            taken = queue.take("a")
            assert taken is not None
            queue.settle(taken, 0.5)
        level = next(iter(queue._classes.values()))
        most = max(most, len(level._heap) + len(level.accounts))
    assert queue.waiting == 1 and most < 200


# --- handing over
BASE = Replica("m/1", "m", OpenAICompatible(), Endpoint("h", 80), "", "m", Timeouts(), {})


def state(name: str = "m/1", most: int | None = 1) -> ReplicaState:
    return ReplicaState(replace(BASE, id=name, max_inflight=most))


def wish(*states: ReplicaState, tenant: str = "x", **more: Any) -> Wish:
    who = Tenant(tenant, priority=more.pop("priority", 0))
    return Wish(**({"model": "m", "tenant": who, "work": 10.0, "states": frozenset(states), "most": 10,
                    "patience": 30.0} | more))  # fmt: skip


class Room:
    """A waiting room and what its waiters were told."""

    def __init__(self) -> None:
        self.room = WaitingRoom()
        self.woken: list[Waiter | str] = []

    def join(self, *states: ReplicaState, now: float = 0.0, **more: Any) -> Waiter:
        name = more.get("tenant", "x")
        return self.room.join(wish(*states, **more), now, lambda: self.woken.append(name))


def test_a_freed_place_is_taken_before_the_waiter_hears_of_it() -> None:
    lab, one = Room(), state()
    one.begin()
    waiter = lab.join(one)
    assert (lab.room.depth, waiter.state) == (1, None)
    one.end(False)
    lab.room.offer(one, 1.0)
    assert (one.inflight, lab.room.depth, waiter.state, lab.woken) == (1, 0, one, ["x"])
    lab.room.offer(one, 1.0)
    assert one.inflight == 1


def test_a_place_that_is_free_already_is_had_at_once_and_the_shortest_wait_first() -> None:
    lab, slow, quick = Room(), state("m/1", 2), state("m/2", 2)
    slow.unit, slow.wait, quick.unit, quick.wait = 5.0, 5.0, 1.0, 1.0
    assert [lab.join(slow, quick).state for _ in range(4)] == [quick, quick, slow, slow]


@pytest.mark.parametrize("change", ["draining", "down", "paused"])
def test_a_place_at_a_replica_that_may_not_be_asked_is_handed_to_nobody(change: str) -> None:
    lab, one = Room(), state()
    if change == "draining":
        one.set_draining(True, 0.0)
    elif change == "down":
        one.probe_failed(Health.DOWN, "status 500", 0.0)
    else:
        one.asked_to_wait(0.0, 5.0)
    waiter = lab.join(one, now=1.0)
    lab.room.offer(one, 1.0)
    assert waiter.state is None and lab.room.depth == 1
    one.set_draining(False, 10.0)
    for _ in range(5):
        one.probe_succeeded(10.0)
    lab.room.look_over(10.0)
    assert waiter.state is one


def test_a_pause_that_ends_lets_one_waiter_try_and_the_others_wait() -> None:
    lab, one = Room(), state(most=None)
    for _ in range(20):
        one.failed(0.0)
    waiters = [lab.join(one, now=1.0) for _ in range(3)]
    lab.room.look_over(one.paused_until + 0.1)
    assert [waiter.state is one for waiter in waiters] == [True, False, False] and waiters[0].trial


def test_waiters_hold_back_newcomers_of_their_class_and_below_for_the_replicas_they_wait_for() -> None:
    lab, one, other = Room(), state("m/1"), state("m/2")
    one.begin()
    lab.join(one, priority=1)
    assert [lab.room.wants(one, priority) for priority in (0, 1, 2)] == [True, True, False]
    assert not lab.room.wants(other, 0)
    assert not lab.room.wants(ReplicaState(replace(BASE, model="another")), 0)


def test_a_full_queue_refuses_and_lets_a_smaller_tenant_in_for_a_larger_ones_newest() -> None:
    lab, one = Room(), state()
    one.begin()
    waiters = [lab.join(one, most=3) for _ in range(3)]
    with pytest.raises(ModelBusy):
        lab.join(one, most=3)
    lab.join(one, tenant="y", most=3)
    assert (lab.room.depth, lab.woken, waiters[2].state) == (3, ["x"], None)
    assert [waiter.ticket.waits for waiter in waiters] == [True, True, False]


def test_the_hint_follows_from_how_fast_places_come_free() -> None:
    lab, one = Room(), state()
    one.begin()
    for _ in range(10):
        lab.join(one, now=0.0)
    for second in range(1, 7):
        one.end(False)
        lab.room.offer(one, 2.0 * second)  # one place every two seconds
    with pytest.raises(ModelBusy) as full:
        lab.join(one, now=12.0, most=4)
    assert 8.0 <= full.value.retry_after <= 10.0  # type: ignore[operator]
    with pytest.raises(ModelBusy):
        lab.join(one, now=12.0, patience=5.0)  # four of its own are before it: ten seconds
    lab.join(one, now=12.0, patience=5.0, tenant="y")  # its turn may come sooner


def test_nobody_is_refused_on_too_little_or_too_old_knowledge() -> None:
    pace = Pace()
    pace.begins(0.0)
    for second in range(1, 5):
        pace.served(float(second))
    assert pace.wait(3, 4.0) is None
    pace.served(5.0)
    assert pace.wait(3, 5.0) == pytest.approx(3 * 4.524 / 5.524, rel=0.01)
    assert pace.wait(3, 11.0) > pace.wait(3, 5.0)  # type: ignore[operator]
    pace.begins(5.0 + STALE + 1)
    assert pace.wait(3, 5.0 + STALE + 1) is None


def test_what_a_forgotten_queue_still_owes_does_no_harm() -> None:
    lab, one = Room(), state()
    one.begin()
    waiter = lab.join(one)
    one.end(False)
    lab.room.offer(one, 1.0)
    lab.room.look_over(1.0 + 2 * STALE)
    assert not lab.room._lines
    lab.room.settle(waiter, 100)
    one.end(waiter.trial)
    lab.room.offer(one, 2.0)
    assert lab.join(one).state is one


EVENTS = st.one_of(
    st.tuples(st.just("arrives"), st.sampled_from(TENANTS), st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.just("ends"), st.integers(0, 50)),
    st.tuples(st.just("leaves"), st.integers(0, 50)),
    st.tuples(st.just("drains"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("looks")),
)


@settings(max_examples=300)
@given(st.lists(EVENTS, max_size=80))
def test_every_order_of_events_keeps_places_and_waiters_in_step(events: list[Any]) -> None:
    """No replica over its bound, none idle while somebody waits for it, every place and every waiter counted once."""
    lab, states = Room(), [state("m/1", 2), state("m/2", 1)]
    sets = [(states[0],), (states[1],), tuple(states)]
    waiting: list[Waiter] = []
    running: list[tuple[ReplicaState, bool]] = []
    for event in events:
        match event:
            case ("arrives", tenant, which, priority):
                try:
                    waiting.append(lab.join(*sets[which], tenant=tenant, priority=priority, most=6))
                except ModelBusy:
                    assert lab.room.depth == 6
            case ("ends", place) if running:
                one, trial = running.pop(place % len(running))
                one.end(trial)
                lab.room.offer(one, 0.0)
            case ("leaves", place) if waiting:
                lab.room.leave(waiting.pop(place % len(waiting)))
            case ("drains", place, whether):
                states[place].set_draining(whether, 0.0)
            case _:
                lab.room.look_over(0.0)
        running += [(one.state, one.trial) for one in waiting if one.state is not None]
        waiting = [one for one in waiting if one.ticket.waits]
        for one in states:
            assert one.inflight == sum(held is one for held, _ in running) <= one.most
        assert lab.room.depth == len(waiting)
    lab.room.look_over(0.0)
    for one in states:
        idle = one.has_room() and not one.draining
        assert not (idle and any(one in waiter.wish.states for waiter in waiting if waiter.state is None))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_a_storm_of_cancellations_leaves_nothing_behind(seed: int) -> None:
    """Cancelled while waiting, in the moment of the hand-over, and while running."""
    random, room, states = Random(seed), WaitingRoom(), [state("m/1", 2), state("m/2", 1)]
    served = 0

    async def request(number: int) -> None:
        nonlocal served
        waiter = await room.wait(wish(*states, tenant=TENANTS[number % 3], most=1000))
        assert waiter.state is not None
        try:
            for _ in range(random.randrange(4)):
                await asyncio.sleep(0)
            served += 1
        finally:
            waiter.state.end(waiter.trial)
            room.settle(waiter, 5)
            room.offer(waiter.state, time.monotonic())

    async def storm() -> None:
        tasks = []
        for number in range(60):
            tasks.append(asyncio.create_task(request(number)))
            if random.random() < 0.5:
                await asyncio.sleep(0)
            if random.random() < 0.6:
                random.choice(tasks).cancel()
            assert all(one.inflight <= one.most for one in states)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        lost = [result for result in results if result is not None and not isinstance(result, asyncio.CancelledError)]
        assert not lost

    asyncio.run(storm())
    assert [one.inflight for one in states] == [0, 0] and room.depth == 0 and served > 0


def test_a_place_given_to_somebody_who_has_just_left_goes_to_the_next() -> None:
    room, one = WaitingRoom(), state()
    one.begin()

    async def scene() -> None:
        first, second = (asyncio.create_task(room.wait(wish(one))) for _ in range(2))
        await asyncio.sleep(0)
        one.end(False)
        room.offer(one, 0.0)  # it is the first one's now
        first.cancel()
        waiter = await asyncio.wait_for(second, 5)
        assert waiter.state is one and one.inflight == 1
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(scene())
    assert room.depth == 0


def test_patience_ends() -> None:
    room, one = WaitingRoom(), state()
    one.begin()

    async def scene() -> None:
        with pytest.raises(ModelBusy) as busy:
            await asyncio.wait_for(room.wait(wish(one, patience=0.01)), 5)
        assert busy.value.retry_after == 1.0

    asyncio.run(scene())
    one.end(False)
    room.offer(one, 0.0)
    assert (room.depth, one.inflight) == (0, 0)
