"""Short messages between gateways through Redis: something has changed, look yourself. Any of them may get lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from gateway.limits_redis.link import client
from gateway.limits_redis.terms import end

Listener = Callable[[str], None]
_PREFIX = "sekisho:"
_PUBLISHED_IN = 1.0  # seconds
_QUIET_FOR = 15.0  # seconds without a message after which the connection is tried
_PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between attempts to connect

log = logging.getLogger("sekisho")


class Notices:
    """Publishes and listens. In a cluster every node passes on what is published at any."""

    def __init__(self, url: str) -> None:
        """Raises: StartupError."""
        self._client = client(url)
        from redis.exceptions import RedisError

        self._troubles = (RedisError, OSError, TimeoutError)
        self._listeners: list[asyncio.Task[None]] = []

    async def publish(self, channel: str, message: str) -> None:
        """Without Redis the message is lost: whoever listens is told to look when it has connected again."""
        try:
            async with asyncio.timeout(_PUBLISHED_IN):
                await self._client.publish(_PREFIX + channel, message)
        except self._troubles:
            return

    def subscribe(self, channel: str, callback: Listener) -> None:
        self._listeners.append(asyncio.create_task(self._listen(_PREFIX + channel, callback)))

    async def close(self) -> None:
        await end(self._listeners)
        await self._client.aclose()

    async def _listen(self, channel: str, callback: Listener) -> None:
        pauses = iter(_PAUSES)

        def heard(message: str) -> None:
            nonlocal pauses
            pauses = iter(_PAUSES)
            _call(callback, message)

        while True:
            reader: Any = self._client.pubsub()
            try:
                await reader.subscribe(channel)
                await _read(reader, heard)
            except self._troubles:
                pause = next(pauses, _PAUSES[-1])
            finally:
                await reader.aclose()
            await asyncio.sleep(pause)


async def _read(reader: Any, heard: Listener) -> None:
    """Until the connection ends. Raises: the client's errors, TimeoutError when not even a ping is answered."""
    tried = False
    while True:
        message = await reader.get_message(timeout=_QUIET_FOR)
        if message is None:
            if tried:
                raise TimeoutError
            await reader.ping()
        elif message["type"] == "subscribe":
            heard("")
        elif message["type"] == "message":
            heard(message["data"].decode("utf-8", "replace"))
        tried = message is None


def _call(callback: Listener, message: str) -> None:
    try:
        callback(message)
    except Exception:
        log.exception("a notice could not be handled")
