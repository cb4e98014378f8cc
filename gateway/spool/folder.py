"""The spool's folder, which several gateway processes may share.

    NAME.lock               held with flock for as long as process NAME lives
    NAME-00000007.open      the segment it is writing
    NAME-00000006-512.rows  a finished segment of 512 rows, not in the database yet

Whoever holds a lock owns the segments of that name: a living process its own, and another one those of the dead,
whose locks the kernel has released. The kernel also decides between two that want the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from gateway.records import UsageRow
from gateway.usage import decode

_FILE = re.compile(r"(?P<name>[0-9a-f]{16})(?:\.lock|-\d{8,}(?:\.open|-(?P<rows>\d{1,9})\.rows))")
_NAMES_TRIED = 5

log = logging.getLogger("sekisho")


class Claim:
    """The segments of one process name, and the lock that keeps others away from them."""

    def __init__(self, folder: Path, name: str, lock: int) -> None:
        self.folder, self.name = folder, name
        self._lock = lock
        self.left: int | None = None  # segments; None while the process lives and makes more of them

    def release(self) -> None:
        """Gives the segments up to whoever wants them. The lock's file goes when there are none."""
        with contextlib.suppress(OSError):
            if not self.segments():
                os.unlink(_lock_path(self.folder, self.name))
        os.close(self._lock)

    def segments(self) -> list[Parcel]:
        """In the order in which they were written. Raises: OSError."""
        own = [match for match in _files(self.folder) if match["name"] == self.name and not match[0].endswith(".lock")]
        return [
            Parcel(self.folder / match[0], int(match["rows"] or 0), self) for match in sorted(own, key=itemgetter(0))
        ]


class Parcel(NamedTuple):
    """A segment that nobody writes to any more."""

    path: Path
    rows: int  # 0 = nobody has counted them: its process died while it wrote
    claim: Claim

    def read(self) -> list[UsageRow]:
        """Its rows. A line that is none, such as one that a crash has cut short, is left out.

        Raises: OSError.
        """
        lines = self.path.read_bytes().split(b"\n")
        torn = 1 if lines.pop() else 0
        rows: list[UsageRow] = []
        for line in lines:
            try:
                rows += decode(line)
            except ValueError:
                torn += 1
            time.sleep(0)  # lets the event loop have the interpreter between two lines
        if torn:
            log.warning("spool segment %s: %d torn line(s) left out", self.path.name, torn)
        return rows

    def remove(self) -> None:
        """Once its rows are in the database. A dead process's last segment takes the lock along. Raises: OSError."""
        self.path.unlink(missing_ok=True)
        if self.claim.left is not None:
            self.claim.left -= 1
            if not self.claim.left:
                self.claim.release()


class Segment:
    """The file a process is writing."""

    def __init__(self, claim: Claim, number: int) -> None:
        """Raises: OSError."""
        self._claim = claim
        self._stem = claim.folder / f"{claim.name}-{number:08d}"
        self._open = self._stem.with_suffix(".open")
        self._file = os.open(self._open, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self.rows = self.size = 0
        self.begun = time.monotonic()
        try:
            _sync_folder(claim.folder)  # or a power cut could take the name, with all that is under it
        except OSError:
            self.close()
            raise

    def append(self, rows: int, lines: bytes) -> None:
        """All of it is on the disk afterwards, or nothing. Raises: OSError; the segment is to be closed then."""
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fdatasync(self._file)
        except OSError:
            with contextlib.suppress(OSError):  # if this fails too, readers find a torn line at the end
                os.ftruncate(self._file, self.size)
            raise
        self.rows += rows
        self.size += len(lines)

    def close(self) -> Parcel | None:
        """Ready to be read; None when nothing was written."""
        path = self._open
        with contextlib.suppress(OSError):  # what was appended is safe, whatever its file is called
            os.close(self._file)
            if self.rows:
                path = self._open.rename(self._stem.with_name(f"{self._stem.name}-{self.rows}.rows"))
            else:
                path.unlink()
        return Parcel(path, self.rows, self._claim) if self.rows else None


def claim_new(folder: Path) -> Claim:
    """A name that no process has used before, and the folder if need be. Raises: OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for _ in range(_NAMES_TRIED):
        name = secrets.token_hex(8)
        # Somebody who looks for the dead may take the lock between its file's creation and ours being locked.
        if (lock := _take(_lock_path(folder, name))) is not None:
            return Claim(folder, name, lock)
    raise OSError("no lock could be had")


def claim_dead(folder: Path) -> list[Parcel]:
    """What dead processes have left; from now on it is this process's business. Raises: OSError."""
    names = sorted({match["name"] for match in _files(folder)})
    return [parcel for name in names for parcel in _claim_one(folder, name)]


def _claim_one(folder: Path, name: str) -> list[Parcel]:
    try:
        lock = _take(_lock_path(folder, name))
    except OSError:  # another time, perhaps
        return []
    if lock is None:
        return []
    claim = Claim(folder, name, lock)
    parcels: list[Parcel] = []
    with contextlib.suppress(OSError):
        parcels = claim.segments()
    claim.left = len(parcels)
    if not parcels:
        claim.release()
    return parcels


def _take(path: Path) -> int | None:
    """The locked file; None while another process holds it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:  # else its owner removed it after we had opened it: nobody would see this lock
            return lock
    except BlockingIOError:
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _lock_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.lock"


def _files(folder: Path) -> Iterator[re.Match[str]]:
    """The spool's own files; whatever else lies in the folder is left alone."""
    for name in os.listdir(folder):
        if match := _FILE.fullmatch(name):
            yield match


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
