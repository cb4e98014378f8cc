"""The process of one worker of several: `python -m gateway.workers.member`, started by the supervisor alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from gateway import logs
from gateway.admin.fleet import replica_entries
from gateway.config import ConfigError, StartupError
from gateway.configured import compiled
from gateway.listening import raise_file_limit
from gateway.records import Actor
from gateway.worker import Worker
from gateway.workers.control import Link, LinkLost, Refused
from gateway.workers.peers import Supervised
from gateway.workers.places import Places
from gateway.workers.supervisor import Orders

TELL_EVERY = 2.0  # seconds between two reports of the metrics: what a killed worker may have counted in vain

log = logging.getLogger("sekisho")


class WorkerProcess:
    """A worker and its line to the supervisor."""

    def __init__(self, listener: socket.socket, number: int, workers: int, folder: Path, file: Path) -> None:
        self._listener, self._folder, self._file = listener, folder, file
        self._places = Places(folder / "places", number, workers)
        self._link = Link(self._answer)
        self._worker: Worker | None = None
        self._serving: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()  # or it cannot begin

    async def run(self, end: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: None)  # the supervisor reloads for all
        await self._link.open(end)
        lost = asyncio.create_task(self._link.lost.wait())
        begun = asyncio.create_task(self._begun.wait())
        await asyncio.wait([lost, begun], return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if self._serving is None:
            lost.cancel()
            return 1
        report = asyncio.create_task(self._report())
        await asyncio.wait([lost, self._serving], return_when=asyncio.FIRST_COMPLETED)
        self._stop()  # at the latest now: nobody is there any more to replace this worker, or to stop it
        try:
            await self._serving
        except StartupError:
            return 1  # the supervisor has been told
        finally:
            report.cancel()
            lost.cancel()
            self._tell_metrics()
            self._link.close()
        return 0

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()

    async def _report(self) -> None:
        served = False
        while True:
            await asyncio.sleep(TELL_EVERY if served else TELL_EVERY / 4)
            self._tell_metrics()
            if self._worker is not None and self._worker.prober.served and not served:
                served = True
                self._link.tell("served")

    def _tell_metrics(self) -> None:
        with contextlib.suppress(LinkLost):
            if self._worker is not None:
                self._link.tell("told", self._page(self._worker))

    # --- what the supervisor asks
    async def _answer(self, name: str, *arguments: Any) -> Any:
        if name == "begin":
            try:
                return await self._begin(*arguments)
            finally:
                self._begun.set()
        await self._begun.wait()  # what is said meanwhile comes on top of what it begins with
        worker = self._worker
        if worker is None:
            raise Refused("not begun yet")
        if name == "page":
            return self._page(worker)
        if name == "adopt":
            return await self._adopt(worker, *arguments)
        if name == "refresh":
            return await worker.stores.directory.refresh()
        if name == "drain":
            worker.gateway.set_draining(*arguments)
            return None
        if name == "freed":
            return worker.gateway.offer(*arguments)
        if name == "replicas":
            return replica_entries(worker.gateway)
        if name == "hopeless":
            return worker.give_up(*arguments)
        if name == "note":
            action, actor = arguments
            return await worker.stores.note(action, Actor(actor))
        raise Refused(f"nobody knows what {name} means")

    async def _begin(self, orders: Orders) -> None:
        """Returns once connections are accepted. Raises: Refused with what the user has to change."""
        logging_config = orders.config.logging
        logs.setup(logging_config.level, logging_config.format)
        raise_file_limit()
        self._places.adopt(orders.columns)
        try:
            first = compiled(orders.config, self._folder, self._file)
            self._worker = worker = Worker(first, self._file.parent, self._listener, self._places, self._folder / "log")
            worker.peers = Supervised(self._link)
            self._places.freed = worker.peers.freed
            self._follow(worker, orders)
            self._serving = asyncio.create_task(worker.serve())
            listening = asyncio.create_task(worker.listening.wait())
            await asyncio.wait([self._serving, listening], return_when=asyncio.FIRST_COMPLETED)
            listening.cancel()
            if self._serving.done():
                self._serving.result()
        except (ConfigError, StartupError) as error:
            raise Refused(str(error)) from None

    async def _adopt(self, worker: Worker, orders: Orders) -> None:
        """Raises: Refused."""
        people = worker.gateway.snapshot.people
        loop = asyncio.get_running_loop()
        try:
            snapshot = await loop.run_in_executor(None, compiled, orders.config, self._folder, self._file, people)
        except ConfigError as error:
            raise Refused(str(error)) from None
        self._places.adopt(orders.columns)
        worker.adopt(snapshot)
        self._follow(worker, orders)

    def _follow(self, worker: Worker, orders: Orders) -> None:
        for replica in orders.drained:
            worker.gateway.set_draining(replica, True)
        for model in orders.hopeless:
            worker.give_up(model)

    @staticmethod
    def _page(worker: Worker) -> Sequence[Any]:
        worker.gateway.book()
        return worker.metrics.collect()


def main() -> int:
    end, listener, number, workers, folder, file = sys.argv[1:]
    sockets = [socket.socket(fileno=int(one)) for one in (end, listener)]
    for one in sockets:
        one.setblocking(False)
    process = WorkerProcess(sockets[1], int(number), int(workers), Path(folder), Path(file))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(process.run(sockets[0]))


if __name__ == "__main__":
    sys.exit(main())
