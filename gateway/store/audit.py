"""The audit log in the database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from gateway.records import JSON, Actor, AuditEntry
from gateway.store.chain import AuditVerdict, Walk, entry
from gateway.store.database import Database
from gateway.store.schema import audit as table
from gateway.store.schema import state
from gateway.store.turn import changing

_PAGE = 500  # entries read at a time


class Audit:
    """Appends to the log, reads it and checks it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def append_audit(
        self, action: str, target: str, actor: Actor, before: JSON | None = None, after: JSON | None = None
    ) -> AuditEntry:
        """For changes to what is not in the database: replicas, the configuration. Raises: StoreUnavailable."""
        async with changing(self._database, people=False) as turn:
            return await turn.record(action, target, actor, before, after)

    async def audit(self, *, after: int = 0, limit: int = 100, newest_first: bool = False) -> list[AuditEntry]:
        """Entries in order, from the one after `seq` = `after` on. Newest first: from the one before it, 0 = the last.

        Raises: StoreUnavailable.
        """
        which = select(table).limit(limit)
        if newest_first:
            which = which.order_by(table.c.seq.desc())
            which = which.where(table.c.seq < after) if after else which
        else:
            which = which.order_by(table.c.seq).where(table.c.seq > after)
        async with self._database.reading() as connection:
            return [entry(row._asdict()) for row in await connection.execute(which)]

    async def verify_audit(self, expect: str | None = None) -> AuditVerdict:
        """Reads the whole log and checks that it is as it was written.

        `expect` is a hash that an earlier verdict named as `head` and that was kept where nobody who can write to the
        database could change it. Without it a log that was forged from the first entry on passes (see `chain`).

        Raises: StoreUnavailable.
        """
        walk = Walk(expect)
        last: int | None = None
        while True:
            page, entries, head = await self._page(last)
            for row in page:
                if problem := walk.step(row):
                    return AuditVerdict(False, walk.entries, walk.head, problem, walk.entries + 1)
            if len(page) < _PAGE:
                problem = walk.finish(entries, head)
                broken_at = walk.entries + 1 if problem else None
                return AuditVerdict(not problem, walk.entries, walk.head, problem, broken_at)
            last = page[-1]["seq"]

    async def _page(self, last: int | None) -> tuple[list[dict[str, Any]], int, str]:
        """The entries after `last`, and what `state` says at the same moment of how many there are and how they end."""
        which = select(table).order_by(table.c.seq).limit(_PAGE)
        which = which if last is None else which.where(table.c.seq > last)
        async with self._database.reading() as connection:
            page = [row._asdict() for row in await connection.execute(which)]
            now: Any = (await connection.execute(select(state))).one()
        return page, now.audit_entries, now.audit_head
