"""Asks engines for health and load, through the paths their adapters name. Never generates, never loads a model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time

import httpx

from gateway.engine_client import EngineClient
from gateway.fleet import LoadTable
from gateway.replica_state import Health, ReplicaState
from gateway.tls import TlsFileError, blame
from gateway.types import Replica

INTERVAL = 5.0  # seconds between two looks at a replica, give or take a fifth
STARTING_INTERVAL = 0.5  # while an embedded engine loads its model
RECHECK = 1.0  # when the last look contradicts what is believed
FIRST_LOOK = 1.0  # seconds that the first client waits at most for it, so that it is not told "starting"
AT_ONCE = 64  # replicas that are being asked at the same time

UNREACHABLE = (httpx.HTTPError, OSError, TimeoutError, TlsFileError)

log = logging.getLogger("sekisho.probe")


class Prober:
    """One task for each replica, each on a schedule of its own, so that none waits for the time-outs of another and
    many engines are not asked in the same moment. It also knows whether anything ever was ready."""

    def __init__(self, fleet: LoadTable) -> None:
        self._fleet = fleet
        self._client = EngineClient()
        self._watched: dict[ReplicaState, tuple[Replica, asyncio.Task[None]]] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._changed = asyncio.Event()
        self.served = False  # some replica has been ready once

    def wake(self) -> None:
        """The fleet has changed: members that are new or look different are asked at once."""
        self._changed.set()

    async def first_look(self) -> None:
        """Returns when a replica is up, when there is none whose state is unknown, or after `FIRST_LOOK` seconds."""
        deadline = time.monotonic() + FIRST_LOOK
        while time.monotonic() < deadline:
            found = {state.health for state in self._fleet}
            if Health.UP in found or Health.UNKNOWN not in found:
                return
            await asyncio.sleep(0.01)

    async def run(self) -> None:
        while True:
            self._changed.clear()
            states = set(self._fleet)
            same = {state for state, (seen, _) in self._watched.items() if state in states and state.replica == seen}
            await self._stop(set(self._watched) - same)
            await self._client.forget({state.replica.endpoint for state in states})
            for state in states - same:
                task = asyncio.get_running_loop().create_task(self._watch(state))
                self._watched[state] = state.replica, task
            await self._changed.wait()

    async def close(self) -> None:
        await self._stop(set(self._watched))
        await self._client.forget(set())

    async def _stop(self, states: set[ReplicaState]) -> None:
        tasks = [self._watched.pop(state)[1] for state in states]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, state: ReplicaState) -> None:
        async with self._turns:
            await self._look(state)
        # All replicas of a configuration are new in the same moment: from here on they are asked at different ones.
        pause = _pause(state) * random.random()
        while True:
            await asyncio.sleep(pause)
            async with self._turns:
                await self._look(state)
            pause = _pause(state) * random.uniform(0.8, 1.2)

    async def _look(self, state: ReplicaState) -> None:
        before = state.health
        try:
            if await self._is_ready(state):
                await self._read_more(state)
        except Exception:
            log.exception("probing %s failed", state.replica.id)
        self.served = self.served or state.health is Health.UP
        if state.health is not before:
            log.info("replica %s is %s%s", state.replica.id, state.health, f" ({state.detail})" if state.detail else "")

    async def _is_ready(self, state: ReplicaState) -> bool:
        backend = state.replica.backend
        if backend.probes.health is not None:
            try:
                status, body = await self._get(state, backend.probes.health)
            except UNREACHABLE as error:
                # An embedded engine that does not listen yet is on its way up, unless it has said that it cannot.
                embedded = state.replica.embedded is not None
                health = Health.LOADING if embedded and not state.hopeless else Health.DOWN
                state.probe_failed(health, blame(error) or type(error).__name__, time.monotonic())
                return False
            if not backend.is_ready(status, body):
                health = Health.LOADING if backend.read_failure(status, body).kind == "loading" else Health.DOWN
                state.probe_failed(health, f"status {status}", time.monotonic())
                return False
        state.probe_succeeded(time.monotonic())
        return True

    async def _read_more(self, state: ReplicaState) -> None:
        """What else there is to know. An engine that does not say it, or not in time, is ready all the same."""
        backend = state.replica.backend
        with contextlib.suppress(*UNREACHABLE):
            if state.card is None and backend.probes.models is not None:
                await self._read_card(state, backend.probes.models)
        with contextlib.suppress(*UNREACHABLE):
            if backend.probes.load is not None:
                status, body = await self._get(state, backend.probes.load)
                if status == 200:
                    state.load_read(backend.read_load(body), time.monotonic())

    async def _read_card(self, state: ReplicaState, path: str) -> None:
        """What the engine says of the model, once; an engine that says nothing useful is asked again the next time."""
        status, body = await self._get(state, path)
        if status == 200:
            with contextlib.suppress(ValueError):
                cards = state.replica.backend.read_models(body)
                named = [card for card in cards if card.id == state.replica.upstream_model]
                if found := named or (cards if len(cards) == 1 else ()):
                    state.card = found[0]

    async def _get(self, state: ReplicaState, path: str) -> tuple[int, bytes]:
        replica = state.replica
        return await self._client.get(replica.endpoint, replica.prefix + path, replica.api_key)


def _pause(state: ReplicaState) -> float:
    if state.replica.embedded is not None and state.health is not Health.UP:
        return STARTING_INTERVAL
    return RECHECK if state.undecided else INTERVAL
