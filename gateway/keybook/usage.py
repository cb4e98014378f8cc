"""Reports on usage: sums or single requests, as JSON and as CSV."""

from __future__ import annotations

import asyncio
import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gateway.errors import BadRequest
from gateway.keybook.forms import UsageForm
from gateway.keybook.moments import iso
from gateway.records import JSON, UsageQuery, UsageRow

if TYPE_CHECKING:
    from gateway.store import Store

USUAL_PERIOD = 30 * 86400.0
SUMS = ("requests", "failed", "prompt", "cached", "completion", "reasoning", "tokens", "estimated")
_POSITION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?):(.+)")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # how cells begin that a spreadsheet would execute


@dataclass(frozen=True, slots=True)
class Report:
    """Lines with the same columns. `next` continues single requests, None at their end."""

    since: float
    until: float
    columns: tuple[str, ...]
    lines: Sequence[Mapping[str, object]]
    next: str | None = None

    def without(self, column: str) -> Report:
        kept = tuple(name for name in self.columns if name != column)
        return replace(self, columns=kept, lines=[{name: line[name] for name in kept} for line in self.lines])

    def document(self) -> JSON:
        period = {"from": iso(self.since), "to": iso(self.until)}
        return {"object": "list", **period, "data": list(self.lines), "next": self.next}

    def csv(self) -> str:
        """Text with a header line, safe to open in a spreadsheet."""
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(self.columns)
        writer.writerows([_cell(line[column]) for column in self.columns] for line in self.lines)
        return out.getvalue()


def _cell(value: object) -> object:
    """Part of a record is the clients' own text, and a spreadsheet runs what looks like a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


async def report(store: Store, form: UsageForm, now: float, begin: float = 0.0) -> Report:
    """What was used from `begin` on, which is all that this caller may know. Raises: BadRequest, StoreUnavailable."""
    query = _query(form, now)
    query = replace(query, since=min(max(query.since, begin), query.until))
    if not form.rows:
        columns = (*form.group_by, *SUMS)
        sums = await store.usage(query)
        return Report(query.since, query.until, columns, [{name: line[name] for name in columns} for line in sums])
    rows = await store.usage_rows(query, limit=form.limit, after=_position(form.after))
    more = f"{rows[-1].time!r}:{rows[-1].id}" if len(rows) == form.limit else None
    return Report(query.since, query.until, UsageRow._fields, await asyncio.to_thread(_lines, rows), more)


def _lines(rows: Iterable[UsageRow]) -> list[Mapping[str, object]]:
    return [{**row._asdict(), "time": iso(row.time, "milliseconds")} for row in rows]


def _query(form: UsageForm, now: float) -> UsageQuery:
    until = now if form.until is None else form.until
    since = until - USUAL_PERIOD if form.since is None else form.since
    for wrong, param, message in (
        (since >= until, "from", "'from' has to be before 'to'."),
        (len(set(form.group_by)) < len(form.group_by), "group_by", "'group_by' names something twice."),
        (form.rows and form.group_by, "group_by", "'rows' are single requests, which 'group_by' cannot add up."),
        (not form.rows and form.model_fields_set & {"limit", "after"}, "rows", "'limit' and 'after' need rows=true."),
        (form.tenant and form.where["tenant"] != form.tenant, "key", "'key' belongs to another tenant than 'tenant'."),
    ):
        if wrong:
            raise BadRequest(message, param=param, code="invalid_value")
    return UsageQuery(since, until, form.group_by, form.where)


def _position(after: str | None) -> tuple[float, str] | None:
    """Raises: BadRequest."""
    if after is None:
        return None
    found = _POSITION.fullmatch(after)
    if found is None:
        raise BadRequest("'after' has to be the `next` of an answer.", param="after", code="invalid_value")
    return float(found[1]), found[2]
