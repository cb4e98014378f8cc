"""Asks engines for health and load, through the paths their adapters name. Never generates, never loads a model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import time

import httpx

from gateway.fleet import Health, LoadTable, ReplicaState
from gateway.types import Endpoint, Replica
from gateway.upstream import tls_context

INTERVAL = 5.0  # seconds between two rounds, give or take a fifth
STARTING_INTERVAL = 0.5  # while a replica loads its model
TIMEOUT = 3.0  # seconds for one answer
LARGEST_ANSWER = 4 * 1024 * 1024  # bytes

log = logging.getLogger("sekisho.probe")


class Prober:
    """One task that goes round the fleet. It also knows whether anything ever was ready."""

    def __init__(self, fleet: LoadTable) -> None:
        self._fleet = fleet
        self._clients: dict[Endpoint, httpx.AsyncClient] = {}
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
            await self._forget({state.replica.endpoint for state in states})
            loading = any(state.health is not Health.UP and state.replica.embedded for state in self._fleet)
            pause = (STARTING_INTERVAL if loading else INTERVAL) * random.uniform(0.8, 1.2)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            self._changed.clear()

    async def close(self) -> None:
        await self._forget(set())

    async def _look(self, state: ReplicaState) -> None:
        before = state.health
        try:
            await self._ask(state)
        except (httpx.HTTPError, OSError, ssl.SSLError, TimeoutError) as error:
            # An embedded engine that does not listen yet is on its way up.
            health = Health.LOADING if state.replica.embedded is not None else Health.DOWN
            state.probe_failed(health, type(error).__name__)
        except Exception:
            log.exception("probing %s failed", state.replica.id)
        if state.health is not before:
            log.info("replica %s is %s%s", state.replica.id, state.health, f" ({state.detail})" if state.detail else "")

    async def _ask(self, state: ReplicaState) -> None:
        backend = state.replica.backend
        if backend.probes.health is not None:
            status, body = await self._get(state.replica, backend.probes.health)
            if not backend.is_ready(status, body):
                health = Health.LOADING if backend.read_failure(status, body).kind == "loading" else Health.DOWN
                state.probe_failed(health, f"status {status}")
                return
        state.probe_succeeded()
        if backend.probes.load is not None:
            status, body = await self._get(state.replica, backend.probes.load)
            if status == 200:
                state.load, state.load_read_at = backend.read_load(body), time.monotonic()

    async def _get(self, replica: Replica, path: str) -> tuple[int, bytes]:
        client = self._clients.get(replica.endpoint)
        if client is None:
            client = self._clients[replica.endpoint] = _client(replica.endpoint)
        headers = {"authorization": f"Bearer {replica.api_key}"} if replica.api_key else {}
        async with asyncio.timeout(TIMEOUT), client.stream("GET", replica.prefix + path, headers=headers) as answer:
            body = b""
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > LARGEST_ANSWER:
                    break
            return answer.status_code, body

    async def _forget(self, wanted: set[Endpoint]) -> None:
        for endpoint in [endpoint for endpoint in self._clients if endpoint not in wanted]:
            await self._clients.pop(endpoint).aclose()


def _client(endpoint: Endpoint) -> httpx.AsyncClient:
    scheme = "https" if endpoint.tls else "http"
    return httpx.AsyncClient(
        base_url=f"{scheme}://{endpoint.authority}",
        timeout=TIMEOUT,
        trust_env=False,  # a proxy from the environment has no business between a gateway and its engines
        transport=httpx.AsyncHTTPTransport(
            uds=endpoint.unix, verify=tls_context(endpoint) if endpoint.tls else False, trust_env=False
        ),
    )
