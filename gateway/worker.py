"""One serving process: its parts, how they follow the configuration, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from gateway import admin
from gateway.api import create_app
from gateway.build import version
from gateway.config import StartupError
from gateway.content.log import Contents
from gateway.edge.handshake import TlsPort
from gateway.edge.protocol import Edge
from gateway.edge.settings import edge_settings
from gateway.listening import BACKLOG
from gateway.logs import AccessLog
from gateway.metrics import Metrics
from gateway.people import People
from gateway.pipeline import serve
from gateway.probe import Prober
from gateway.records import Changes
from gateway.snapshot import Snapshot
from gateway.state import Gateway
from gateway.stores import Stores
from gateway.tokens import Tokens
from gateway.tracing.tracer import Tracer
from gateway.upstream import TICK, Upstream
from gateway.workers.peers import Alone, Peers
from gateway.workers.places import Places

TIDY_EVERY = 60.0  # seconds between two full collections; by itself the collector would come once in hours

log = logging.getLogger("sekisho")


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process with the signal instead of an exit code."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Worker:
    """Created inside the event loop, since most parts want it."""

    def __init__(
        self, first: Snapshot, folder: Path, listener: socket.socket, places: Places | None = None,
        log_lock: Path | None = None,
    ) -> None:  # fmt: skip
        """Args: folder: of the configuration. places: requests that other workers have open. log_lock: file whose lock
        keeps the lines of several workers apart."""
        config = first.config
        self._listener, self._first = listener, first
        self._tenants = config.tenants
        self._background: set[asyncio.Task[None]] = set()
        self._problem: str | None = None
        self.metrics = Metrics(version())
        self._access_log = AccessLog(config.logging.format, sys.stdout.buffer, log_lock)
        self._contents = Contents(self._access_log)
        self._upstream = Upstream(config.server.max_response)
        self.stores = Stores(config, folder, self._people_changed)
        self._tokens = Tokens()
        self.gateway = gateway = Gateway(
            first, self.metrics, self._access_log, self._upstream, self.stores.limiter, self._tokens,
            self.stores.usage, places,
        )  # fmt: skip
        self._tracer = Tracer(version())
        self._tracer.adopt(config)
        self.prober = Prober(gateway.fleet)
        self._edge = Edge(lambda cycle: serve(gateway, cycle), edge_settings(config))
        self.metrics.add_gauges(lambda: gateway.fleet.gauges(time.monotonic()))
        self.metrics.add_gauges(lambda: gateway.waiting.gauges(gateway.snapshot.models))
        self.metrics.add_gauges(self.stores.gauges)
        self.metrics.add_gauges(self._tracer.gauges)
        self.metrics.add_gauges(self._contents.families)
        app = create_app(gateway, version(), [admin.router])
        app.state.stores = self.stores
        self._app = app
        self.peers = Alone()
        self._port = TlsPort(self._edge, config.server.tls) if config.server.tls is not None else None
        if self._port is not None:
            self.metrics.add_gauges(self._port.gauges)
        self._server = _Server(
            uvicorn.Config(
                app, http=(self._port or self._edge).protocol, ws="none", lifespan="off",  # type: ignore[arg-type]
                log_config=None, access_log=False, server_header=False, proxy_headers=False, backlog=BACKLOG,
                timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        self.adopt(first)

    @property
    def peers(self) -> Peers:
        """The other workers of this gateway, for what concerns all of them."""
        return self._peers

    @peers.setter
    def peers(self, peers: Peers) -> None:
        self._peers = self._app.state.peers = self.stores.peers = peers

    async def serve(self) -> None:
        """Until it is stopped. Raises: StartupError."""
        try:
            await self.stores.start()
            await self.stores.seed_budgets(self.gateway.snapshot)
            tasks = [asyncio.create_task(work) for work in (self.prober.run(), self._tick(), self.stores.run())]
            gc.collect()
            gc.freeze()  # what start-up made lives for ever: the collector need not walk it
            gc.set_threshold(50_000, 20, 100)
            try:
                await self.prober.first_look()  # a worker that takes the place of another is ready when it is reached
                await self._server.serve(sockets=[self._listener])
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await self._close()
        if self._problem is not None:
            raise StartupError(self._problem)

    async def _close(self) -> None:
        await self.prober.close()
        self._upstream.close()
        self.gateway.book()
        self._tracer.close()
        await self._tokens.close()
        await self.stores.close()
        self._contents.close()
        self._access_log.close()

    # --- configuration
    def adopt(self, snapshot: Snapshot) -> None:
        """Puts a configuration into force, without a pause in between."""
        people = self.gateway.snapshot.people
        self._tenants = snapshot.config.tenants
        if snapshot.people.stored_keys is not people.stored_keys:  # the database has changed while this was compiled
            snapshot = snapshot.with_people(people.with_file(self._tenants))
        replicas = list(snapshot.replicas())
        self.gateway.fleet.adopt(replicas)
        self.gateway.tracer = self._tracer.followed(snapshot.config)
        self.gateway.content = self._contents.adopt(snapshot.config.logging)
        self.prober.wake()
        self.stores.adopt(snapshot.config)
        self._adopt_people(snapshot)
        self.gateway.look_over(time.monotonic())  # routing's settings are in force at once
        self._edge.settings = edge_settings(snapshot.config)
        self._upstream.max_response = snapshot.config.server.max_response
        if self._port is not None:
            self._port.adopt(snapshot.config.server.tls)
        wanted = {replica.endpoint for replica in replicas}
        self._upstream.retire(wanted.__contains__)

    def _people_changed(self, changes: Changes, whole: bool) -> None:
        """The database has told of tenants or keys. `whole`: that is all it holds, and nothing else counts any more."""
        people = self.gateway.snapshot.people
        if whole:
            people = People().with_changes(changes).with_file(self._tenants)
        else:
            people = people.with_changes(changes)
        self._adopt_people(self.gateway.snapshot.with_people(people))

    def _adopt_people(self, snapshot: Snapshot) -> None:
        self.gateway.snapshot = snapshot
        self.gateway.limiter.forget_accounts()
        self._tokens.adopt(snapshot.config.auth.jwt)
        self.spawn(self.stores.seed_budgets(snapshot))

    def give_up(self, model: str) -> None:
        """The model's embedded engine cannot work with what it was given."""
        for state in self.gateway.fleet:
            state.hopeless = state.hopeless or (state.replica.embedded is not None and state.replica.model == model)

    def fail(self, problem: str) -> None:
        """Stops, since the user has to change something."""
        self._problem = problem
        self.stop()

    # --- life
    @property
    def listening(self) -> asyncio.Event:
        """Set once connections are accepted."""
        return self._server.listening

    def stop(self) -> None:
        if self.gateway.draining:
            self._edge.cancel_all()  # a second signal: no more patience
            self._server.should_exit = self._server.force_exit = True
            return
        self.gateway.draining = self._edge.draining = True
        self.spawn(self._drain())

    async def _drain(self) -> None:
        """Running answers finish within the grace; what is left then ends with an error the client can read."""
        loop = asyncio.get_running_loop()
        grace = self.gateway.snapshot.config.server.shutdown_grace
        log.info("stopping: %d requests may finish within %g s", self._edge.running, grace)
        deadline = loop.time() + grace
        while self._edge.running and loop.time() < deadline:  # noqa: ASYNC110 (answers end in many places)
            await asyncio.sleep(0.05)
        self._edge.cancel_all()
        await asyncio.sleep(0)
        self._server.should_exit = True

    async def _tick(self) -> None:
        """The one timer for everything that is due now and then."""
        loop = asyncio.get_running_loop()
        tidied = loop.time()
        while True:
            await asyncio.sleep(TICK)
            if loop.time() - tidied > TIDY_EVERY:
                tidied = loop.time()
                gc.collect()  # requests leave nothing for it, but the HTTP client of probes does
            try:
                self._edge.sweep(loop.time())
                self._upstream.sweep()
                self.stores.set_clock()
                self.gateway.look_over(time.monotonic())
                self.gateway.book()
            except Exception:
                log.exception("housekeeping failed")

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """A task that nobody waits for, kept until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
