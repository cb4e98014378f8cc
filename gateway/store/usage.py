"""Usage in the database: one row a finished request, added up when somebody asks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Column, ColumnElement, Integer, Select, case, cast, delete, func, literal_column, select, tuple_
from sqlalchemy import types as sql

from gateway.errors import BadRequest
from gateway.records import USAGE_GROUPS, UsageQuery, UsageRow
from gateway.store.database import Database
from gateway.store.schema import Words, storable
from gateway.store.schema import usage as table

MOST_TOKENS = 10**15  # of one request: what an engine claims beyond this must not make a sum overflow

MOST_GROUPS = 50_000  # in one answer: a request a second makes so many in a day, grouped by everything

_FILTERS = ("tenant", "key", "model", "operation")
_MOMENTS = {  # what the UTC calendar shows at the beginning: for SQLite's strftime, for PostgreSQL's to_char
    "hour": ("%Y-%m-%dT%H:00Z", 'YYYY-MM-DD"T"HH24":00Z"'),
    "day": ("%Y-%m-%d", "YYYY-MM-DD"),
    "month": ("%Y-%m", "YYYY-MM"),
}
_TEXTS = [place for place, column in enumerate(table.columns) if isinstance(column.type, Words)]
_COUNTS = [UsageRow._fields.index(name) for name in ("prompt", "cached", "completion", "reasoning")]
_SUMS: dict[str, ColumnElement[Any]] = {
    "requests": func.count(),
    "failed": func.sum(case((table.c.status >= 400, 1), else_=0)),
    "prompt": func.sum(table.c.prompt),
    "cached": func.sum(table.c.cached),
    "completion": func.sum(table.c.completion),
    "reasoning": func.sum(table.c.reasoning),
    "tokens": func.sum(table.c.prompt + table.c.completion),
    "estimated": func.sum(case((table.c.source == "estimate", 1), else_=0)),
}


class Usages:
    """Adds, adds up and forgets usage."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add_usage(self, rows: Sequence[UsageRow]) -> None:
        """All of them or none. Rows that are there already, by id, count once. Raises: StoreUnavailable."""
        if not rows:
            return
        statement = _insert_sql(self._database.dialect)
        kept = [_kept(row) for row in rows]
        async with self._database.writing() as connection:
            await connection.exec_driver_sql(statement, kept)

    async def usage(self, query: UsageQuery) -> list[dict[str, Any]]:
        """One dict a group, sorted by group: its fields, then the sums. Without grouping one dict, be it of zeros.

        Raises: BadRequest: a group or filter that is none, more than MOST_GROUPS groups; StoreUnavailable.
        """
        groups = [self._group(name) for name in query.group_by]
        sums = [total.label(f"sum_{name}") for name, total in _SUMS.items()]
        which = select(*groups, *sums).where(*_conditions(query)).group_by(*groups).limit(MOST_GROUPS + 1)
        async with self._database.reporting() as connection:
            rows = (await connection.execute(which)).all()
        if len(rows) > MOST_GROUPS:
            raise BadRequest(
                f"That makes more than {MOST_GROUPS} groups. Ask for a shorter period, or group by less.",
                param="group_by",
                code="invalid_value",
            )
        return await asyncio.to_thread(_lines, rows, (*query.group_by, *_SUMS))

    async def usage_rows(
        self, query: UsageQuery, *, limit: int, after: tuple[float, str] | None = None
    ) -> list[UsageRow]:
        """Single requests, by (time, id); `after` is that of the last row of the page before.

        Raises: BadRequest: a filter that is none; StoreUnavailable.
        """
        which = select(table).where(*_conditions(query)).order_by(table.c.time, table.c.id).limit(limit)
        if after is not None:
            which = which.where(tuple_(table.c.time, table.c.id) > tuple_(*after, types=[sql.Double, table.c.id.type]))
        async with self._database.reporting() as connection:
            return [UsageRow._make(row) for row in await connection.execute(which)]

    async def spent(self, since: float, until: float) -> list[tuple[str, str, str, int]]:
        """(tenant, key, model, tokens) of what was used from `since` on, before `until`. The model is the one whose
        limits were charged: where a fallback has answered, the fallback.

        Raises: StoreUnavailable.
        """
        owner = (table.c.tenant, table.c.key, table.c.model, table.c.replica)
        tokens = _SUMS["tokens"]
        period = (table.c.time >= since, table.c.time < until)
        which: Select[Any] = select(*owner, tokens).where(*period).group_by(*owner).having(tokens > 0)
        found: Counter[tuple[str, str, str]] = Counter()
        async with self._database.reading() as connection:
            for tenant, key, model, replica, used in await connection.execute(which):
                served = replica.rpartition("/")[0] or model  # ids of replicas begin with their model's name
                found[tenant, key, served] += int(used)
        return sorted((*one, used) for one, used in found.items())

    async def forget_usage(self, before: float, at_most: int = 5000) -> int:
        """Deletes the oldest rows from before a moment. Returns how many. Raises: StoreUnavailable."""
        oldest = select(table.c.id).where(table.c.time < before).order_by(table.c.time, table.c.id).limit(at_most)
        async with self._database.writing() as connection:
            done = await connection.execute(delete(table).where(table.c.id.in_(oldest)))
        return done.rowcount

    def _group(self, name: str) -> ColumnElement[Any]:
        if name not in USAGE_GROUPS:
            raise BadRequest(f"Usage is grouped by {', '.join(USAGE_GROUPS)}.", param="group_by")
        if name not in _MOMENTS:
            return table.c[name]
        for_sqlite, for_postgres = _MOMENTS[name]
        # Whole seconds first: SQLite's calendar would round the last half millisecond up into the next hour.
        if self._database.dialect == "sqlite":
            seconds = cast(table.c.time, Integer)
            return func.strftime(literal_column(f"'{for_sqlite}'"), seconds, literal_column("'unixepoch'"))
        utc = func.timezone(literal_column("'UTC'"), func.to_timestamp(func.floor(table.c.time)))
        return func.to_char(utc, literal_column(f"'{for_postgres}'"))


