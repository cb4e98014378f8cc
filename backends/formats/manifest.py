"""By which hash a model goes, and which files it consists of.

    a file                 SHA-256 of its bytes
    a split GGUF, a folder SHA-256 of its manifest: a line `<64 hex digits>  <name>` for each file, sorted by the bytes
                           of the names; names are relative to the folder, with `/`, in UTF-8

That is what coreutils' `sha256sum` prints for the same files, so a shell reproduces it and `sha256sum -c` reads it. A
folder's files are all regular files in it and below, hidden ones too. Links to files inside are followed; whatever
leads out of the folder or is neither file nor folder makes it one that has no hash.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from backends.formats.gguf import parts_of
from backends.formats.model import UnreadableModel
from backends.formats.reading import MAX_FOLDER_ENTRIES, opened, reason_of

MAX_DEPTH = 12  # folders below the model's own
_CHUNK = 1 << 20  # bytes
_MOST_THREADS = 4

Report = Callable[[int], None]  # bytes that were hashed since the last call; what it raises ends the hashing
Source = Callable[[Path], AbstractContextManager[tuple[BinaryIO, int]]]


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a model. `name`: as in the manifest."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class HashedFile:
    """What one file's bytes were. `size`: bytes. `sha256`: hex, as everywhere here."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The hash that a model goes by, and what it was made of, in the manifest's order."""

    sha256: str
    files: tuple[HashedFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What changes when a file does. Whoever may write to a file can set `modified_ns`, and cannot set `changed_ns`."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def stamp_of(found: os.stat_result) -> Stamp:
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def has_manifest(path: Path) -> bool:
    """Whether a model goes by the hash of a manifest rather than of one file. Raises: UnreadableModel."""
    return path.is_dir() or len(parts_of(path)) > 1


def members_of(path: Path) -> tuple[Member, ...]:
    """The files that a model consists of, in the manifest's order. Any part of a split GGUF stands for all.

    Raises: UnreadableModel: nothing there, a link that leads out of the folder, something that is no file, a name that
    would not fit into a line, too many files.
    """
    try:
        if not path.is_dir():
            return tuple(Member(_fit(part), part) for part in parts_of(path))
        below = islice(_files_below(path, path.resolve(strict=True), 0), MAX_FOLDER_ENTRIES + 1)
        found = [Member(_fit(file, path), file) for file in below]
    except (OSError, ValueError, RuntimeError) as error:
        raise UnreadableModel(path, reason_of(error)) from error
    if not found:
        raise UnreadableModel(path, "an empty folder")
    if len(found) > MAX_FOLDER_ENTRIES:
        raise UnreadableModel(path, f"more than {MAX_FOLDER_ENTRIES} files")
    return tuple(sorted(found, key=lambda member: member.name.encode()))


def fingerprint(path: Path, report: Report = lambda _: None, source: Source = opened) -> Fingerprint:
    """Reads every file of a model, several at a time.

    Args:   source: opens a member; for who holds files open that nobody shall exchange in between.
    Raises: UnreadableModel: as `members_of`, or a file cannot be read or changed meanwhile.
    """
    members, given_up = members_of(path), False
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1, len(members))) as pool:
        work = [pool.submit(_hashed, member, report, source, lambda: given_up) for member in members]
        try:
            for one in as_completed(work):
                one.result()
        except BaseException:  # one file's problem, or the user's Ctrl-C: nobody waits for the rest of 40 GB
            given_up = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    files = tuple(one.result() for one in work)
    whole = hashlib.sha256(manifest_of(files).encode()).hexdigest() if has_manifest(path) else files[0].sha256
    return Fingerprint(whole, files)


def manifest_of(files: tuple[HashedFile, ...]) -> str:
    return "".join(f"{file.sha256}  {file.name}\n" for file in files)


def _hashed(member: Member, report: Report, source: Source, is_given_up: Callable[[], bool]) -> HashedFile:
    with source(member.path) as (file, _):
        before = stamp_of(os.fstat(file.fileno()))
        file.seek(0)
        digest, buffer = hashlib.sha256(), bytearray(_CHUNK)
        view = memoryview(buffer)
        size = 0
        # Not to its end: one that grows as fast as it is read would never come to it.
        while size <= before.size and not is_given_up() and (count := file.readinto(buffer)):  # type: ignore[attr-defined]
            digest.update(view[:count])
            size += count
            report(count)
        if stamp_of(os.fstat(file.fileno())) != before or size != before.size:
            raise UnreadableModel(member.path, "changed while it was read")
    return HashedFile(member.name, size, digest.hexdigest())


def _files_below(folder: Path, root: Path, depth: int) -> Iterator[Path]:
    """Raises: UnreadableModel, OSError."""
    if depth > MAX_DEPTH:
        raise UnreadableModel(folder, f"more than {MAX_DEPTH} folders deep")
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            path = folder / entry.name
            if count > MAX_FOLDER_ENTRIES:
                raise UnreadableModel(folder, f"more than {MAX_FOLDER_ENTRIES} entries")
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(path, root, depth + 1)
                continue
            if entry.is_symlink():
                _check_link(path, root)
            if not stat.S_ISREG(entry.stat().st_mode):
                raise UnreadableModel(path, "neither a file nor a folder")
            yield path


def _check_link(path: Path, root: Path) -> None:
    """Raises: UnreadableModel unless it leads to a file below `root`; OSError, RuntimeError when it leads nowhere."""
    target = path.resolve(strict=True)
    if not target.is_relative_to(root):
        raise UnreadableModel(path, "a link that leads out of the model's folder: put the file itself there")
    if target.is_dir():
        raise UnreadableModel(path, "a link to a folder: put the folder itself there")


def _fit(file: Path, folder: Path | None = None) -> str:
    """The name of a file in a manifest. Raises: UnreadableModel when a line could not hold it as it is."""
    name = file.name if folder is None else file.relative_to(folder).as_posix()
    if "\\" in name or any(ord(char) < 0x20 or ord(char) == 0x7F or 0xD800 <= ord(char) <= 0xDFFF for char in name):
        raise UnreadableModel(file, "its name holds a backslash, a control character or bytes that are not UTF-8")
    return name
