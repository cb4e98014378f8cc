"""What the gateway knows about engines: bytes in, values out, no sockets. Nothing here imports `gateway`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from backends.base import Backend

# Helpers of the adapters, not engines.
_SHARED = frozenset({"base", "cards", "failures", "formats", "promtext", "shaping"})


@cache
def kinds() -> tuple[str, ...]:
    """The names `backend:` accepts in the configuration: one module or package here for each engine."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED))


@cache
def load(kind: str) -> Backend:
    """The adapter for one kind of engine.

    Raises: LookupError when no module of that name exists.
    """
    if kind not in kinds():
        raise LookupError(f"unknown backend {kind!r}; known: {', '.join(kinds())}")
    backend: Backend = importlib.import_module(f"backends.{kind}").BACKEND
    return backend
