"""Tenants in the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Select, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import Conflict, NotFound
from gateway.records import Actor, TenantRecord
from gateway.store import schema
from gateway.store.database import Database
from gateway.store.rows import tenant_json, tenant_record, tenant_values
from gateway.store.turn import Turn, changing

_FIELDS = {"models", "limits", "weight", "priority", "tools"}


class Tenants:
    """Reads and changes tenants. A deleted one keeps its row, which is how other gateways learn of it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def tenants(self) -> list[TenantRecord]:
        """The living, by name. Raises: StoreUnavailable."""
        async with self._database.reading() as connection:
            return await read_tenants(connection, living())

    async def create_tenant(self, record: TenantRecord, actor: Actor) -> TenantRecord:
        """The tenant as stored, with its moment of creation.

        Raises: Conflict: the name is taken, or keys of another tenant of that name are left; StoreUnavailable.
        """
        async with changing(self._database) as turn:
            found = await _find(turn.connection, record.name)
            if found is not None and found.deleted_at is None:
                raise Conflict(f"There is already a tenant '{record.name}'. Choose another name, or update it.")
            await _require_no_keys(turn, record.name)
            fresh = replace(record, created_at=record.created_at or turn.now, deleted_at=None)
            await _write(turn, fresh, exists=found is not None)
            await turn.record("tenant.create", record.name, actor, after=tenant_json(fresh))
            return fresh

    async def update_tenant(self, name: str, changes: Mapping[str, Any], actor: Actor) -> TenantRecord:
        """`changes`: new values of models, limits, weight, priority or tools. Raises: NotFound, StoreUnavailable."""
        if wrong := changes.keys() - _FIELDS:
            raise ValueError(f"not to be changed: {', '.join(sorted(wrong))}")
        async with changing(self._database) as turn:
            before = await _living(turn.connection, name)
            after = replace(before, **changes)
            if after != before:
                await _write(turn, after, exists=True)
                await turn.record("tenant.update", name, actor, tenant_json(before), tenant_json(after))
            return after

    async def delete_tenant(self, name: str, actor: Actor) -> None:
        """Revokes its keys with it. Raises: NotFound, StoreUnavailable."""
        async with changing(self._database) as turn:
            before = await _living(turn.connection, name)
            after = replace(before, deleted_at=turn.now)
            await _write(turn, after, exists=True)
            revoked = await _revoke_keys(turn, name)
            await turn.record(
                "tenant.delete", name, actor, tenant_json(before), tenant_json(after) | {"revoked_keys": revoked}
            )


def living() -> Select[Any]:
    return select(schema.tenants).where(schema.tenants.c.deleted_at.is_(None))


async def read_tenants(connection: AsyncConnection, which: Select[Any]) -> list[TenantRecord]:
    rows = await connection.execute(which.order_by(schema.tenants.c.name))
    return [tenant_record(row) for row in rows]


async def _find(connection: AsyncConnection, name: str) -> TenantRecord | None:
    """The tenant, deleted or not."""
    row = (await connection.execute(select(schema.tenants).where(schema.tenants.c.name == name))).one_or_none()
    return None if row is None else tenant_record(row)


async def _living(connection: AsyncConnection, name: str) -> TenantRecord:
    found = await _find(connection, name)
    if found is None or found.deleted_at is not None:
        raise NotFound(f"There is no tenant '{name}'.")
    return found


async def _write(turn: Turn, record: TenantRecord, *, exists: bool) -> None:
    values = tenant_values(record) | {"changed": turn.version}
    if exists:
        await turn.connection.execute(update(schema.tenants).where(schema.tenants.c.name == record.name).values(values))
    else:
        await turn.connection.execute(insert(schema.tenants).values(values))


async def _require_no_keys(turn: Turn, tenant: str) -> None:
    """A tenant that has left the configuration leaves the keys behind that were stored for it. Raises: Conflict."""
    left = select(schema.keys.c.id).where(schema.keys.c.tenant == tenant, schema.keys.c.revoked_at.is_(None)).limit(1)
    if (await turn.connection.execute(left)).first() is not None:
        raise Conflict(
            f"There are keys of a tenant '{tenant}' that the configuration had, and they would work again. Revoke them "
            f"first (`sekisho keys list --tenant {tenant}`), or choose another name."
        )


async def _revoke_keys(turn: Turn, tenant: str) -> list[str]:
    """Returns their ids."""
    table = schema.keys
    its = (table.c.tenant == tenant) & table.c.revoked_at.is_(None)
    found = list((await turn.connection.execute(select(table.c.id).where(its).order_by(table.c.id))).scalars())
    await turn.connection.execute(update(table).where(its).values(revoked_at=turn.now, changed=turn.version))
    return found
