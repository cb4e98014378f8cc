"""Keys in the database, known by their digests.

A tenant's living keys have names of their own, but for a rotated key: it shares its name with its successor until it
expires. The rules hold because changes come one at a time (see `turn`), so no index has to know them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, Select, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import Conflict, NotFound
from gateway.records import Actor, KeyRecord
from gateway.store.database import Database
from gateway.store.rows import key_json, key_record, key_values
from gateway.store.schema import key_use
from gateway.store.schema import keys as table
from gateway.store.turn import Turn, changing

_FIELDS = {"name", "role", "models", "limits", "allow_from", "expires_at"}


class Keys:
    """Reads and changes keys. A revoked one keeps its row, which is how other gateways learn of it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def keys(self, tenant: str | None = None, *, revoked: bool = False) -> list[KeyRecord]:
        """Keys of one tenant or of all, by tenant and age, expired ones among them. Raises: StoreUnavailable."""
        which = every() if revoked else living()
        if tenant is not None:
            which = which.where(table.c.tenant == tenant)
        async with self._database.reading() as connection:
            return await read_keys(connection, which)

    async def key(self, identity: str) -> KeyRecord:
        """A key, revoked or not. Raises: NotFound, StoreUnavailable."""
        async with self._database.reading() as connection:
            return await _find(connection, identity)

    async def create_key(self, record: KeyRecord, actor: Actor) -> KeyRecord:
        """The key as stored, with its moment of creation. No tenant is looked up: it may be one of the configuration.

        Raises: Conflict: a living key of the tenant has the name, or this key was stored before; StoreUnavailable.
        """
        async with changing(self._database) as turn:
            await _require_free_name(turn, record)
            fresh = await _insert(turn, record)
            await turn.record("key.create", fresh.id, actor, after=key_json(fresh))
            return fresh

    async def update_key(self, identity: str, changes: Mapping[str, Any], actor: Actor) -> KeyRecord:
        """`changes`: new values of name, role, models, limits, allow_from or expires_at.

        Raises: NotFound: unknown or revoked; Conflict: the name is taken; StoreUnavailable.
        """
        if wrong := changes.keys() - _FIELDS:
            raise ValueError(f"not to be changed: {', '.join(sorted(wrong))}")
        async with changing(self._database) as turn:
            before = await _usable(turn, identity, expired=True)
            after = replace(before, **changes)
            if after == before:
                return after
            if after.name != before.name or not await _has_successor(turn, identity):
                await _require_free_name(turn, after)
            await _update(turn, after)
            await turn.record("key.update", identity, actor, key_json(before), key_json(after))
            return after

    async def revoke_key(self, identity: str, actor: Actor) -> KeyRecord:
        """The revoked key. Revoking it again changes nothing. Raises: NotFound, StoreUnavailable."""
        async with changing(self._database) as turn:
            before = await _find(turn.connection, identity)
            if before.revoked_at is not None:
                return before
            after = replace(before, revoked_at=turn.now)
            await _update(turn, after)
            await turn.record("key.revoke", identity, actor, key_json(before), key_json(after))
            return after

    async def rotate_key(self, identity: str, fresh: KeyRecord, expires_at: float, actor: Actor) -> KeyRecord:
        """Stores `fresh` as the successor of a key, with its tenant and name. The old key works until `expires_at`, or
        its own earlier end. Returns the successor.

        Raises: NotFound: unknown, revoked or expired; Conflict: it has a successor, or `fresh` was stored before;
                StoreUnavailable.
        """
        async with changing(self._database) as turn:
            before = await _usable(turn, identity)
            if await _has_successor(turn, identity):
                raise Conflict(f"The key '{identity}' was rotated before. Rotate its successor, or revoke that first.")
            ends = expires_at if before.expires_at is None else min(before.expires_at, expires_at)
            await _update(turn, replace(before, expires_at=ends))
            successor = replace(fresh, tenant=before.tenant, name=before.name, rotated_from=identity)
            successor = await _insert(turn, successor)
            after = key_json(successor) | {"old_expires_at": ends}
            await turn.record("key.rotate", identity, actor, key_json(before), after)
            return successor

    async def mark_used(self, last: Mapping[str, float]) -> None:
        """Notes when keys (by id) were last used. An earlier moment than the known one is no news.

        Raises: StoreUnavailable.
        """
        if not last:
            return
        make = postgresql.insert if self._database.dialect == "postgresql" else sqlite.insert
        new = make(key_use)
        newer = new.on_conflict_do_update(
            index_elements=[key_use.c.key],
            set_={"last_used_at": new.excluded.last_used_at},
            where=new.excluded.last_used_at > key_use.c.last_used_at,
        )
        # In one order everywhere: two gateways that lock the same rows in different orders would block each other.
        rows = [{"key": key, "last_used_at": moment} for key, moment in sorted(last.items())]
        async with self._database.writing() as connection:
            await connection.execute(newer, rows)


