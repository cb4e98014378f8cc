"""How this program starts others of its own processes."""

from __future__ import annotations

import sys


def command(module: str) -> tuple[str, ...]:
    """Runs a module of this installation. `-P`: the folder that the gateway was started in is no place for code, or
    whoever may write there could run theirs, and a file there called like a library would be taken for it."""
    return sys.executable, "-P", "-m", module
