"""The gateway, in virtual time: its own code decides, on its own records. What is written anew here is only the order
of calls that `gateway.state`, `gateway.forward` and `gateway.attempt` make around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random

from backends.base import OpenAICompatible, Operation
from gateway.errors import GatewayError, ModelBusy
from gateway.fleet import LoadTable
from gateway.forward import MOST_ATTEMPTS
from gateway.prefixes import ENDS, NOTHING, Chain, PrefixIndex
from gateway.probe import INTERVAL
from gateway.replica_state import Health, ReplicaState
from gateway.retries import RetryBudget
from gateway.routing import Ask, choose
from gateway.types import Endpoint, Model, Replica, Tenant, Timeouts
from gateway.waiting import Waiter, WaitingRoom, Wish
from tests.sim.clock import Clock
from tests.sim.engine import BLOCK, WIRE, Engine, Job, Mood
from tests.sim.rivals import RIVALS, Ledger
from tests.sim.workload import Request

LOOK = 0.25  # seconds between two looks at what follows from time alone
RETRY_RATIO = 0.2  # the default of `routing.retry_budget`
INDEX = 64 << 20  # bytes, the default of `routing.prefix_index`
LETTERS = 4  # characters of a token
BASE = Replica("r", "m", OpenAICompatible(), Endpoint("h", 80), "", "m", Timeouts(), {})


class Front:
    """One gateway before one model's replicas."""

    def __init__(self, clock: Clock, engines: Sequence[Engine], policy: str, random: Random, most: int | None) -> None:
        """`most`: max_inflight of each replica; beyond that requests wait in the gateway."""
        self.clock, self._random = clock, random
        self.engines = {f"m/{number}": engine for number, engine in enumerate(engines)}
        replicas = tuple(replace(BASE, id=name, max_inflight=most) for name in self.engines)
        self.model = Model("m", (), policy, (), (), replicas, 512, 0)
        self.table = LoadTable()
        self.table.adopt(replicas)
        self.states = self.table.able(self.model, Operation.CHAT)
        self.room = WaitingRoom()
        self.retries = RetryBudget(RETRY_RATIO)
        self.index = PrefixIndex(INDEX)
        self.ledger = Ledger()
        self._turn = -1
        for state in self.states:
            self._poll(state)
            clock.every(lambda: INTERVAL * random.uniform(0.8, 1.2), lambda state=state: self._poll(state))
        clock.every(lambda: LOOK, self._look_over)

    # --- requests
    def arrive(self, request: Request) -> None:
        request.arrived = self.clock.now
        self.retries.asked()
        self.go(request)

    def go(self, request: Request) -> None:
        """One attempt, a wait for a place, or the end of all attempts."""
        try:
            if self.room.depth:
                raise ModelBusy
            Attempt(self, request, self._choose(request))
        except ModelBusy:
            self._wait(request)
        except GatewayError:
            request.fail(self.clock.now)

    def _choose(self, request: Request) -> ReplicaState:
        self._turn += 1
        if self.model.policy in RIVALS:
            return self.ledger.choose(RIVALS[self.model.policy], self.states, self._random.getrandbits(30))
        ask = Ask(self.clock.now, self._turn, self._random.getrandbits(30), request.attempts)
        if self.model.policy == "prefix_affinity":
            chain = chain_of(request)
            ask = ask._replace(warm=self.index.warm(chain), prompt=chain.length)
        elif self.model.policy == "session_affinity":
            ask = ask._replace(session=request.session)
        return choose(self.model, self.states, ask)

    def _wait(self, request: Request) -> None:
        states = frozenset(state for state in self.states if state.replica.id not in request.attempts)
        tenant, work = tenant_of(request.tenant), request.prompt + request.answer
        wish = Wish("m", tenant, work, states, self.most_waiting, self.patience, bool(request.attempts))
        waiter: Waiter

        def wake() -> None:
            self.clock.after(0.0, ended)

        def ended() -> None:
            if waiter.state is None:
                request.fail(self.clock.now)
            else:
                Attempt(self, request, waiter.state, waiter)

        try:
            waiter = self.room.join(wish, self.clock.now, wake)
        except ModelBusy:
            request.fail(self.clock.now)
            return
        self.clock.after(self.patience, lambda: self.room.leave(waiter))

    most_waiting, patience = 64, 30.0  # the defaults of `models[].queue`

    # --- what the gateway does beside requests
    def _look_over(self) -> None:
        self.table.look_over(self.clock.now)
        self.room.look_over(self.clock.now)
        self.retries.forget(LOOK)

    def _poll(self, state: ReplicaState) -> None:
        """The engine is read now, and its word arrives later."""
        engine = self.engines[state.replica.id]
        mood, load = engine.mood, engine.load()

        def heard() -> None:
            now = self.clock.now
            if mood is Mood.UP:
                state.probe_succeeded(now)
                state.load_read(load, now)
            else:
                state.probe_failed(Health.LOADING if mood is Mood.LOADING else Health.DOWN, mood, now)
                self.index.forget(state.replica.id)

        self.clock.after(5 * WIRE, heard)


