"""Gateway processes in small: a sink that is given rows until somebody kills it. They come from a fork server, which
has imported everything, so that hundreds of them may die in a few seconds."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gateway.spool import UsageSink
from tests.usage.doubles import PATIENCE, QUICK, Database, eventually, outcomes

CONTEXT = multiprocessing.get_context("forkserver")
# pytest too: a child imports whatever its parent was started with.
CONTEXT.set_forkserver_preload(["pytest", "tests.usage.children"])
# What the spool asks of the system.
TRIPWIRES = ("open", "write", "fdatasync", "fsync", "ftruncate", "rename", "unlink", "close", "mkdir", "listdir")


class Child:
    """One such process, which tells how many of its rows are safe."""

    def __init__(self, work: Callable[..., None], *args: object) -> None:
        self._news, theirs = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=work, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()
        self.safe = 0

    def listen(self, timeout: float) -> bool:
        """Takes the next piece of news. False when there is none, or never will be."""
        try:
            if self._news.poll(timeout):
                self.safe = self._news.recv()
                return True
        except (EOFError, OSError):
            pass
        return False

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def wait(self) -> int | None:
        """Its exit code, once all it has said was heard."""
        while self.listen(PATIENCE):
            pass
        self._process.join(PATIENCE)
        code = self._process.exitcode
        assert code is not None, "it does not end"
        self._process.close()
        self._news.close()
        return code


@contextmanager
def child(work: Callable[..., None], *args: object) -> Iterator[Child]:
    made = Child(work, *args)
    try:
        yield made
    finally:
        if not made._news.closed:
            made.kill()


# --- what children do
def keep_adding(news: Connection, folder: Path, database: Path, name: str, size: int, down: bool) -> None:
    """Adds `size` rows every few milliseconds, for ten seconds unless it is killed before."""

    async def work() -> None:
        store = Database(database, down=down)
        sink = UsageSink(folder, lambda: store, None, QUICK)
        sink.start()
        for number in range(2000):
            sink.add(outcomes(name, number * size, number * size + size))
            await asyncio.sleep(0.005)
            news.send(sink.safe)
        await sink.close()

    asyncio.run(work())


def add_and_close(news: Connection, folder: Path, database: Path, name: str, deadly_step: int) -> None:
    """Three batches in segments of their own, then a proper end; killed at one step of it all."""
    _lay_tripwires(deadly_step)

    async def work() -> None:
        store = Database(database)
        insert = store._insert
        store._insert = _tripwire(insert)  # type: ignore[method-assign]
        sink = UsageSink(folder, lambda: store, None, replace(QUICK, rotate=0.002, move=0.002))
        sink.start()
        for number in range(3):
            sink.add(outcomes(name, number * 5, number * 5 + 5))
            await eventually(lambda enough=number * 5 + 5: sink.safe == enough)  # type: ignore[misc]
            news.send(sink.safe)
            if number < 2:
                await eventually(lambda: sink.waiting == 0)
        await sink.close()

    asyncio.run(work())


def meet_a_size_limit(news: Connection, folder: Path, database: Path, name: str, stubborn: bool) -> None:
    """No file may grow beyond 16 KiB for a while: enough for ten rows, not for 300. `stubborn`: what was written of
    those cannot be taken back either."""

    async def work() -> None:
        store = Database(database, down=True)
        sink = UsageSink(folder, lambda: store, None, replace(QUICK, rotate=60.0, rotate_failing=60.0))
        sink.start()
        sink.add(outcomes(name, 0, 10))
        await eventually(lambda: sink.safe == 10)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, hard))
        truncate = os.ftruncate
        if stubborn:
            os.ftruncate = _refuse  # type: ignore[assignment]
        sink.add(outcomes(name, 10, 310))
        await eventually(lambda: sink._writer is not None and sink._writer.failing)
        assert sink.safe == 10
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        os.ftruncate = truncate
        await eventually(lambda: sink.safe == 310)
        news.send(sink.safe)
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(work())


# --- death at a certain step
_steps = itertools.count()
_deadly_step = -1
_guard = threading.Lock()


def _lay_tripwires(deadly_step: int) -> None:
    global _deadly_step
    _deadly_step = deadly_step
    for name in TRIPWIRES:
        setattr(os, name, _tripwire(getattr(os, name)))


def _tripwire(real: Callable[..., Any]) -> Callable[..., Any]:
    """Dies before or after the real thing, or when half of it is written."""

    def act(*args: Any, **more: Any) -> Any:
        _die_if_due()
        if real.__name__ == "write" and _is_due():
            real(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **more)
        _die_if_due()
        return result

    return act


def _is_due() -> bool:
    with _guard:
        return next(_steps) == _deadly_step


def _die_if_due() -> None:
    if _is_due():
        os.kill(os.getpid(), signal.SIGKILL)


def _refuse(*_: object) -> None:
    raise OSError("no")
