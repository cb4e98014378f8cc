"""What waits and runs in the engine: requests, and the single texts they ask for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from backends.llamacpp.answers import Piece
from backends.llamacpp.errors import overloaded
from backends.llamacpp.protocol import Sampling
from backends.llamacpp.text import TextAssembler

News = TypeVar("News")


class Job(Generic[News]):
    """One request. The engine thread calls `admit` and `put` through the event loop and reads `cancelled`."""

    def __init__(self, tenant: str, loop: asyncio.AbstractEventLoop) -> None:
        self.tenant = tenant
        self.cancelled = False  # written by the event loop, read by the engine thread between steps
        self._admitted: asyncio.Future[None] = loop.create_future()
        self._news: asyncio.Queue[News | Exception] = asyncio.Queue()

    def admit(self) -> None:
        """The engine began to work on it."""
        if not self._admitted.done():
            self._admitted.set_result(None)

    def put(self, news: News | Exception) -> None:
        """Progress, or the error that ends it."""
        self.admit()
        self._news.put_nowait(news)

    async def admitted(self, timeout_s: float) -> None:
        """Wait for a place. Raises: ApiError 503 after `timeout_s` seconds."""
        try:
            await asyncio.wait_for(self._admitted, timeout_s)
        except TimeoutError:
            raise overloaded(f"The request waited {timeout_s:g} s for a free place; try again later.") from None

    async def news(self) -> News:
        """The next progress. Raises: what the engine put in as the end."""
        item = await self._news.get()
        if isinstance(item, Exception):
            raise item
        return item

    def more(self) -> list[News]:
        """What else is there already, so that it can leave in the same write. Errors stay for `news`."""
        found: list[News] = []
        while not self._news.empty():
            item = self._news.get_nowait()
            if isinstance(item, Exception):
                self._news.put_nowait(item)
                break
            found.append(item)
        return found


@dataclass(slots=True)
class Unit:
    """One text of a request: a choice of a prompt. Owned by the engine thread once the job is queued."""

    job: GenerateJob
    index: int
    prompt: Sequence[int]
    sampling: Sampling
    max_tokens: int
    text: TextAssembler
    tokens: int = 0

    def accept(self, piece: bytes, *, end: bool) -> Piece | None:
        """Take the next token; None when there is nothing to tell yet."""
        self.tokens += 1
        text = "" if end else self.text.push(piece)
        over = end or self.text.stopped or self.tokens >= self.max_tokens
        if over:
            text += self.text.finish()  # may complete a stop string
        finish = None if not over else "stop" if end or self.text.stopped else "length"
        if not text and not finish and self.tokens > 1:
            return None
        return Piece(self.index, text, self.tokens, finish)


class GenerateJob(Job[list[Piece]]):
    """A request for text."""

    def __init__(self, tenant: str, loop: asyncio.AbstractEventLoop, grammar: str | None) -> None:
        super().__init__(tenant, loop)
        self.grammar = grammar
        self.units: deque[Unit] = deque()  # not started yet

    async def pieces(self, choices: int) -> AsyncIterator[list[Piece]]:
        """Everything generated, until each of the choices has its finish reason."""
        while choices:
            pieces = await self.news()
            for further in self.more():
                pieces += further
            choices -= sum(piece.finish is not None for piece in pieces)
            yield pieces


class EmbedJob(Job[list[list[float]]]):
    """A request for vectors."""

    def __init__(self, tenant: str, loop: asyncio.AbstractEventLoop, inputs: Sequence[Sequence[int]]) -> None:
        super().__init__(tenant, loop)
        self.inputs = inputs
        self.vectors: list[list[float]] = []  # engine thread's


AnyJob = Job[Any]