def _conditions(query: UsageQuery) -> Iterable[ColumnElement[bool]]:
    yield table.c.time >= query.since
    yield table.c.time < query.until
    for name, value in query.where.items():
        if name not in _FILTERS:
            raise BadRequest(f"Usage is selected by {', '.join(_FILTERS)}.", param=name)
        column: Column[str] = table.c[name]
        yield column == value


def _lines(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    groups = len(names) - len(_SUMS)
    plain = sorted(_plain(row, groups) for row in rows)  # databases sort text by rules of their own
    return [dict(zip(names, row, strict=True)) for row in plain]


def _plain(row: Sequence[Any], groups: int) -> tuple[Any, ...]:
    """Whole numbers for sums: PostgreSQL's are decimals, and the sum of nothing is null."""
    return (*row[:groups], *(int(total or 0) for total in row[groups:]))


def _kept(row: UsageRow) -> tuple[Any, ...]:
    """A row that no database refuses. One that is refused would come back for ever, with all that came with it."""
    values: list[Any] = list(row)
    for place in _TEXTS:
        values[place] = storable(values[place])
    for place in _COUNTS:
        values[place] = min(max(values[place], 0), MOST_TOKENS)
    return tuple(values)


def _insert_sql(dialect: str) -> str:
    """Without SQLAlchemy's compiler, which takes longer for each row than the databases do."""
    names = ", ".join(f'"{column.name}"' for column in table.columns)
    places = ", ".join("?" if dialect == "sqlite" else f"${place}" for place in range(1, len(table.columns) + 1))
    return f"INSERT INTO usage ({names}) VALUES ({places}) ON CONFLICT (id) DO NOTHING"
