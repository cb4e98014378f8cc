"""What accounting keeps of a finished request: Outcome to UsageRow, and rows to the lines of the spool.

No I/O, and time is an argument. See docs/usage.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import orjson

from gateway.outcome import Outcome
from gateway.records import UsageRow

STORED_KEY = "key_"  # how the ids of the database's keys begin
MOST_TOKENS = 2**31 - 1  # of one request; engines are not trusted, and a database takes no number above its column's

_row = tuple.__new__  # half the price of calling UsageRow, which passes through a Python function
_NOTHING = (0, 0, 0, 0, "")


def usage_rows(outcomes: Iterable[Outcome], prefix: str, counter: int, offset: float) -> list[UsageRow]:
    """Rows for the requests whose caller is known; refused credentials belong to nobody.

    Args:   prefix: begins the ids and is this process's alone. counter: rows made so far. offset: seconds from the
            outcomes' steady clock to Unix time.

    Written out in one piece, and rounded with `int`: it runs for every request on the event loop.
    """
    made = []
    for outcome in outcomes:
        principal, model, error, replica = outcome.principal, outcome.model, outcome.error, outcome.replica
        if principal is None:
            continue
        counter += 1
        started, ended, first = outcome.started, outcome.ended, outcome.first_token
        prompt, completion, cached, reasoning, source = outcome.usage or _NOTHING
        if prompt + completion + cached + reasoning > MOST_TOKENS:
            prompt, completion = min(prompt, MOST_TOKENS), min(completion, MOST_TOKENS)
            cached, reasoning = min(cached, MOST_TOKENS), min(reasoning, MOST_TOKENS)
        # A name that nothing is known by is the caller's invention, and nothing that a report should show.
        name, asked = ("unknown", "") if model is None else (model.name, outcome.asked)
        made.append(
            _row(
                UsageRow,
                (
                    f"{prefix}-{counter}",
                    int((ended + offset) * 1000 + 0.5) / 1000,
                    outcome.request_id,
                    principal.tenant.name,
                    principal.key,
                    name,
                    "" if asked == name else asked,
                    "" if replica is None else replica.id,
                    outcome.operation,
                    1 if outcome.stream else 0,
                    outcome.status,
                    "" if error is None else error.code or error.type,
                    outcome.attempts,
                    prompt,
                    cached,
                    completion,
                    reasoning,
                    source,
                    int((first - started) * 100_000 + 0.5) / 100 if first else None,
                    int((ended - started) * 100_000 + 0.5) / 100,
                ),
            )
        )
    return made


def encode(rows: Sequence[UsageRow]) -> bytes:
    """One line of the spool: a JSON array of rows, each an array in the order of the fields."""
    return orjson.dumps(rows, default=tuple, option=orjson.OPT_APPEND_NEWLINE)


def decode(line: bytes) -> list[UsageRow]:
    """The rows of one line. Raises: ValueError for anything else than such a line."""
    try:
        return [UsageRow._make(row) for row in orjson.loads(line)]
    except TypeError:
        raise ValueError("not a line of usage rows") from None


def last_use(rows: Iterable[UsageRow]) -> dict[str, float]:
    """When each of the database's keys was used last: id -> Unix seconds. Names of other callers are not ids."""
    found: dict[str, float] = {}
    for row in rows:
        if row.key.startswith(STORED_KEY) and row.time > found.get(row.key, 0.0):
            found[row.key] = row.time
    return found
