"""The composition root: builds the parts, runs them, reloads them and takes them down in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import shutil
import signal
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

import backends
from gateway import admin, logs
from gateway.api import create_app
from gateway.config import Config, ConfigError, Problem, StartupError, TlsConfig, load
from gateway.discovery import Discovery
from gateway.edge import Edge, EdgeSettings
from gateway.embedded import EmbeddedEngines
from gateway.logs import AccessLog
from gateway.metrics import Metrics
from gateway.people import People
from gateway.pipeline import serve
from gateway.probe import Prober
from gateway.records import Actor, Changes
from gateway.snapshot import Snapshot, compile_config
from gateway.state import Gateway
from gateway.stores import Stores
from gateway.tokens import Tokens
from gateway.upstream import TICK, Upstream, tls_context

BACKLOG = 4096
MOST_FILES = 1_048_576
WATCH_EVERY = 1.0  # seconds between two looks at the configuration file

log = logging.getLogger("sekisho")


def version() -> str:
    try:
        return installed_version("sekisho")
    except PackageNotFoundError:
        return "0+source"


def run(config_path: Path, overrides: Mapping[str, object]) -> int:
    """Serves until told to stop. Returns the exit code.

    Raises: ConfigError, StartupError for what the user has to change.
    """
    sockets = Path(tempfile.mkdtemp(prefix="sekisho-"))  # mode 0700
    try:
        files = Files(config_path, overrides, sockets)
        config = files.read()
        snapshot = files.compile(config)
        logs.setup(config.logging.level, config.logging.format)
        raise_file_limit()
        listener = listen(config.server.host, config.server.port)
        with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(Application(files, snapshot, listener).run())
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


class Files:
    """Where the configuration comes from."""

    def __init__(self, path: Path, overrides: Mapping[str, object], sockets: Path) -> None:
        self._path, self._overrides, self._sockets = path, overrides, sockets

    def read(self) -> Config:
        """Raises: ConfigError."""
        return load(self._path, kinds=backends.kinds(), overrides=self._overrides)

    @property
    def folder(self) -> Path:
        return self._path.absolute().parent

    def compile(self, config: Config, people: People | None = None) -> Snapshot:
        """Raises: ConfigError. `people`: those of the database."""
        snapshot = compile_config(config, backends.load, self._sockets, str(self._path), people)
        if problems := [Problem(str(self._path), None, *problem) for problem in _unreadable_certificates(snapshot)]:
            raise ConfigError(problems)
        return snapshot

    def stamp(self) -> tuple[int, int, int] | None:
        """Changes when the file does; None while it is gone, as during a careless save."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _unreadable_certificates(snapshot: Snapshot) -> Iterator[tuple[str, str, str]]:
    """(path, what is wrong, what to write instead) for engines that could only fail once a request comes."""
    for replica in snapshot.replicas():
        try:
            if replica.endpoint.tls:
                tls_context(replica.endpoint)
        except (OSError, ssl.SSLError):
            yield (
                f"models.{replica.model}.replicas",
                "a certificate or key for the engine is not usable",
                "name PEM files",
            )