def every() -> Select[Any]:
    used = table.outerjoin(key_use, key_use.c.key == table.c.id)
    return select(table, key_use.c.last_used_at).select_from(used)


def living() -> Select[Any]:
    return every().where(table.c.revoked_at.is_(None))


async def read_keys(connection: AsyncConnection, which: Select[Any]) -> list[KeyRecord]:
    rows = await connection.execute(which.order_by(table.c.tenant, table.c.created_at, table.c.id))
    return [key_record(row) for row in rows]


async def _find(connection: AsyncConnection, identity: str) -> KeyRecord:
    row = (await connection.execute(every().where(table.c.id == identity))).one_or_none()
    if row is None:
        raise NotFound(f"There is no key '{identity}'.")
    return key_record(row)


async def _usable(turn: Turn, identity: str, *, expired: bool = False) -> KeyRecord:
    found = await _find(turn.connection, identity)
    if found.revoked_at is not None:
        raise NotFound(f"The key '{identity}' was revoked. Create another.")
    if not expired and found.expires_at is not None and found.expires_at <= turn.now:
        raise NotFound(f"The key '{identity}' has expired. Create another.")
    return found


async def _require_free_name(turn: Turn, record: KeyRecord) -> None:
    """Raises: Conflict: another key that can be used and has no successor has the name."""
    successor = table.alias("successor")
    rotated = select(successor.c.id).where(successor.c.rotated_from == table.c.id, successor.c.revoked_at.is_(None))
    taken = select(table.c.id).where(
        table.c.tenant == record.tenant,
        table.c.name == record.name,
        table.c.id != record.id,
        table.c.revoked_at.is_(None),
        _unexpired(turn.now),
        ~rotated.exists(),
    )
    if (await turn.connection.execute(taken.limit(1))).first() is not None:
        raise Conflict(
            f"The tenant '{record.tenant}' already has a key '{record.name}'. Choose another name, or rotate that key."
        )


def _unexpired(now: float) -> ColumnElement[bool]:
    return or_(table.c.expires_at.is_(None), table.c.expires_at > now)


async def _has_successor(turn: Turn, identity: str) -> bool:
    which = select(table.c.id).where(table.c.rotated_from == identity, table.c.revoked_at.is_(None))
    return (await turn.connection.execute(which.limit(1))).first() is not None


async def _insert(turn: Turn, record: KeyRecord) -> KeyRecord:
    same = or_(table.c.id == record.id, table.c.digest == record.digest)
    # Asked for instead of left to the unique index: PostgreSQL logs the digest when an index refuses it.
    if (await turn.connection.execute(select(table.c.id).where(same).limit(1))).first() is not None:
        raise Conflict("This key was stored before, perhaps under another name. Make a new one.")
    fresh = replace(record, created_at=record.created_at or turn.now, revoked_at=None, last_used_at=None)
    await turn.connection.execute(insert(table).values(key_values(fresh) | {"changed": turn.version}))
    return fresh


async def _update(turn: Turn, record: KeyRecord) -> None:
    values = key_values(record) | {"changed": turn.version}
    await turn.connection.execute(update(table).where(table.c.id == record.id).values(values))
