"""`sekisho scan`: which models are at some paths, who can serve them and what they take. Presentation only."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from backends.formats import Estimate, Level, ModelFile, Role, Unreadable, estimate, scan, support

_WIDTH_OF_A_PIPE = 200  # columns: rich takes 80 where there is no terminal, and would cut names
_COLUMNS = ("model", "format", "quantisation", "parameters", "context", "weights", "engines", "experimental", "memory")


def run(paths: Sequence[Path], *, as_json: bool, context: int | None, sequences: int) -> int:
    """Print what is found, problems on stderr; returns the exit code: 2 when a path or every model is missing."""
    models: list[ModelFile] = []
    problems: list[tuple[Path, str]] = []
    for found in scan(paths):
        if isinstance(found, Unreadable):
            problems.append((found.path, found.reason))
        else:
            models.append(found)
            problems.extend((found.path, problem) for problem in found.problems)
    if as_json:
        _print_json([_entry(model, context, sequences) for model in models], problems)
    elif models:
        _print_table(models, context, sequences)
    for path, reason in problems:
        typer.echo(_plain(f"{path}: {reason}"), err=True)
    if not models and not problems:
        typer.echo(_plain(f"no models in {', '.join(map(str, paths))}"), err=True)
    return 0 if models and all(map(_exists, paths)) else 2


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _print_json(entries: list[dict[str, Any]], problems: list[tuple[Path, str]]) -> None:
    listed = [{"path": str(path), "reason": reason} for path, reason in problems]
    typer.echo(json.dumps({"models": entries, "problems": listed}, indent=2))


def _entry(model: ModelFile, context: int | None, sequences: int) -> dict[str, Any]:
    memory = estimate(model, context=context, sequences=sequences)
    return {
        "path": str(model.path),
        "name": model.name,
        "format": model.format.value if model.format else None,
        "role": model.role.value,
        "quantisation": model.quantisation,
        "quant_method": model.method,
        "bits": model.bits,
        "architecture": model.architecture,
        "parameters": model.parameters,
        "context_length": model.context_length,
        "weight_bytes": model.weight_bytes,
        "disk_bytes": model.disk_bytes,
        "files": [str(file) for file in model.files],
        "chat_template": model.chat_template,
        "geometry": asdict(model.geometry),
        "engines": {name: asdict(found) for name, found in support(model).items()},
        "memory_bytes": asdict(memory) | {"total": memory.total} if memory else None,
        "notes": list(model.notes),
        "problems": list(model.problems),
    }


def _print_table(models: list[ModelFile], context: int | None, sequences: int) -> None:
    table = Table(title="models", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for model in models:
        table.add_row(*_cells(model, estimate(model, context=context, sequences=sequences)))
    width = None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE
    Console(markup=False, highlight=False, width=width).print(table)


def _cells(model: ModelFile, memory: Estimate | None) -> tuple[str, ...]:
    found = support(model)
    levels = {level: [name for name, given in found.items() if given.level is level] for level in Level}
    kind = model.format.value if model.format else "unknown"
    return (
        model.name,
        kind if model.role in (Role.MODEL, Role.UNKNOWN) else f"{kind} ({model.role})",
        model.quantisation or "",
        _parameters(model.parameters),
        str(model.context_length or ""),
        _size(model.weight_bytes),
        ", ".join(levels[Level.NATIVE]) or ("none" if not levels[Level.EXPERIMENTAL] else ""),
        ", ".join(levels[Level.EXPERIMENTAL]),
        _memory(memory),
    )


def _memory(memory: Estimate | None) -> str:
    if memory is None or memory.context is None:
        return ""
    times = f" x {memory.sequences}" if memory.sequences > 1 else ""
    return f"{_size(memory.total) or '?'} at {memory.context} tokens{times}"


def _parameters(count: int | None) -> str:
    if count is None:
        return ""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def _size(count: int | None) -> str:
    if count is None:
        return ""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _plain(line: str) -> str:
    """One line without control characters: file names come from whoever made the files."""
    return "".join(char if char.isprintable() else "?" for char in line)
