"""The connection to Redis, or to a Redis Cluster: runs scripts in batches, and hides which of the two it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gateway.config import StartupError
from gateway.limits_redis.terms import Call, Reply

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.cluster import RedisCluster

ANSWERS_IN = 2.0  # seconds; nobody waits that long, but a later answer still tells what became of a call
CONNECTS_IN = 1.0


def client(url: str) -> Redis:
    """A client of one server, which has not connected yet. Raises: StartupError."""
    try:
        from redis.asyncio import Redis
    except ImportError:
        raise StartupError("`state.redis` needs the Redis client: install sekisho[redis]") from None
    try:
        found = Redis.from_url(url, **_settings())
        pool: Any = found.connection_pool
        pool.make_connection()  # which looks at the parameters behind the question mark
    except (TypeError, ValueError):
        raise StartupError("`state.redis` has a parameter that the Redis client does not know or cannot read") from None
    return found


def _settings() -> dict[str, Any]:
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    return {
        "socket_timeout": ANSWERS_IN,
        "socket_connect_timeout": CONNECTS_IN,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "driver_info": None,
    }


class Link:
    """Used by one task at a time."""

    def __init__(self, url: str) -> None:
        """Raises: StartupError."""
        self._url = url
        self._single = client(url)
        self._cluster: RedisCluster | None = None
        self._map_is_old = False  # of which node holds what
        self._knows_kind = False
        from redis.exceptions import ConnectionError, NoScriptError

        self._lost, self._no_script = ConnectionError, NoScriptError

    async def run(self, calls: Sequence[Call]) -> list[Reply | Exception]:
        """Runs each call. In place of a reply stands what went wrong; whether Redis has run it is then unknown."""
        replies = await self._try(calls, by_digest=True)
        if any(isinstance(reply, self._lost) for reply in replies):  # a connection that was idle may have ended
            replies = await self._try(calls, by_digest=True)
        unknown = [place for place, reply in enumerate(replies) if isinstance(reply, self._no_script)]
        if unknown:
            again = await self._try([calls[place] for place in unknown], by_digest=False)
            for place, reply in zip(unknown, again, strict=True):
                replies[place] = reply
        return replies

    async def close(self) -> None:
        await self._single.aclose()
        if self._cluster is not None:
            await self._cluster.aclose()

    async def _try(self, calls: Sequence[Call], *, by_digest: bool) -> list[Reply | Exception]:
        try:
            target = await self._target()
            pipe = target.pipeline(transaction=False)
            for script, key, args in calls:
                if by_digest:
                    pipe.execute_command("EVALSHA", script.digest, 1, key, *args)
                else:
                    pipe.execute_command("EVAL", script.text, 1, key, *args)
            replies: list[Reply | Exception] = await pipe.execute(raise_on_error=False)
        except Exception as error:  # of whatever kind, nobody may be left waiting
            replies = [error] * len(calls)
        failed = [reply for reply in replies if isinstance(reply, Exception) and not isinstance(reply, self._no_script)]
        self._map_is_old = self._map_is_old or bool(failed)
        return replies

    async def _target(self) -> Any:
        if not self._knows_kind:
            about = await self._single.info("cluster")
            self._is_cluster, self._knows_kind = about.get("cluster_enabled") == 1, True
        if not self._is_cluster:
            return self._single
        if self._cluster is None:
            from redis.asyncio.cluster import RedisCluster

            found = RedisCluster.from_url(self._url, **_settings())
            await found.initialize()
            self._cluster = found
        elif self._map_is_old:  # to begin anew would cost 0.1 s: the client then reads descriptions of all commands
            await self._cluster.nodes_manager.initialize()
        self._map_is_old = False
        return self._cluster
