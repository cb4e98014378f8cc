"""Brings a database to the newest schema. Gateways that start at the same moment do it once."""

from __future__ import annotations

from pathlib import Path

from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from gateway.config import StartupError
from gateway.store.database import Database
from gateway.store.schema import metadata

_STEPS = Path(__file__).with_name("migrations")
_LOCK = 0x5E_C1_50  # any number, as long as no other program locks the same in this database


async def migrate(database: Database) -> None:
    """Raises: StartupError: the schema is of a newer program, or of another; and the errors of the driver."""
    steps = ScriptDirectory(str(_STEPS))
    async with database.raw(writes=False) as connection:
        # The usual start has nothing to do and waits for no lock.
        newest = await connection.run_sync(_is_newest, steps)
    if not newest:
        async with database.raw(writes=True) as connection:
            await connection.run_sync(_upgrade, steps)


def _is_newest(connection: Connection, steps: ScriptDirectory) -> bool:
    heads = MigrationContext.configure(connection).get_current_heads()
    if not set(heads) <= {step.revision for step in steps.walk_revisions()}:
        raise StartupError(
            "the database was last used by a newer version of sekisho: install that version, "
            "or restore the backup from before the upgrade"
        )
    return heads == (steps.get_current_head(),)


def _upgrade(connection: Connection, steps: ScriptDirectory) -> None:
    """In the caller's transaction: SQLite's is exclusive already, PostgreSQL's gets a lock that ends with it."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
    context = MigrationContext.configure(
        connection, opts={"fn": lambda heads, _: steps._upgrade_revs("head", heads), "script": steps}
    )
    if not context.get_current_heads():
        _refuse_strangers(connection)
    # Not alembic's global `op`: two stores of one process would take it from each other.
    context.run_migrations(operations=Operations(context))


def _refuse_strangers(connection: Connection) -> None:
    taken = sorted(metadata.tables.keys() & set(inspect(connection).get_table_names()))
    if taken:
        raise StartupError(
            f"the database holds tables of another program ({', '.join(taken)}): give sekisho a database of its own"
        )
