"""The database: tenants, keys, usage and the audit log, in SQLite or PostgreSQL.

    turn        one administrative change            tenants, keys, usage, audit   what is stored
    database    connections and transactions         failures                      errors in the gateway's words
    schema      the tables                           migrate, migrations           how they come to be

Every method raises StoreUnavailable when the database does not answer in time; nothing has happened then, except where
the connection broke during the commit. Calls may be cancelled at any point.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records import Changes, Mark, News
from gateway.store import keys, schema, tenants
from gateway.store.audit import Audit
from gateway.store.chain import AuditVerdict
from gateway.store.database import connect
from gateway.store.failures import DRIVER_ERRORS, at_start
from gateway.store.keys import Keys
from gateway.store.migrate import migrate
from gateway.store.tenants import Tenants
from gateway.store.usage import Usages

__all__ = ["AuditVerdict", "Store"]


class Store(Tenants, Keys, Usages, Audit):
    """An open database with the newest schema. Belongs to the event loop that opened it."""

    @classmethod
    async def open(cls, url: str) -> Store:
        """Connects, and migrates if need be. `url` as the configuration has it, paths absolute.

        Raises: StoreUnavailable: nobody answers. StartupError: the user has to change something.
        """
        file = url.removeprefix("sqlite:///") if url.startswith("sqlite:///") else ""
        try:
            database = await connect(url)
            try:
                await migrate(database)
            except BaseException:
                await database.close()
                raise
        except DRIVER_ERRORS as error:
            raise at_start(error, file) from None
        return cls(database)

    async def close(self) -> None:
        await self._database.close()

    async def news(self, known: Mark | None) -> News | None:
        """What a gateway that knows the database up to `known` has to learn; None = nothing. All that lives, where it
        knows nothing, or another database: an older one was put back, and as many changes were made to that since.
        """
        async with self._database.reading() as connection:
            now = await _mark(connection)
            if now == known:
                return None
            whole = known is None or not await _goes_back_to(connection, known, now)
            since = 0 if known is None or whole else known.version
            return News(now, await _changes(connection, since, now.version), whole)


async def _mark(connection: AsyncConnection) -> Mark:
    state = schema.state.c
    return Mark(*(await connection.execute(select(state.version, state.audit_entries, state.audit_head))).one())


async def _goes_back_to(connection: AsyncConnection, known: Mark, now: Mark) -> bool:
    """Whether the history of the database leads over `known`: each change of tenants or keys is an entry of the trail,
    whose hash covers all entries before it."""
    if known.version > now.version or known.entries > now.entries:
        return False
    last = select(schema.audit.c.hash).where(schema.audit.c.seq == known.entries)
    return not known.entries or (await connection.execute(last)).scalar_one_or_none() == known.head


async def _changes(connection: AsyncConnection, since: int, version: int) -> Changes:
    """What has changed after version `since`, deleted and revoked ones among it; 0 = all that live."""
    which_tenants, which_keys = tenants.living(), keys.living()
    if since > 0:
        which_tenants = select(schema.tenants).where(schema.tenants.c.changed > since)
        which_keys = keys.every().where(schema.keys.c.changed > since)
    found = await tenants.read_tenants(connection, which_tenants)
    return Changes(version, found, await keys.read_keys(connection, which_keys))
