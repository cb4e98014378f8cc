"""A moment of a race that no socket can be made to hit; tests/e2e/test_hedging.py has the rest."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from backends.base import OpenAICompatible, Operation
from gateway.call import parse_call
from gateway.edge.cycle import HotCycle
from gateway.hedge import Race
from gateway.outcome import Outcome
from gateway.replica_state import ReplicaState
from gateway.types import Endpoint, Replica, Timeouts


@pytest.mark.parametrize("taken", [False, True], ids=["new place", "place handed over"])
def test_an_attempt_that_is_stopped_before_its_first_step_gives_its_place_back(taken: bool) -> None:
    state = ReplicaState(Replica("m/r", "m", OpenAICompatible(), Endpoint("h", 80), "", "x", Timeouts(), {}))
    offered: list[ReplicaState] = []
    waiting = SimpleNamespace(depth=1, offer=lambda state, now: offered.append(state))
    gateway: Any = SimpleNamespace(waiting=waiting)
    model: Any = None
    connection: Any = SimpleNamespace(transport=SimpleNamespace(write=None))
    call = parse_call(Operation.CHAT, b'{"model":"m","messages":[{"role":"user","content":"x"}]}')

    async def stop_at_once() -> None:
        cycle = HotCycle(connection, Operation.CHAT, {}, True, True)
        race = Race(gateway, model, call, cycle, Outcome("chat", "req_1", 0.0), state, [], 1.0)
        entry = race._enter(state, state.begin() if taken else None)
        assert state.inflight == 1  # from the moment of the choice on, so that nobody else takes it
        entry.task.cancel()
        await asyncio.wait([entry.task])
        await asyncio.sleep(0)

    asyncio.run(stop_at_once())
    assert state.inflight == 0 and offered == [state]
