"""The files of one model, from the check of their hash to the end of loading.

What was hashed is what llama.cpp reads: where the system allows it, llama.cpp is given the open files themselves, so a
file that is put in their place meanwhile is not loaded. Afterwards it is noticed if one was written to or replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from backends.formats import UnreadableModel, inspect
from backends.formats.gguf import is_gguf, parts_of
from backends.formats.manifest import Stamp, fingerprint, stamp_of
from backends.formats.reading import opened
from backends.llamacpp.errors import EngineBroken, UsageProblem

_DESCRIPTORS = Path("/proc/self/fd")


@dataclass(frozen=True, slots=True)
class _Held:
    path: Path
    file: BinaryIO
    stamp: Stamp  # before it was hashed

    @property
    def name(self) -> str:
        """What llama.cpp opens: this very file where there is /proc, else whatever has its path then."""
        by_descriptor = _DESCRIPTORS / str(self.file.fileno())
        return str(by_descriptor if by_descriptor.exists() else self.path)

    def is_as_before(self) -> bool:
        """Whether neither its bytes nor, where llama.cpp goes by the path, what lies there has changed."""
        by_path = self.name == str(self.path)
        return self.stamp == stamp_of(os.stat(self.path) if by_path else os.fstat(self.file.fileno()))


@contextmanager
def checked(path: str, sha256: str | None) -> Iterator[tuple[str, ...]]:
    """What llama.cpp is to load, in its order; to be left when it has loaded them.

    Args:   path: file, any part of a split one, or folder with one model. sha256: what its bytes must have; None = any.
    Raises: UsageProblem: no model there, or another one. EngineBroken, on leaving: it changed while it was loaded.
    """
    parts = _parts(path)
    if sha256 is None:
        yield (str(parts[0]),)  # llama.cpp finds the others by their names
        return
    with ExitStack() as stack:
        held = [_hold(stack, part) for part in parts]
        _compare(path, sha256, {one.path: one.file for one in held})
        yield tuple(one.name for one in held)
        if not all(one.is_as_before() for one in held):
            raise EngineBroken(f"{path} changed while it was loaded")


def _parts(path: str) -> tuple[Path, ...]:
    """The GGUF files, first part first. Raises: UsageProblem."""
    try:
        parts = inspect(Path(path)).files if Path(path).is_dir() else parts_of(Path(path))
        if not parts or not is_gguf(parts[0]):
            raise UsageProblem(f"path: {path} is not a GGUF file")
    except UnreadableModel as error:
        raise UsageProblem(f"path: cannot read {error.path}: {error.reason}") from None
    return parts


def _hold(stack: ExitStack, part: Path) -> _Held:
    """Raises: UsageProblem."""
    try:
        file, _ = stack.enter_context(opened(part))
    except UnreadableModel as error:
        raise UsageProblem(f"path: cannot read {error.path}: {error.reason}") from None
    return _Held(part, file, stamp_of(os.fstat(file.fileno())))


def _compare(path: str, sha256: str, held: dict[Path, BinaryIO]) -> None:
    """Raises: UsageProblem."""

    unchecked = set(held)

    def source(member: Path) -> AbstractContextManager[tuple[BinaryIO, int]]:
        unchecked.discard(member)
        file = held.get(member)
        return opened(member) if file is None else nullcontext((file, os.fstat(file.fileno()).st_size))

    try:
        found = fingerprint(Path(path), source=source).sha256
    except UnreadableModel as error:
        raise UsageProblem(f"sha256: {error.path}: {error.reason}") from None
    if found != sha256.lower():
        remedy = "this is not the model that was expected, get it again or correct the hash"
        raise UsageProblem(f"sha256: {path} has {found}, not {sha256.lower()}: {remedy}")
    if unchecked:  # a folder that changed between being looked through and being hashed
        raise UsageProblem(f"sha256: {path} changed while it was read")
