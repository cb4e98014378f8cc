"""What a worker needs of the other workers of its gateway."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from prometheus_client.core import Metric

from gateway.config import ConfigError, Problem
from gateway.errors import StoreUnavailable
from gateway.workers.control import Link, LinkLost, Refused

PATIENCE = 5.0  # seconds for an answer of the others
RELOAD_PATIENCE = 60.0  # discovery may have to wait for engines


class Peers(Protocol):
    """The other workers, and who keeps the configuration for all."""

    async def page(self, own: Sequence[Metric]) -> Sequence[Metric]:
        """The metrics of all workers, this one's included."""
        ...

    async def refresh(self) -> None:
        """All workers know what the database says of tenants and keys when this returns."""
        ...

    async def set_draining(self, replica: str, draining: bool) -> None:
        """At the other workers too."""
        ...

    async def replicas(self) -> Sequence[Sequence[dict[str, Any]]]:
        """What each of the others says of its replicas."""
        ...

    def freed(self, replica: str) -> None:
        """A place came free that others wait for."""
        ...

    async def reload(self) -> None:
        """Raises: ConfigError."""
        ...


async def _no_reload() -> None:
    raise RuntimeError("nobody keeps the configuration")


class Alone:
    """A gateway of one process."""

    def __init__(self, reload: Callable[[], Awaitable[None]] = _no_reload) -> None:
        self._reload = reload

    async def page(self, own: Sequence[Metric]) -> Sequence[Metric]:
        return own

    async def refresh(self) -> None:
        pass

    async def set_draining(self, replica: str, draining: bool) -> None:
        pass

    async def replicas(self) -> Sequence[Sequence[dict[str, Any]]]:
        return ()

    def freed(self, replica: str) -> None:
        pass

    async def reload(self) -> None:
        await self._reload()


class Supervised:
    """The others, by way of the supervisor. Questions that it does not answer in time go unanswered: a worker goes on
    serving by what it knows itself."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def page(self, own: Sequence[Metric]) -> Sequence[Metric]:
        """Raises: StoreUnavailable rather than give counters that fall."""
        try:
            found: Sequence[Metric] = await self._link.ask("page", own, patience=PATIENCE)
        except (LinkLost, Refused):
            raise StoreUnavailable("The other workers' metrics cannot be read at the moment.", retry_after=2) from None
        return found

    async def refresh(self) -> None:
        await self._ask("others", "refresh")

    async def set_draining(self, replica: str, draining: bool) -> None:
        await self._ask("drain", replica, draining)

    async def replicas(self) -> Sequence[Sequence[dict[str, Any]]]:
        return await self._ask("others", "replicas") or ()

    def freed(self, replica: str) -> None:
        self._link.tell("freed", replica)

    async def reload(self) -> None:
        try:
            await self._link.ask("reload", patience=RELOAD_PATIENCE)
        except Refused as refusal:
            raise ConfigError([Problem("", None, "", line) for line in str(refusal).splitlines()]) from None
        except LinkLost:
            raise StoreUnavailable("The gateway does not answer its worker. Try again.", retry_after=2) from None

    async def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return await self._link.ask(name, *arguments, patience=PATIENCE)
        except (LinkLost, Refused):
            return None
