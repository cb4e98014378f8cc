"""Several workers on one port: starts them, keeps them alive, and answers for what concerns all of them.

The supervisor serves no request. It keeps the configuration, the embedded engines and the sockets, so that a worker
that dies takes only its own requests with it. Workers that die are replaced; what they have counted stays counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from gateway.build import version
from gateway.children import command
from gateway.config import Config, ConfigError, StartupError
from gateway.configured import Files, Keeper
from gateway.embedded import EmbeddedEngines
from gateway.listening import leave
from gateway.metrics import Metrics, counter, gauge
from gateway.notify import Notifier
from gateway.snapshot import Snapshot
from gateway.workers import merged, places
from gateway.workers.control import Link, LinkLost, Refused

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0  # seconds before a worker that has died is replaced
STEADY = 30.0  # seconds of service after which a death counts as the first one again
HEARTBEAT = 5.0  # seconds between two questions whether a worker is alive
STUCK = 30.0  # seconds without an answer after which a worker is killed
STARTING = 60.0  # the same while it starts
OTHERS_PATIENCE = 2.0  # seconds in which workers answer each other's questions
ADOPT_PATIENCE = 30.0  # seconds in which a worker puts a configuration into force
STOP_GRACE = 10.0  # seconds beyond server.shutdown_grace until a worker is killed
CANNOT_START = 71  # as an exit code: EX_OSERR of sysexits.h

log = logging.getLogger("sekisho")


@dataclass(frozen=True, slots=True)
class Orders:
    """What a worker is told when it starts and with each change. Pickled."""

    config: Config  # with the discovered models
    columns: dict[str, int]  # of the table of places
    drained: frozenset[str] = frozenset()  # replicas
    hopeless: frozenset[str] = frozenset()  # models whose embedded engine cannot work


class Member:
    """One worker's place: its socket, its number, and whichever process fills it at the moment."""

    def __init__(self, number: int, listener: socket.socket) -> None:
        self.number, self.listener = number, listener
        self.process: asyncio.subprocess.Process | None = None
        self.link: Link | None = None  # while it serves
        self.starting: Link | None = None  # before that
        self.page: Sequence[Metric] = ()  # the last metrics it has told
        self.pause = FIRST_PAUSE
        self.starts = 0

    @property
    def told(self) -> Link | None:
        """By what it is told of changes. While it starts too: it began with what was true then, and follows later."""
        return self.link or self.starting

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def signal(self, number: int) -> None:
        if self.process is not None and self.alive:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