def raise_file_limit() -> None:
    """Every stream takes two sockets; the usual soft limit of 1024 files would be reached by 500 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_FILES)), hard))


def listen(host: str, port: int) -> socket.socket:
    """Raises: StartupError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} on {host} is taken: stop what uses it, or choose another with --port"
            ) from None
        if getattr(error, "errno", None) == errno.EACCES:
            raise StartupError(f"no permission to listen on port {port}: choose one above 1023 with --port") from None
        raise StartupError(f"cannot listen on {host}:{port}: {error}; choose an address of this machine") from None
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process with the signal instead of an exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Application:
    """One running gateway process. Created inside `run`, since most parts want the event loop."""

    def __init__(self, files: Files, snapshot: Snapshot, listener: socket.socket) -> None:
        self._files, self._first, self._listener = files, snapshot, listener
        self._problem: str | None = None  # an embedded engine cannot work with what it was given
        self._reloading = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Raises: StartupError."""
        config = self._first.config
        self._metrics = Metrics(version())
        self._access_log = AccessLog(config.logging.format, sys.stdout.buffer)
        self._upstream = Upstream(config.server.max_response)
        self._stores = Stores(config, self._files.folder, self._people_changed)
        self._tokens = Tokens()
        self._gateway = gateway = Gateway(
            self._first, self._metrics, self._access_log, self._upstream, self._stores.limiter, self._tokens,
            self._stores.usage,
        )  # fmt: skip
        self._engines = EmbeddedEngines(self._engine_failed)
        self._prober = Prober(gateway.fleet)
        self._config = config  # as the file says; what is served has the discovered models in addition
        self._discovery = Discovery()
        self._edge = Edge(lambda cycle: serve(gateway, cycle), edge_settings(config))
        self._metrics.add_gauges(lambda: gateway.fleet.gauges(time.monotonic()))
        self._metrics.add_gauges(lambda: gateway.waiting.gauges(gateway.snapshot.models))
        self._metrics.add_gauges(self._stores.gauges)
        app = create_app(gateway, version(), [admin.router])
        app.state.reload, app.state.stores = self.reload, self._stores
        self._server = _Server(
            uvicorn.Config(
                app, http=self._edge.protocol, ws="none", lifespan="off", log_config=None, access_log=False,  # type: ignore[arg-type]
                server_header=False, proxy_headers=False, backlog=BACKLOG, timeout_graceful_shutdown=1,
                ssl_context_factory=(lambda *_: server_tls(config.server.tls)) if config.server.tls else None,
            )
        )  # fmt: skip
        self._adopt(self._first)
        self._install_signals()
        try:
            return await self._serve(config)
        finally:
            await self._close()

    async def _serve(self, config: Config) -> int:
        """Raises: StartupError."""
        await self._stores.start()
        await self._stores.seed_budgets(self._gateway.snapshot)
        background = (self._prober.run(), self._tick(), self._watch(), self._discover(), self._stores.run())
        tasks = [asyncio.create_task(work) for work in background]
        scheme = "https" if config.server.tls else "http"
        log.info("sekisho %s listens on %s://%s:%d", version(), scheme, config.server.host, config.server.port)
        gc.collect()
        gc.freeze()  # what start-up made lives for ever: the collector need not walk it
        gc.set_threshold(50_000, 20, 100)
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._problem is not None:
            raise StartupError(self._problem)
        return 0

    async def _close(self) -> None:
        await self._engines.close()
        await self._prober.close()
        await self._discovery.close()
        self._upstream.close()
        self._gateway.book()
        await self._tokens.close()
        await self._stores.close()
        self._access_log.close()

    # --- configuration
    async def reload(self) -> None:
        """All or nothing: the old snapshot stays until the new one is complete. Running requests keep the old one.

        Raises: ConfigError.
        """
        async with self._reloading:
            try:
                config = await asyncio.get_running_loop().run_in_executor(None, self._files.read)
                snapshot = await self._compiled(await self._discovery.look(config))
            except ConfigError as error:
                self._metrics.reloads["failure"] += 1
                log.error("the changed configuration was not loaded, the old one stays: %s", error)
                raise
            old, new = self._gateway.snapshot.config, snapshot.config
            if (old.server.host, old.server.port) != (new.server.host, new.server.port):
                log.warning("server.host and server.port change only with a restart")
            if old.state != new.state:
                log.warning("the settings under `state` change only with a restart")
            self._config = config
            self._adopt(snapshot)
            await self._discovery.forget(config)
            self._metrics.reloads["success"] += 1
            log.info("configuration reloaded")

    async def _compiled(self, config: Config) -> Snapshot:
        people = self._gateway.snapshot.people
        return await asyncio.get_running_loop().run_in_executor(None, self._files.compile, config, people)

    async def _discover(self) -> None:
        """Looks at once and then now and then; a look that finds nothing new changes nothing."""
        while True:
            if self._config.discovery:
                try:
                    async with self._reloading:
                        found = await self._discovery.look(self._config, due_only=True)
                        if found.models != self._gateway.snapshot.config.models:
                            self._adopt(await self._compiled(found))
                            log.info("discovery: %d models are published now", len(found.models))
                except ConfigError as error:
                    log.error("what discovery found cannot be used, the old models stay: %s", error)
                except Exception:
                    log.exception("discovery failed, the old models stay")
            await asyncio.sleep(self._discovery.pause(self._config))

    def _people_changed(self, changes: Changes, whole: bool) -> None:
        """The database has told of tenants or keys. `whole`: that is all it holds, and nothing else counts any more."""
        people = self._gateway.snapshot.people
        if whole:
            people = People().with_changes(changes).with_file(self._config.tenants)
        else:
            people = people.with_changes(changes)
        self._adopt_people(self._gateway.snapshot.with_people(people))

    def _adopt_people(self, snapshot: Snapshot) -> None:
        self._gateway.snapshot = snapshot
        self._gateway.limiter.forget_accounts()
        self._tokens.adopt(snapshot.config.auth.jwt)
        self._spawn(self._stores.seed_budgets(snapshot))

    def _adopt(self, snapshot: Snapshot) -> None:
        people = self._gateway.snapshot.people
        if snapshot.people.stored_keys is not people.stored_keys:  # the database has changed while this was compiled
            snapshot = snapshot.with_people(people.with_file(snapshot.config.tenants))
        replicas = list(snapshot.replicas())
        self._engines.adopt(replicas)
        self._gateway.fleet.adopt(replicas)
        self._prober.wake()
        self._stores.adopt(snapshot.config)
        self._adopt_people(snapshot)
        self._gateway.look_over(time.monotonic())  # routing's settings are in force at once
        self._edge.settings = edge_settings(snapshot.config)
        wanted = {replica.endpoint for replica in replicas}
        self._upstream.retire(wanted.__contains__)
        self._engines.retire(replicas)

    async def _watch(self) -> None:
        seen = self._files.stamp()
        while True:
            await asyncio.sleep(WATCH_EVERY)
            stamp = self._files.stamp()
            if stamp is not None and stamp != seen:
                seen = stamp
                await self._reload_quietly("system:file")

    # --- life
    async def _tick(self) -> None:
        """The one timer for everything that is due now and then."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK)
            try:
                self._edge.sweep(loop.time())
                self._upstream.sweep()
                self._stores.set_clock()
                self._gateway.look_over(time.monotonic())
                self._gateway.book()
            except Exception:
                log.exception("housekeeping failed")

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._spawn(self._reload_quietly("system:signal")))

    async def _reload_quietly(self, actor: str) -> None:
        with contextlib.suppress(ConfigError):  # logged and counted where it was found
            await self.reload()
            await self._stores.note("config.reload", Actor(actor))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _stop(self) -> None:
        if self._gateway.draining:
            self._edge.cancel_all()  # a second signal: no more patience
            self._server.should_exit = self._server.force_exit = True
            return
        self._gateway.draining = self._edge.draining = True
        self._spawn(self._drain())

    async def _drain(self) -> None:
        """Running answers finish within the grace; what is left then ends with an error the client can read."""
        loop = asyncio.get_running_loop()
        grace = self._gateway.snapshot.config.server.shutdown_grace
        log.info("stopping: %d requests may finish within %g s", self._edge.running, grace)
        deadline = loop.time() + grace
        while self._edge.running and loop.time() < deadline:  # noqa: ASYNC110 (answers end in many places)
            await asyncio.sleep(0.05)
        self._edge.cancel_all()
        await asyncio.sleep(0)
        self._server.should_exit = True

    def _engine_failed(self, model: str, problem: str) -> None:
        """A configuration mistake found while starting ends the start; later on it only takes its replica down. So does
        a file that discovery has found: nobody wrote it down."""
        for state in self._gateway.fleet:
            state.hopeless = state.hopeless or (state.replica.embedded is not None and state.replica.model == model)
        if not self._prober.served and any(entry.name == model for entry in self._config.models):
            self._problem = problem
            self._stop()


def edge_settings(config: Config) -> EdgeSettings:
    server = config.server
    return EdgeSettings(
        max_body=server.max_body,
        max_header=server.max_header,
        max_connections=server.max_connections,
        header_timeout=server.header_timeout,
        body_timeout=server.body_timeout,
        idle_timeout=server.idle_timeout,
        keepalive_interval=server.keepalive_interval,
        behind_proxies=bool(server.trusted_proxies),
    )


def server_tls(given: TlsConfig | None) -> ssl.SSLContext:
    assert given is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3 if given.min_version == "1.3" else ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(os.fspath(given.cert_file), os.fspath(given.key_file))
    except (OSError, ssl.SSLError):
        raise StartupError("server.tls: the certificate and key do not belong together or cannot be read") from None
    if given.client_ca_file is not None:
        try:
            context.load_verify_locations(os.fspath(given.client_ca_file))
        except (OSError, ssl.SSLError):
            raise StartupError("server.tls.client_ca_file is no certificate that can be read") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context
