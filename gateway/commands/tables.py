"""Documents of the HTTP API as tables for people."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

JSON = dict[str, Any]

_NOTHING = "-"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in right else "left")
    for row in rows:
        table.add_row(*(_NOTHING if cell is None else str(cell) for cell in row))
    return table


def tenants_table(tenants: list[JSON]) -> Table:
    columns = ("tenant", "models", "limits", "tools", "weight", "priority", "created", "source")
    rows = (
        (
            one["name"],
            ", ".join(one["models"]) or _NOTHING,
            _limits(one["limits"]),
            _tools(one.get("tools", {})),
            f"{one['weight']:g}",
            one["priority"],
            one["created_at"],
            one["source"],
        )
        for one in tenants
    )
    return _table("tenants", columns, rows)


def keys_table(keys: list[JSON]) -> Table:
    columns = ("id", "tenant", "name", "role", "models", "limits", "from", "expires", "last used", "revoked", "source")
    rows = (
        (
            one["id"],
            one["tenant"],
            one["name"],
            one["role"],
            None if one["models"] is None else ", ".join(one["models"]),
            _limits(one["limits"]),
            ", ".join(one["allow_from"]) or None,
            one["expires_at"],
            one["last_used_at"],
            one["revoked_at"],
            one["source"],
        )
        for one in keys
    )
    return _table("keys", columns, rows)


def _limits(limits: JSON) -> str:
    rates = [f"{rate} {unit}" for unit in ("requests", "tokens") for rate in limits[unit]]
    budgets = [f"{budget} budget" for budget in limits["token_budget"]]
    most = [f"{limits['concurrency']} at once"] if limits["concurrency"] is not None else []
    return ", ".join([*rates, *budgets, *most]) or _NOTHING


def _tools(tools: JSON) -> str:
    """What differs from every tool being allowed."""
    allow, deny, types = (tools.get(name, usual) for name, usual in (("allow", ["*"]), ("deny", []), ("types", ["*"])))
    said = [", ".join(allow) or "none"] if allow != ["*"] else []
    said += [f"not {', '.join(deny)}"] if deny else []
    said += [f"types {', '.join(types) or 'none'}"] if types != ["*"] else []
    return "; ".join([*said, *([tools["on_violation"]] if said else [])]) or _NOTHING


def usage_table(sums: list[JSON]) -> Table:
    columns = list(sums[0]) if sums else []
    numbers = [name for name in columns if isinstance(sums[0][name], int) and name != "status"]
    return _table("usage", columns, ([line[name] for name in columns] for line in sums), numbers)


def audit_table(entries: list[JSON]) -> Table:
    columns = ("number", "time", "actor", "address", "action", "target", "change")
    rows = (
        (
            one["seq"],
            one["time"],
            one["actor"],
            one["address"] or None,
            one["action"],
            one["target"],
            _change(one["before"] or {}, one["after"] or {}),
        )
        for one in entries
    )
    return _table("audit", columns, rows)


def _change(before: JSON, after: JSON) -> str:
    """`role: "user" -> "admin"` for every field that differs; what is new or gone stands alone."""
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return ", ".join(f"{name}: {_step(before, after, name)}" for name in changed) or _NOTHING


def _step(before: JSON, after: JSON, name: str) -> str:
    return " -> ".join(json.dumps(side[name]) for side in (before, after) if name in side)
