"""Opening what may be hostile: regular files only, bounded reads, and one kind of failure.

Limits. They are far above real models (largest seen: 17 MB of GGUF header, 10 MB of shard index) and keep time and
memory bounded whatever a file claims.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import orjson

from backends.formats.model import UnreadableModel

MAX_CONFIG_BYTES = 16 << 20
MAX_CONFIG_VALUES = 100_000  # commas in config.json: bounds what parsing can allocate
MAX_FOLDER_ENTRIES = 20_000
MAX_COUNT = 1 << 40  # no number that describes a model is larger: beyond it is treated as not given
MAX_LAYERS = 4096


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its size in bytes; symbolic links are followed.

    Raises: UnreadableModel also for errors while reading. FIFOs, sockets and devices are never opened.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnreadableModel(path, "not a regular file")
        # O_NONBLOCK: should it be swapped for a FIFO between the two calls, opening does not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=1 << 16) as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise UnreadableModel(path, "not a regular file")
            yield file, found.st_size
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL in the name; RuntimeError: a link loop
        raise UnreadableModel(path, reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """What went wrong, without the path, which whoever prints it adds."""
    text = error.strerror if isinstance(error, OSError) else str(error)
    return (text or type(error).__name__).lower()


def size_of(path: Path) -> int | None:
    """Bytes of a regular file; None when there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError, RuntimeError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def read_json(path: Path) -> dict[str, Any]:
    """Raises: UnreadableModel when it is not a JSON object within the limits."""
    with opened(path) as (file, size):
        if size > MAX_CONFIG_BYTES:
            raise UnreadableModel(path, f"larger than {MAX_CONFIG_BYTES >> 20} MiB")
        text = file.read(size)  # not more: read() sets aside what it is asked for
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MAX_CONFIG_VALUES:
        raise UnreadableModel(path, f"more than {MAX_CONFIG_VALUES} values")
    try:
        value = orjson.loads(text)
    except ValueError as error:
        raise UnreadableModel(path, "not JSON") from error
    if not isinstance(value, dict):
        raise UnreadableModel(path, "not a JSON object")
    return value


def read_json_if_there(path: Path) -> dict[str, Any] | None:
    return read_json(path) if size_of(path) is not None else None


def names_in(folder: Path) -> tuple[str, ...]:
    """Sorted names in a folder.

    Raises: UnreadableModel when it cannot be listed or holds too many.
    """
    names: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                names.append(entry.name)
                if len(names) > MAX_FOLDER_ENTRIES:
                    raise UnreadableModel(folder, f"more than {MAX_FOLDER_ENTRIES} entries")
    except (OSError, ValueError) as error:
        raise UnreadableModel(folder, reason_of(error)) from error
    return tuple(sorted(names))


def is_count(value: object, highest: int = MAX_COUNT) -> TypeGuard[int]:
    """A positive whole number that may describe a model; JSON's true is not one."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= highest


def count(value: object, highest: int = MAX_COUNT) -> int | None:
    return value if is_count(value, highest) else None


def printable(value: object, longest: int = 512) -> str | None:
    """A printable string; control characters would let a file write to the terminal that lists it."""
    if not isinstance(value, str) or not value:
        return None
    return "".join(char if char.isprintable() else "?" for char in value[:longest])


def mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