class Supervisor:
    """Created inside the event loop."""

    def __init__(self, files: Files, first: Snapshot, listeners: Sequence[socket.socket], folder: Path) -> None:
        """Args: folder: private to this user, for sockets and the table of places."""
        self._files, self._folder = files, folder
        self._members = [Member(number, listener) for number, listener in enumerate(listeners)]
        self._metrics = Metrics(version())
        self._metrics.add_gauges(self._gauges)
        self._past: Sequence[Metric] = ()  # what workers that have ended have counted
        self._columns = places.Columns()
        self._drained: set[str] = set()
        self._hopeless: set[str] = set()
        self._began = False  # some worker has served once
        self._served = False  # some replica has been ready once
        self._problem: str | None = None
        self._engines = EmbeddedEngines(self._engine_failed)
        self._notifier = Notifier()
        self._keeper = Keeper(files, first, self._publish, lambda: None, self._metrics.reloads, self._notifier)
        self._first = first
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()  # a worker has begun to serve, or the gateway is stopping
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> int:
        """Until it is stopped. Raises: StartupError."""
        places.make(self._table, len(self._members))
        self._rows = places.Places(self._table, 0, len(self._members))
        self._take_over(self._first)
        self._install_signals()
        try:
            first, others = self._members[:1], self._members[1:]
            await self._start(first)  # it brings the database up to date, and finds what the user has to change
            watching = self._keeper.watch(self._file_changed)
            background = (self._keeper.discover(), watching, self._listen_for_hearts(), self._notifier.keep_alive())
            tasks = [asyncio.create_task(work) for work in background]
            await self._start(others)
            if not self._stopping.is_set():
                self._tell()
            await self._stopping.wait()
            self._notifier.stopping()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await self._close()
            self._notifier.close()
        if self._problem is not None:
            raise StartupError(self._problem)
        return 0

    def _tell(self) -> None:
        """That it is up."""
        url = self._keeper.served.server.url
        log.info("sekisho %s listens on %s with %d workers", version(), url, len(self._members))
        self._notifier.ready(f"listens on {url} with {len(self._members)} workers")

    @property
    def _table(self) -> Path:
        return self._folder / "places"

    async def _start(self, members: Sequence[Member]) -> None:
        """Returns when all of them serve."""
        for member in members:
            self._spawn(self._keep_alive(member))
        while not self._stopping.is_set() and any(member.link is None for member in members):
            self._changed.clear()
            await self._changed.wait()

    async def _close(self) -> None:
        self._stopping.set()
        for member in self._members:
            member.signal(signal.SIGTERM)
        grace = self._keeper.served.server.shutdown_grace + STOP_GRACE
        waiting = [asyncio.create_task(one.process.wait()) for one in self._members if one.process and one.alive]
        if waiting:
            await asyncio.wait(waiting, timeout=grace)
        for member in self._members:
            member.signal(signal.SIGKILL)
        await asyncio.gather(*waiting, return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engines.close()
        await self._keeper.close()

    # --- workers
    async def _keep_alive(self, member: Member) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            begun = loop.time()
            try:
                code = await self._run_once(member)
            except OSError as error:  # no process or socket is to be had at the moment
                log.error("worker %d cannot be started: %s", member.number, error.strerror)
                code = CANNOT_START
            if self._stopping.is_set():
                return
            if loop.time() - begun > STEADY:
                member.pause = FIRST_PAUSE
            log.error("worker %d ended (exit code %d); starting another in %g s", member.number, code, member.pause)
            if member.pause > FIRST_PAUSE:  # not the first death: nobody knows when there will be another one
                leave(member.listener)
            await asyncio.sleep(member.pause)
            member.pause = min(member.pause * 2, LONGEST_PAUSE)

    async def _run_once(self, member: Member) -> int:
        """One process from its start to its end. Returns the exit code."""
        ours, theirs = socket.socketpair()
        link = Link(lambda name, *arguments: self._answer(member, name, *arguments))
        member.starts += 1
        with theirs:
            member.process = await asyncio.create_subprocess_exec(
                *command("gateway.workers.member"), str(theirs.fileno()), str(member.listener.fileno()),
                str(member.number), str(len(self._members)), str(self._folder), str(self._files.path),
                pass_fds=(theirs.fileno(), member.listener.fileno()), start_new_session=True,
            )  # fmt: skip
        await link.open(ours)
        try:
            member.starting = link
            await link.ask("begin", self._orders(), patience=STARTING)
            member.link, self._began = link, True
            self._changed.set()
        except Refused as refusal:
            log.error("worker %d cannot start: %s", member.number, refusal)
            if not self._began:  # the start of the gateway itself: the user has to change something
                self._problem = str(refusal)
                self._stop()
        except LinkLost:
            log.error("worker %d does not start", member.number)
            member.signal(signal.SIGKILL)
        finally:
            member.starting = None
        code = await member.process.wait()
        member.link = None
        link.close()
        self._rows.clear(member.number)
        self._past = merged.merge([self._past, merged.lasting(member.page)])
        member.page = ()
        return code

    async def _listen_for_hearts(self) -> None:
        """A worker that hangs is not dead to the kernel, which goes on giving it connections."""
        while True:
            await asyncio.sleep(HEARTBEAT)
            await asyncio.gather(*(self._listen_for_heart(member) for member in self._members))

    async def _listen_for_heart(self, member: Member) -> None:
        try:
            await self._ask_page(member, STUCK)
        except (LinkLost, Refused):
            if member.alive and not self._stopping.is_set():
                log.error("worker %d has not answered for %g s and is killed", member.number, STUCK)
                member.signal(signal.SIGKILL)

    # --- what workers ask
    async def _answer(self, member: Member, name: str, *arguments: Any) -> Any:
        if name == "told":  # now and then, so that little is forgotten when it is killed
            (member.page,) = arguments
            return None
        if name == "page":
            return await self._page(member, *arguments)
        if name == "others":
            return await self._ask_others(member, *arguments)
        if name == "drain":
            return await self._drain(member, *arguments)
        if name == "freed":
            return self._tell_others(member, "freed", *arguments)
        if name == "reload":
            return await self._reload()
        if name == "served":
            self._served = True
            return None
        raise Refused(f"nobody knows what {name} means")

    async def _page(self, member: Member, own: Sequence[Metric]) -> Sequence[Metric]:
        """The metrics of all. Of a worker that does not answer the last ones count, so that no counter falls."""
        member.page = own
        others = [one for one in self._members if one is not member and one.link is not None]
        await asyncio.gather(*(self._read_page(one) for one in others))
        ours = [family for family in self._metrics.collect() if family.samples]
        return merged.merge([self._past, ours, *(one.page for one in self._members)])

    async def _read_page(self, member: Member) -> None:
        with contextlib.suppress(LinkLost, Refused):
            await self._ask_page(member, OTHERS_PATIENCE)

    async def _ask_page(self, member: Member, patience: float) -> None:
        """Raises: LinkLost, Refused."""
        link = member.link
        if link is not None:
            page = await link.ask("page", patience=patience)
            if member.link is link:  # else it has died meanwhile, and what it had counted is in the past already
                member.page = page

    async def _ask_others(self, member: Member, name: str, *arguments: Any) -> list[Any]:
        # Those that start have nothing to tell yet.
        to = [one.link if name == "replicas" else one.told for one in self._members if one is not member]
        links = [link for link in to if link is not None]
        asked = [link.ask(name, *arguments, patience=OTHERS_PATIENCE) for link in links]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def _tell_others(self, member: Member, name: str, *arguments: Any) -> None:
        for one in self._members:
            if one is not member and one.link is not None:
                with contextlib.suppress(LinkLost):
                    one.link.tell(name, *arguments)

    async def _drain(self, member: Member, replica: str, draining: bool) -> None:
        (self._drained.add if draining else self._drained.discard)(replica)
        await self._ask_others(member, "drain", replica, draining)

    async def _reload(self) -> None:
        """Raises: Refused."""
        try:
            await self._keeper.reload()
        except ConfigError as error:
            raise Refused(str(error)) from None

    def _gauges(self) -> Iterator[Metric]:
        serving = sum(one.link is not None for one in self._members)
        yield gauge("workers", "Worker processes that serve", (), {(): float(serving)})
        restarts = sum(max(0, one.starts - 1) for one in self._members)
        yield counter("worker_restarts", "Workers that were replaced after they had ended", (), {(): restarts})

    # --- configuration
    def _orders(self) -> Orders:
        columns = self._columns.adopt(replica.id for replica in self._current.replicas())
        return Orders(self._current.config, columns, frozenset(self._drained), frozenset(self._hopeless))

    def _take_over(self, snapshot: Snapshot) -> None:
        self._current = snapshot
        self._hopeless.clear()
        self._engines.adopt(snapshot.replicas())

    async def _publish(self, snapshot: Snapshot) -> None:
        """Every worker has it in force when this returns; one that cannot follow is replaced."""
        self._take_over(snapshot)
        orders = self._orders()
        await asyncio.gather(*(self._order(member, orders) for member in self._members))
        self._engines.retire(snapshot.replicas())

    async def _order(self, member: Member, orders: Orders) -> None:
        if member.told is None:
            return
        try:
            await member.told.ask("adopt", orders, patience=ADOPT_PATIENCE)
        except (LinkLost, Refused) as error:
            log.error("worker %d did not take the new configuration (%s) and is replaced", member.number, error)
            member.signal(signal.SIGKILL)

    async def _file_changed(self) -> None:
        await self._reload_and_note("system:file")

    async def _reload_and_note(self, actor: str) -> None:
        if await self._keeper.reload_quietly():
            for member in self._members:
                if member.link is not None:
                    with contextlib.suppress(LinkLost):
                        member.link.tell("note", "config.reload", actor)
                    return

    def _engine_failed(self, model: str, problem: str) -> None:
        """A configuration mistake found while starting ends the start; later on it only takes its replica down. So does
        a file that discovery has found: nobody wrote it down."""
        self._hopeless.add(model)
        for member in self._members:
            if member.told is not None:
                with contextlib.suppress(LinkLost):
                    member.told.tell("hopeless", model)
        if not self._served and any(entry.name == model for entry in self._keeper.config.models):
            self._problem = problem
            self._stop()

    # --- signals
    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._spawn(self._reload_and_note("system:signal")))

    def _stop(self) -> None:
        if self._stopping.is_set():  # a second signal: no more patience
            for member in self._members:
                member.signal(signal.SIGTERM)
        self._stopping.set()
        self._changed.set()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
