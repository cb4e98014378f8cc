"""The first line on stdin: what to load and how, as one JSON object."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import orjson

from backends.llamacpp.errors import UsageProblem

DEFAULT_CONTEXT = 8192  # tokens per sequence when the file allows more and nobody asked: KV memory grows with it
MAX_PARALLEL = 64


@dataclass(frozen=True, slots=True)
class Options:
    """How one model is served."""

    path: str
    served_name: str
    sha256: str | None = None
    context_length: int | None = None  # tokens per sequence; None = trained length, at most DEFAULT_CONTEXT
    parallel: int = 1  # sequences decoded together, each with a context of its own
    gpu_layers: int = 0  # -1 = all
    threads: int | None = None  # None = physical cores
    max_waiting: int = 64  # requests in the queue
    max_wait_s: float = 30.0  # seconds in the queue


def parse_options(line: bytes) -> Options:
    """Raises: UsageProblem naming the option."""
    try:
        given = orjson.loads(line)
    except orjson.JSONDecodeError:
        raise UsageProblem("options: expected one JSON object on the first line of stdin") from None
    if not isinstance(given, dict):
        raise UsageProblem("options: expected one JSON object on the first line of stdin")
    if unknown := given.keys() - {field.name for field in fields(Options)}:
        raise UsageProblem(f"options: unknown {sorted(unknown)[0]!r}")
    for name in ("path", "served_name"):
        if not isinstance(given.get(name), str) or not given[name]:
            raise UsageProblem(f"{name}: must be a non-empty string")
    if given.get("sha256") is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", str(given["sha256"])):
        raise UsageProblem("sha256: must be 64 hexadecimal digits")
    _whole(given, "context_length", 16, None)
    _whole(given, "parallel", 1, MAX_PARALLEL)
    _whole(given, "gpu_layers", -1, None)
    _whole(given, "threads", 1, None)
    _whole(given, "max_waiting", 0, None)
    wait = given.get("max_wait_s", 30.0)
    if isinstance(wait, bool) or not isinstance(wait, int | float) or wait <= 0:
        raise UsageProblem("max_wait_s: must be a positive number of seconds")
    return Options(**given)


def _whole(given: dict[str, Any], name: str, low: int, high: int | None) -> None:
    if name not in given or (given[name] is None and name in ("context_length", "threads")):
        return
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise UsageProblem(f"{name}: must be a whole number, at least {low}" + (f" and at most {high}" if high else ""))
