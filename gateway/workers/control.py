"""How the processes of one gateway talk: questions and answers over a socket pair, pickled.

Both ends are this program, and the socket is inherited and reachable by nobody else, so what arrives is trusted. A
frame is its length (4 bytes, big endian) and a pickle of (number, kind, payload). Every question gets an answer or ends
with `LinkLost`.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

MOST_FRAME = 1 << 30  # bytes; a mistake in the framing should not take all memory

Handler = Callable[..., Awaitable[Any]]  # called with the name of a question and what came with it

log = logging.getLogger("sekisho")


class LinkLost(Exception):
    """The other process has ended, or does not answer."""


class Refused(Exception):
    """The other process could not do what it was asked; the text says why."""


class Link:
    """One end. `handle(name, *arguments)` answers the other end's questions."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.lost = asyncio.Event()

    async def open(self, end: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, end)
        self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        self._spawn(self._read(reader))

    async def ask(self, name: str, *arguments: Any, patience: float) -> Any:
        """What the other end's handler returns. `patience`: seconds. Raises: LinkLost, Refused."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(number, name, arguments)
            async with asyncio.timeout(patience):
                return await answer
        except TimeoutError:
            raise LinkLost(f"no answer to {name} within {patience:g} s") from None
        finally:
            self._asked.pop(number, None)

    def tell(self, name: str, *arguments: Any) -> None:
        """A question whose answer nobody waits for; nothing happens when the other end is gone."""
        if not self.lost.is_set():
            self._send(next(self._numbers), name, arguments)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        for task in self._tasks:
            task.cancel()
        self._lose()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4))
                if size > MOST_FRAME:
                    raise ValueError(size)
                number, kind, payload = pickle.loads(await reader.readexactly(size))
                if kind in ("answer", "refusal"):
                    self._answered(number, kind, payload)
                else:
                    self._spawn(self._respond(number, kind, payload))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except (ValueError, pickle.UnpicklingError, EOFError):
            log.exception("a message between the gateway's processes cannot be read")
        finally:
            self._lose()

    async def _respond(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer = await self._handle(name, *arguments)
        except Refused as refusal:
            self._send(number, "refusal", str(refusal))
        except Exception as error:
            log.exception("%s between the gateway's processes failed", name)
            self._send(number, "refusal", f"{type(error).__name__} in another process of this gateway")
        else:
            self._send(number, "answer", answer)

    def _answered(self, number: int, kind: str, payload: Any) -> None:
        future = self._asked.get(number)
        if future is not None and not future.done():
            if kind == "answer":
                future.set_result(payload)
            else:
                future.set_exception(Refused(payload))

    def _send(self, number: int, kind: str, payload: Any) -> None:
        if self._writer is None or self.lost.is_set():
            raise LinkLost("the other process has ended")
        frame = pickle.dumps((number, kind, payload), pickle.HIGHEST_PROTOCOL)
        self._writer.write(len(frame).to_bytes(4) + frame)

    def _lose(self) -> None:
        self.lost.set()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(LinkLost("the other process has ended"))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
