"""After the run: the database's rows against the clients' own books, the audit trail, what is left open, the logs."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.load.soak import verdict
from tests.load.soak.clients import Line
from tests.load.soak.engine import PROMPT_TOKENS
from tests.load.soak.verdict import Deeds
from tests.servers.postgres import Postgres

UNWRITTEN = 1.5  # seconds before a worker is killed of which rows may be lost: a quarter, and one write, at leisure
COLUMNS = "request_id, status, tenant, prompt, completion, source"


class Row(NamedTuple):
    request_id: str
    status: int
    tenant: str
    prompt: int
    completion: int
    source: str


def rows_of(database: str, postgres: Postgres | None) -> list[Row]:
    """All usage rows, past the gateway."""
    query = f"SELECT {COLUMNS} FROM usage"
    if postgres is None:
        with sqlite3.connect(database) as connection:
            found = [[str(value) for value in row] for row in connection.execute(query)]
    else:
        text = postgres.sql(query, database.rpartition("/")[2])
        found = [line.split("|") for line in text.splitlines()]
    return [Row(one[0], int(one[1]), one[2], int(one[3]), int(one[4]), one[5]) for one in found]


def compare(rows: list[Row], lines: list[Line], deeds: Deeds) -> tuple[list[str], dict[str, int]]:
    """(what is wrong, figures)."""
    wrong: list[str] = []
    known = {row.request_id: row for row in rows}
    if twice := len(rows) - len(known):
        wrong.append(f"{twice} requests have more than one usage row")
    finished = [line for line in lines if line.outcome in (verdict.COMPLETE, verdict.LIMITED, verdict.ENGINE_KILLED)]
    missing = [line for line in finished if line.request_id not in known]
    lost = [line for line in missing if _just_before_a_kill(line, deeds)]
    wrong += [
        f"no usage row of {line.request_id} of {line.tenant} ({line.outcome})" for line in missing if line not in lost
    ]
    both = ((line, known[line.request_id]) for line in finished if line.request_id in known)
    for line, row in both:
        if problem := _differs(line, row):
            wrong.append(f"the usage row of {line.request_id} ({line.outcome}) says {problem}")
    told = {line.request_id for line in lines}
    strangers = [row for row in rows if row.request_id not in told]
    unheard = sum(not line.request_id for line in lines if line.outcome in (verdict.LEFT, verdict.WORKER_KILLED))
    if len(strangers) > unheard:
        wrong.append(f"{len(strangers)} usage rows of nobody's requests, where {unheard} clients left before the head")
    strange = Counter(row.status for row in strangers)
    if set(strange) - {499, 200, 429}:
        wrong.append(f"usage rows of nobody's requests have the statuses {dict(strange)}")
    return wrong, {
        "finished requests": len(finished), "usage rows": len(rows),
        "rows lost with killed workers": len(lost), "rows of clients that left before the head": len(strangers),
    }  # fmt: skip


def _just_before_a_kill(line: Line, deeds: Deeds) -> bool:
    return any(at - UNWRITTEN <= line.ended <= at for at in deeds.workers)


def _differs(line: Line, row: Row) -> str:
    if line.tenant != row.tenant:
        return f"tenant {row.tenant} in place of {line.tenant}"
    if line.outcome == verdict.COMPLETE and row[1:] != (200, line.tenant, PROMPT_TOKENS, line.tokens, "engine"):
        return f"{row}, not 200 with {line.tokens} tokens"
    if line.outcome == verdict.LIMITED and (row.status, row.completion) != (429, 0):
        return str(row)
    if line.outcome == verdict.ENGINE_KILLED and row.source != "estimate":
        return str(row)
    return ""


def read_log(path: Path) -> tuple[list[str], Counter[str]]:
    """(what is wrong, errors and warnings by their text without numbers)."""
    text = path.read_text(errors="replace")
    marks = {mark: text.count(mark) for mark in ("Traceback", "Exception")}
    wrong = [f"the log has {count} times {mark!r}" for mark, count in marks.items() if count]
    told: Counter[str] = Counter()
    for entry in _entries(text.splitlines(), wrong.append):
        if entry.get("level") in ("error", "warning", "critical"):
            told[f"{entry['level']}: {entry.get('event', '')}"[:150]] += 1
    return wrong, told


def _entries(lines: list[str], complain: Callable[[str], None]) -> Iterator[dict[str, str]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            complain(f"a line of the log is not JSON: {line[:200]!r}")
