"""Who else on this machine could change or read the files that the gateway lives by. It warns and refuses nothing: in a
container or on a network drive the mode of a file often says nothing (see docs/provenance.md).

`complaints` decides over plain values; `places_of` and `look` find them out.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path

from pydantic import SecretStr

from backends.formats import UnreadableModel
from backends.formats.manifest import members_of
from gateway.config import Config, EngineAccess
from gateway.config.shape import walk_sections
from gateway.config.source import Source

MOST_ENTRIES = 1000  # of a folder of models that are looked at
_SQLITE = "sqlite:///"
_SQLITE_FILES = ("", "-wal", "-shm", "-journal")


class Need(Enum):
    """What others may not do with a file."""

    UNCHANGED = "write"
    PRIVATE = "read or write"


@dataclass(frozen=True, slots=True)
class Place:
    """A file or folder that matters. `within`: the folder in whose name its complaints are made."""

    path: Path
    need: Need
    within: Path | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What the system says of a place. `mode`: permission bits. `open_to_group`, `open_to_all`: whether those can get
    to it at all, through every folder above."""

    place: Place
    mode: int
    group: int
    open_to_group: bool = True
    open_to_all: bool = True


def complaints(seen: Iterable[Seen], own_groups: Collection[int]) -> list[str]:
    """One line for each file or folder that others can get at, with the command that mends it. `own_groups`: numeric
    ids of the groups that the gateway is in; what it shares with those, it shares on purpose."""
    lines: dict[Path, str] = {}
    members: dict[Path, list[tuple[Path, str, str]]] = {}
    for one in seen:
        who, bits = _wrong(one, own_groups)
        if not bits:
            continue
        if one.place.within is not None:
            members.setdefault(one.place.within, []).append((one.place.path, who, bits))
        else:
            lines.setdefault(one.place.path, _line(str(one.place.path), who, bits, one.place.path))
    for folder, found in members.items():
        found = [one for one in found if one[0] not in lines]
        if found and folder not in lines:
            path, who, bits = found[0]
            several = f"{len(found)} files in {folder}, such as {path.name},"
            one_line = _line(str(path), who, bits, path)
            lines[folder] = _line(several, who, bits, folder, "-R ") if len(found) > 1 else one_line
    return list(lines.values())


def _wrong(seen: Seen, own_groups: Collection[int]) -> tuple[str, str]:
    """Who can do too much, and what `chmod` is to take away; empty when nobody can."""
    private, mode = seen.place.need is Need.PRIVATE, seen.mode
    written, read = bool(mode & stat.S_IWOTH), bool(mode & stat.S_IROTH)
    if seen.open_to_all and (written or (private and read)):
        return "everybody on this machine", "o-" + ("r" if private and read else "") + ("w" if written else "")
    if seen.open_to_group and mode & stat.S_IWGRP and seen.group not in own_groups:
        return f"group {seen.group}", "g-w"
    return "", ""


def _line(what: str, who: str, bits: str, path: Path, options: str = "") -> str:
    can = {"r": "read", "w": "changed", "rw": "read and changed"}[bits[2:]]
    text = f"{what} can be {can} by {who}: chmod {options}{bits} {shlex.quote(str(path))}"
    return "".join(char if char.isprintable() else "?" for char in text)


# --- where things lie
def places_of(config: Config, source: Source, lock: Path | None) -> tuple[Place, ...]:
    """Everything that a configuration names, and itself."""
    own = Path(source.document.file).absolute()
    found = [Place(own, Need.PRIVATE if _holds_secrets(config, source) else Need.UNCHANGED)]
    found += [Place(lock, Need.UNCHANGED)] if lock is not None else []
    found += [Place(path, Need.PRIVATE) for path in _keys(config)]
    secrets = _secrets(config)
    for path, file in source.value_files.items():
        found.append(Place(file, Need.PRIVATE if path in secrets else Need.UNCHANGED))
    found += [Place(path, Need.PRIVATE) for path in _state(config, source.folder)]
    for model in config.models:
        found += [place for one in model.replicas if one.path is not None for place in _model(one.path)]
    for entry in config.discovery:
        found += list(_folder(entry.scan)) if entry.scan is not None else []
    return tuple(dict.fromkeys(found))


def _holds_secrets(config: Config, source: Source) -> bool:
    """Whether a secret stands in the file itself, and not in a variable or a file of its own."""
    return any(path in source.document.lines and path not in source.hidden for path in _secrets(config))


def _secrets(config: Config) -> set[tuple[str | int, ...]]:
    """Where the values are that nobody may see."""
    found: set[tuple[str | int, ...]] = set()
    for path, section in walk_sections(config):
        for name in type(section).model_fields:
            value = getattr(section, name)
            if isinstance(value, SecretStr) and _is_secret(value.get_secret_value()):
                found.add((*path, name))
            elif isinstance(value, Mapping):
                found |= {(*path, name, key) for key, one in value.items() if isinstance(one, SecretStr)}
    return found


def _is_secret(value: str) -> bool:
    """A URL is one if it has a password in it."""
    return "://" not in value or "@" in value


def _keys(config: Config) -> Iterator[Path]:
    """Private keys of certificates; one without a file of its own is in the certificate's."""
    if config.server.tls is not None:
        yield config.server.tls.key_file
    for _, section in walk_sections(config):
        if isinstance(section, EngineAccess):
            key = section.client_key_file or section.client_cert_file
            if key is not None:
                yield key


def _state(config: Config, folder: Path) -> Iterator[Path]:
    url = config.state.database.get_secret_value() if config.state.database is not None else None
    if url is not None:
        yield config.state.spool_in(folder)
    if url is not None and url.startswith(_SQLITE) and not url.endswith(":memory:"):
        for suffix in _SQLITE_FILES:
            yield Path(url.removeprefix(_SQLITE) + suffix)


def _model(path: Path) -> Iterator[Place]:
    if not path.is_dir():
        yield Place(path.parent, Need.UNCHANGED)
    try:
        members = members_of(path)
    except UnreadableModel:
        return  # whoever loads it says more
    if path.is_dir():
        yield Place(path, Need.UNCHANGED)
    for member in members[:MOST_ENTRIES]:
        within = path if path.is_dir() else path.parent
        yield Place(member.path, Need.UNCHANGED, within if len(members) > 1 else None)


def _folder(folder: Path) -> Iterator[Place]:
    """A folder that is looked through for models, and what lies in it. What is further below is not looked at."""
    yield Place(folder, Need.UNCHANGED)
    with contextlib.suppress(OSError):
        for path in islice(folder.iterdir(), MOST_ENTRIES):
            yield Place(path, Need.UNCHANGED, folder)


# --- what the system says of them
def look(places: Iterable[Place]) -> Iterator[Seen]:
    """What is there; what is not yet made, or cannot be looked at, is passed over. Links count as what they lead to."""
    for place in places:
        try:
            path = place.path.resolve(strict=True)
            found = path.stat()
            above = [folder.stat() for folder in path.parents]
        except (OSError, RuntimeError):
            continue
        mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISDIR(found.st_mode) and mode & stat.S_ISVTX:
            mode &= ~(stat.S_IWOTH | stat.S_IWGRP)  # as in /tmp: nobody can take away or replace what others own
        yield Seen(
            place,
            mode,
            found.st_gid,
            all(folder.st_mode & (stat.S_IXGRP | stat.S_IXOTH) for folder in above),
            all(folder.st_mode & stat.S_IXOTH for folder in above),
        )


def own_groups() -> frozenset[int]:
    return frozenset((os.getegid(), *os.getgroups()))
