"""Asks engines for health and load, through the paths their adapters name. Never generates, never loads a model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import time

import httpx

from gateway.engine_client import EngineClient
from gateway.fleet import Health, LoadTable, ReplicaState

INTERVAL = 5.0  # seconds between two rounds, give or take a fifth
STARTING_INTERVAL = 0.5  # while a replica loads its model

log = logging.getLogger("sekisho.probe")


class Prober:
    """One task that goes round the fleet. It also knows whether anything ever was ready."""

    def __init__(self, fleet: LoadTable) -> None:
        self._fleet = fleet
        self._client = EngineClient()
        self.served = False  # some replica has been ready once
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """The fleet has changed: its new members are asked at once, not in the next round."""
        self._changed.set()

    async def run(self) -> None:
        while True:
            states = list(self._fleet)
            await asyncio.gather(*(self._look(state) for state in states))
            self.served = self.served or any(state.health is Health.UP for state in states)
            await self._client.forget({state.replica.endpoint for state in states})
            loading = any(state.health is not Health.UP and state.replica.embedded for state in self._fleet)
            pause = (STARTING_INTERVAL if loading else INTERVAL) * random.uniform(0.8, 1.2)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            self._changed.clear()

    async def close(self) -> None:
        await self._client.forget(set())

    async def _look(self, state: ReplicaState) -> None:
        before = state.health
        try:
            await self._ask(state)
        except (httpx.HTTPError, OSError, ssl.SSLError, TimeoutError) as error:
            # An embedded engine that does not listen yet is on its way up.
            health = Health.LOADING if state.replica.embedded is not None else Health.DOWN
            state.probe_failed(health, type(error).__name__, time.monotonic())
        except Exception:
            log.exception("probing %s failed", state.replica.id)
        if state.health is not before:
            log.info("replica %s is %s%s", state.replica.id, state.health, f" ({state.detail})" if state.detail else "")

    async def _ask(self, state: ReplicaState) -> None:
        backend = state.replica.backend
        if backend.probes.health is not None:
            status, body = await self._get(state, backend.probes.health)
            if not backend.is_ready(status, body):
                health = Health.LOADING if backend.read_failure(status, body).kind == "loading" else Health.DOWN
                state.probe_failed(health, f"status {status}", time.monotonic())
                return
        state.probe_succeeded(time.monotonic())
        if state.card is None and backend.probes.models is not None:
            await self._read_card(state, backend.probes.models)
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
