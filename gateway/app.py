"""The composition root: one process that serves and keeps its configuration itself, or a supervisor with workers."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

import uvloop

from gateway import logs
from gateway.build import version
from gateway.configured import Files, Keeper
from gateway.embedded import EmbeddedEngines
from gateway.listening import listen, listen_together, raise_file_limit
from gateway.notify import Notifier
from gateway.records import Actor
from gateway.snapshot import Snapshot
from gateway.tracing.sender import require
from gateway.workers.peers import Alone
from gateway.workers.supervisor import Supervisor

log = logging.getLogger("sekisho")


def run(config_path: Path, overrides: Mapping[str, object]) -> int:
    """Serves until told to stop. Returns the exit code.

    Raises: ConfigError, StartupError for what the user has to change.
    """
    folder = Path(tempfile.mkdtemp(prefix="sekisho-"))  # mode 0700
    try:
        files = Files(config_path, overrides, folder)
        config = files.read()
        snapshot = files.compile(config)
        require(config.tracing)
        logs.setup(config.logging.level, config.logging.format)
        files.complain()
        raise_file_limit()
        server = config.server
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if server.workers == 1:
                with listen(server.host, server.port) as listener:
                    return runner.run(_serve_alone(files, snapshot, listener))
            listeners = listen_together(server.host, server.port, server.workers)
            try:
                return runner.run(_supervise(files, snapshot, listeners, folder))
            finally:
                for listener in listeners:
                    listener.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _supervise(files: Files, snapshot: Snapshot, listeners: list[socket.socket], folder: Path) -> int:
    return await Supervisor(files, snapshot, listeners, folder).run()


async def _serve_alone(files: Files, snapshot: Snapshot, listener: socket.socket) -> int:
    return await Application(files, snapshot, listener).run()


class Application:
    """A gateway of one process."""

    def __init__(self, files: Files, first: Snapshot, listener: socket.socket) -> None:
        from gateway.worker import Worker  # what it takes to serve is 48 MiB, which a supervisor need not hold

        self._worker = worker = Worker(first, files.path.parent, listener)
        self._engines = EmbeddedEngines(self._engine_failed)
        gateway = worker.gateway
        self._notifier = notifier = Notifier()
        self._keeper = Keeper(
            files, first, self._publish, lambda: gateway.snapshot.people, worker.metrics.reloads, notifier
        )
        worker.peers = Alone(self._keeper.reload)
        self._engines.adopt(first.replicas())

    async def run(self) -> int:
        """Raises: StartupError."""
        self._install_signals()
        watching = self._keeper.watch(lambda: self._reload("system:file"))
        background = (self._keeper.discover(), watching, self._tell(), self._notifier.keep_alive())
        tasks = [asyncio.create_task(work) for work in background]
        try:
            await self._worker.serve()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._engines.close()
            await self._keeper.close()
            self._notifier.close()
        return 0

    async def _tell(self) -> None:
        """That it is up."""
        await self._worker.listening.wait()
        url = self._keeper.config.server.url
        log.info("sekisho %s listens on %s", version(), url)
        self._notifier.ready(f"listens on {url}")

    def _stop(self) -> None:
        self._notifier.stopping()
        self._worker.stop()

    async def _publish(self, snapshot: Snapshot) -> None:
        self._engines.adopt(snapshot.replicas())
        self._worker.adopt(snapshot)
        self._engines.retire(snapshot.replicas())

    async def _reload(self, actor: str) -> None:
        if await self._keeper.reload_quietly():
            await self._worker.stores.note("config.reload", Actor(actor))

    def _engine_failed(self, model: str, problem: str) -> None:
        """A configuration mistake found while starting ends the start; later on it only takes its replica down. So does
        a file that discovery has found: nobody wrote it down."""
        worker = self._worker
        worker.give_up(model)
        if not worker.prober.served and any(entry.name == model for entry in self._keeper.config.models):
            worker.fail(problem)

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._worker.spawn(self._reload("system:signal")))
