"""The engine: one thread that owns the model, a fair and bounded queue in front of it, an async face for the server.

The event loop queues jobs and reads their news; the engine thread takes units into free slots, steps the runner, and
posts what came out, one call into the loop for each step. The two share the queues and the active table under
`_wake`; a runner is never entered by two threads, and never by the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from backends.llamacpp.answers import Piece
from backends.llamacpp.errors import ApiError, EngineBroken, failed, overloaded
from backends.llamacpp.fairqueue import FairQueue
from backends.llamacpp.jobs import AnyJob, EmbedJob, GenerateJob, Unit
from backends.llamacpp.protocol import Wanted
from backends.llamacpp.runner import ModelInfo, Runner
from backends.llamacpp.text import TextAssembler

_MAX_FAILURES = 3  # failed steps in a row after which rebuilding the context is no cure


class Engine:
    """Create it and call its async methods on one event loop."""

    def __init__(self, runner: Runner, *, max_waiting: int, max_wait_s: float) -> None:
        self.runner = runner
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._loop = asyncio.get_running_loop()
        self.info: ModelInfo | None = None
        self.loaded: asyncio.Future[ModelInfo] = self._loop.create_future()
        self.stopped: asyncio.Future[None] = self._loop.create_future()  # an exception = broken beyond repair
        self._wake = threading.Condition()
        self._closing = False
        self._waiting: FairQueue[GenerateJob] = FairQueue()
        self._embedding: FairQueue[EmbedJob] = FairQueue()
        self._active: dict[int, Unit] = {}  # slot -> what runs in it
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def close(self) -> None:
        """Ask the thread to end after its current step; `stopped` tells when it did."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def load(self) -> dict[str, Any]:
        """What GET /load says."""
        with self._wake:
            waiting = len(self._waiting) + len(self._embedding)
            running = len({id(unit.job) for unit in self._active.values()})
        return {
            "running": running,
            "waiting": waiting,
            "slots": self.runner.slots,
            "kv_used": round(self.runner.kv_used, 4),
        }

    @asynccontextmanager
    async def generate(
        self, tenant: str, prompts: Sequence[Sequence[int]], wanted: Wanted, grammar: str | None
    ) -> AsyncIterator[AsyncIterator[list[Piece]]]:
        """Texts for prompts of token ids, `wanted.n` for each. Leaving the context cancels what still runs.

        Raises: ApiError 503 when the queue is full or the wait too long; others from the runner.
        """
        job = GenerateJob(tenant, self._loop, grammar)
        for prompt in prompts:
            for k in range(wanted.n):
                job.units.append(self._unit(job, prompt, wanted, k))
        choices = len(job.units)
        self._enqueue(self._waiting, job)
        try:
            await job.admitted(self._max_wait_s)
            yield job.pieces(choices)
        finally:
            self._cancel(self._waiting, job)

    async def embed(self, tenant: str, inputs: Sequence[Sequence[int]]) -> list[list[float]]:
        """A vector for each input of token ids. Raises: ApiError."""
        job = EmbedJob(tenant, self._loop, inputs)
        self._enqueue(self._embedding, job)
        try:
            await job.admitted(self._max_wait_s)
            return await job.news()
        finally:
            self._cancel(self._embedding, job)

    def _unit(self, job: GenerateJob, prompt: Sequence[int], wanted: Wanted, k: int) -> Unit:
        assert self.info is not None
        room = self.info.context - len(prompt)
        sampling = wanted.sampling
        if sampling.seed is not None and k:
            sampling = dataclasses.replace(sampling, seed=sampling.seed + k)
        limit = min(wanted.max_tokens or room, room)
        return Unit(job, len(job.units), prompt, sampling, limit, TextAssembler(wanted.stops))

    def _enqueue(self, queue: FairQueue[Any], job: AnyJob) -> None:
        with self._wake:
            free = max(0, self.runner.slots - len(self._active))
            if self._closing or len(self._waiting) + len(self._embedding) >= self._max_waiting + free:
                raise overloaded("The engine's queue is full; try again later.")
            queue.push(job.tenant, job)
            self._wake.notify()

    def _cancel(self, queue: FairQueue[Any], job: AnyJob) -> None:
        job.cancelled = True
        with self._wake:
            queue.remove(job.tenant, job)
            self._wake.notify()

    # Below: the engine thread.

    def _run(self) -> None:
        try:
            info = self.runner.load()
        except Exception as error:
            self._post(self._end, error)
            return
        self._post(self._ready, info)
        problem: Exception | None = None
        try:
            while self._wait_for_work():
                self._drop_cancelled()
                self._admit()
                self._embed_some()
                self._step()
        except Exception as error:
            problem = error
        self._abandon(problem)
        with contextlib.suppress(Exception):
            self.runner.close()
        self._post(self._end, problem)

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._closing or self._active or len(self._waiting) or len(self._embedding)):
                self._wake.wait()
            return not self._closing

    def _drop_cancelled(self) -> None:
        for slot, unit in tuple(self._active.items()):
            if unit.job.cancelled:
                self._release(slot)

    def _admit(self) -> None:
        """Fill free slots, lowest first, one unit of the tenant whose turn it is at a time."""
        for slot in range(self.runner.slots):
            if slot not in self._active and not self._admit_one(slot):
                return

    def _admit_one(self, slot: int) -> bool:
        while (unit := self._next_unit(slot)) is not None:
            self._post(unit.job.admit)
            try:
                self.runner.start(slot, unit.prompt, unit.sampling, unit.job.grammar)
                return True
            except Exception as error:
                with self._wake:
                    del self._active[slot]
                self._fail(unit.job, error)
        return False

    def _next_unit(self, slot: int) -> Unit | None:
        with self._wake:
            job = self._waiting.peek()
            if job is None:
                return None
            unit = job.units.popleft()
            self._waiting.turn(done=not job.units)
            self._active[slot] = unit
            return unit

    def _embed_some(self) -> None:
        """One decode for the embeddings job whose turn it is."""
        with self._wake:
            job = self._embedding.peek()
        if job is None:
            return
        self._post(job.admit)
        try:
            job.vectors += self.runner.embed(job.inputs[len(job.vectors) :])
            self._failures = 0
        except ApiError as error:  # this model or machine cannot; nothing is broken
            self._fail(job, error)
        except Exception as error:
            self._fail(job, error)
            self._broken(error)
        done = len(job.vectors) >= len(job.inputs)
        if done:
            self._post(job.put, job.vectors)
        with self._wake:
            if self._embedding.peek() is job:  # it may have been cancelled meanwhile
                self._embedding.turn(done=done or job.cancelled)

    def _step(self) -> None:
        if not self._active:
            return
        try:
            tokens = self.runner.step()
            news = self._accept(tokens)
        except Exception as error:
            self._broken(error)
            return
        self._failures = 0
        if news:
            self._post(_deliver, news)

    def _accept(self, tokens: Sequence[tuple[int, int]]) -> list[tuple[GenerateJob, list[Piece]]]:
        news: dict[int, tuple[GenerateJob, list[Piece]]] = {}
        for slot, token in tokens:
            unit = self._active[slot]
            piece = unit.accept(self.runner.piece(token), end=self.runner.is_end(token))
            if piece is None:
                continue
            news.setdefault(id(unit.job), (unit.job, []))[1].append(piece)
            if piece.finish:
                self._release(slot)
        return list(news.values())

    def _release(self, slot: int) -> None:
        self.runner.stop(slot)
        with self._wake:
            del self._active[slot]

    def _broken(self, error: Exception) -> None:
        """Every sequence was in the failed step: end them, start over on a fresh context. Raises: EngineBroken."""
        traceback.print_exception(error, file=sys.stderr)
        self._failures += 1
        with self._wake:
            jobs = {id(unit.job): unit.job for unit in self._active.values()}
            self._active.clear()
        for job in jobs.values():
            self._fail(job, error)
        if self._failures >= _MAX_FAILURES:
            raise EngineBroken(f"{self._failures} steps failed in a row, the last with: {error}") from error
        self.runner.reset()

    def _fail(self, job: AnyJob, error: Exception) -> None:
        """End a job with an error; what else of it waits or runs is dropped like that of a client that left."""
        job.cancelled = True
        with self._wake:
            self._waiting.remove(job.tenant, job)  # type: ignore[arg-type]
            self._embedding.remove(job.tenant, job)  # type: ignore[arg-type]
        known = error if isinstance(error, ApiError) else failed("The engine failed while it worked on this request.")
        self._post(job.put, known)

    def _abandon(self, problem: Exception | None) -> None:
        """Nobody may be left waiting for a thread that is gone."""
        with self._wake:
            self._closing = True
            jobs: list[AnyJob] = [*self._waiting, *self._embedding, *(unit.job for unit in self._active.values())]
        for job in jobs:
            self._fail(job, problem or overloaded("The engine is shutting down."))

    def _ready(self, info: ModelInfo) -> None:
        self.info = info
        self.loaded.set_result(info)

    def _end(self, problem: Exception | None) -> None:
        if not self.loaded.done() and problem is not None:
            self.loaded.set_exception(problem)
            self.loaded.exception()  # told through `stopped` as well
        if problem is None:
            self.stopped.set_result(None)
        else:
            self.stopped.set_exception(problem)

    def _post(self, call: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(call, *args)


def _deliver(news: Sequence[tuple[GenerateJob, list[Piece]]]) -> None:
    for job, pieces in news:
        job.put(pieces)