class Attempt:
    """One request to one replica."""

    def __init__(self, front: Front, request: Request, state: ReplicaState, waiter: Waiter | None = None) -> None:
        """`waiter`: whose place this is, if it had to wait for one."""
        self._front, self._request, self._state, self._waiter = front, request, state, waiter
        self._sent, self._first = front.clock.now, 0.0
        self._trial = waiter.trial if waiter is not None else state.begin()
        self._reading = not request.whole
        if self._reading:
            state.begin_reading()
        name = request.replica = state.replica.id
        request.sent = request.sent or self._sent
        request.attempts.append(name)
        front.ledger.begun(name, request.prompt + request.answer)
        self._cold = 0
        if front.model.policy == "prefix_affinity":
            chain = chain_of(request)
            cold = front.index.add(name, chain)
            self._cold = cold if 2 * cold >= chain.length else 0
        engine = front.engines[name]
        front.clock.after(WIRE, lambda: engine.submit(Job(request.prompt, request.answer, request.blocks, self)))

    def first_token(self) -> None:
        self._first = self._request.first = self._front.clock.now
        self._read()

    def done(self) -> None:
        now, answer = self._front.clock.now, self._request.answer
        ttft = tpot = None
        if not self._request.whole:
            ttft = self._first - self._sent
            tpot = (now - self._first) / (answer - 1) if answer > 1 else None
        self._leave(self._request.prompt + answer, now - self._sent)
        self._state.succeeded(now, self._sent, ttft, tpot, answer, trial=self._trial, cold=self._cold)
        self._request.finish(now)

    def broke(self) -> None:
        now, request = self._front.clock.now, self._request
        self._read()
        self._leave(0, None)
        self._state.failed(now, trial=self._trial)
        if not self._first and len(request.attempts) < MOST_ATTEMPTS and self._front.retries.take():
            self._front.go(request)
        else:
            request.fail(now)

    def _read(self) -> None:
        if self._reading:
            self._reading = False
            self._state.end_reading()

    def _leave(self, tokens: int, seconds: float | None) -> None:
        room, now, request = self._front.room, self._front.clock.now, self._request
        self._state.end(self._trial)
        self._front.ledger.ended(self._state, request.prompt + request.answer, seconds)
        if self._waiter is not None:
            room.settle(self._waiter, tokens)
        if room.depth:
            room.offer(self._state, now)


@cache
def tenant_of(name: str) -> Tenant:
    return Tenant(name)


def chain_of(request: Request) -> Chain:
    """What `gateway.prefixes.chain_of` makes of a text whose blocks are these, without the text."""
    if request.chain is None:
        hashes, link, begin = [], 0, 0
        for end in ENDS:
            blocks = end // (BLOCK * LETTERS)
            if blocks > request.prompt // BLOCK:
                break
            link = hash((link, request.blocks[begin:blocks]))
            hashes.append(link)
            begin = blocks
        request.chain = Chain(tuple(hashes), request.prompt * LETTERS) if hashes else NOTHING
    return request.chain
