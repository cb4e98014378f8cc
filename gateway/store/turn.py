"""One administrative change: a transaction that bumps the version and leaves an audit entry with what it writes."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records import JSON, Actor, AuditEntry
from gateway.store.chain import canonical, entry_hash
from gateway.store.database import Database
from gateway.store.schema import audit, state, storable


class Turn:
    """The right to change something. There is one at a time, over all gateways that share the database."""

    def __init__(self, connection: AsyncConnection, version: int, entries: int, head: str) -> None:
        self.connection = connection
        self.version = version  # for the `changed` of what is written
        self.now = time.time()
        self.entries, self.head = entries, head  # of the audit log

    async def record(
        self, action: str, target: str, actor: Actor, before: JSON | None = None, after: JSON | None = None
    ) -> AuditEntry:
        """Appends to the audit log."""
        fields: dict[str, Any] = {
            "seq": self.entries + 1,
            "time": self.now,
            "actor": storable(actor.name),
            "address": storable(actor.address),
            "action": storable(action),
            "target": storable(target),
            "before": _plain(before),
            "after": _plain(after),
            "previous": self.head,
        }
        entry = AuditEntry(**fields, hash=entry_hash(fields))
        texts = {name: None if fields[name] is None else canonical(fields[name]) for name in ("before", "after")}
        await self.connection.execute(insert(audit).values(**fields | texts, hash=entry.hash))
        self.entries, self.head = entry.seq, entry.hash
        return entry


@asynccontextmanager
async def changing(database: Database, *, people: bool = True) -> AsyncIterator[Turn]:
    """A turn to change tenants and keys, or (`people=False`) only to write to the audit log.

    The row of `state` is locked from here to the commit, so versions become visible in their order: whoever has seen
    one has seen, or can see, all changes up to it. A turn without an audit entry has changed nothing and leaves no
    trace.
    """
    async with database.writing() as connection:
        now = (await connection.execute(select(state).with_for_update())).one()
        turn = Turn(connection, now.version + 1 if people else now.version, now.audit_entries, now.audit_head)
        yield turn
        if turn.entries != now.audit_entries:
            await connection.execute(
                update(state).values(version=turn.version, audit_entries=turn.entries, audit_head=turn.head)
            )


def _plain(value: JSON | None) -> JSON | None:
    """As it will be read again: lists for tuples."""
    plain: JSON | None = json.loads(canonical(value))
    return plain
