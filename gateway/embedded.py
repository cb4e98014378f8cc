"""Embedded engines: child processes that this gateway starts, watches and restarts.

A crash inside llama.cpp ends its child and nothing else: the caller gets an error, the replica counts as down, and a
new child is started after a pause. The child listens on a Unix socket in a folder only this user can open, so the pool
talks to it as to any other engine. See docs/adr/0005-process-model.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable

import orjson

from gateway.children import command
from gateway.types import EmbeddedModel, Replica

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a crashed engine is started again
STEADY = 60.0  # seconds of service after which a crash counts as the first one again
STOP_GRACE = 12.0  # seconds for a child to finish what it does
MUST_CHANGE = 2  # exit code of a child that cannot work with what it was given

OnProblem = Callable[[str, str], None]  # the model's name, what is wrong

log = logging.getLogger("sekisho.embedded")


class EngineProcess:
    """One child, kept alive until `stop`. `problem` says why it cannot work, once it has said so itself."""

    def __init__(
        self, name: str, socket: str, model: EmbeddedModel, served_name: str, on_problem: OnProblem
    ) -> None:
        self._name, self._socket = name, socket
        self._options = orjson.dumps(
            {
                "path": model.path,
                "sha256": model.sha256,
                "served_name": served_name,
                "context_length": model.context_length,
                "parallel": model.parallel,
                "gpu_layers": model.gpu_layers,
                "threads": model.threads,
                "max_waiting": model.max_waiting,
                "max_wait_s": model.max_wait,
            }
        )
        self._on_problem = on_problem
        self._process: Process | None = None
        self._task = asyncio.get_running_loop().create_task(self._keep_alive())

    async def stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_GRACE):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _keep_alive(self) -> None:
        pause = FIRST_PAUSE
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            code = await self._run_once()
            if code == MUST_CHANGE:
                return
            if loop.time() - begun > STEADY:
                pause = FIRST_PAUSE
            log.error("the engine of %s ended (exit code %s); starting it again in %g s", self._name, code, pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _run_once(self) -> int:
        log.info("starting the embedded engine of %s", self._name)
        process = self._process = await asyncio.create_subprocess_exec(
            *command("backends.llamacpp"), "--socket", self._socket,
            stdin=PIPE, stdout=PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        # stdin stays open: its end tells the child that nobody needs it any more, even if this process is killed.
        process.stdin.write(self._options + b"\n")
        async for line in process.stdout:
            self._told(line)
        return await process.wait()

    def _told(self, line: bytes) -> None:
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError:
            return
        if event.get("event") == "ready":
            log.info("the embedded engine of %s is ready", self._name)
        elif event.get("event") == "failed":
            log.error("the embedded engine of %s: %s", self._name, event.get("message"))
            self._on_problem(self._name, f"{self._name}: {event.get('message')}")


class EmbeddedEngines:
    """The children by socket path. Replicas that are served by equal options share one."""

    def __init__(self, on_problem: OnProblem) -> None:
        self._engines: dict[str, EngineProcess] = {}
        self._on_problem = on_problem
        self._stopping: set[asyncio.Task[None]] = set()

    def adopt(self, replicas: Iterable[Replica]) -> None:
        """Starts what is new. What is gone is stopped by `retire`, after the new snapshot is in force."""
        for replica in replicas:
            socket = replica.endpoint.unix
            if replica.embedded is not None and socket is not None and socket not in self._engines:
                self._engines[socket] = EngineProcess(
                    replica.model, socket, replica.embedded, replica.upstream_model, self._on_problem
                )

    def retire(self, replicas: Iterable[Replica]) -> None:
        """Stops the engines none of `replicas` needs; they finish what they are doing first."""
        wanted = {replica.endpoint.unix for replica in replicas}
        for socket in [socket for socket in self._engines if socket not in wanted]:
            task = asyncio.get_running_loop().create_task(self._engines.pop(socket).stop())
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    async def close(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self._engines.values()), *self._stopping)
        self._engines.clear()
