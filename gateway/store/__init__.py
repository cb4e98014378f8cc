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

from gateway.records import Changes
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

    async def version(self) -> int:
        """Number of the last change to tenants or keys."""
        async with self._database.reading() as connection:
            return await _version(connection)

    async def changes(self, since: int) -> Changes:
        """What has changed after version `since`, deleted and revoked ones among it; 0 = all that live.

        A version below `since` says that the database was replaced by an older one: ask again with 0.
        """
        which_tenants, which_keys = tenants.living(), keys.living()
        if since > 0:
            which_tenants = select(schema.tenants).where(schema.tenants.c.changed > since)
            which_keys = keys.every().where(schema.keys.c.changed > since)
        async with self._database.reading() as connection:
            version = await _version(connection)
            found = await tenants.read_tenants(connection, which_tenants)
            return Changes(version, found, await keys.read_keys(connection, which_keys))


async def _version(connection: AsyncConnection) -> int:
    found: int = (await connection.execute(select(schema.state.c.version))).scalar_one()
    return found
