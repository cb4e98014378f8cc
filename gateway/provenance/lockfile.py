"""`models.lock`: which hash each model file has, as TOML that people can review and merge.

    version = 1

    [[model]]
    path = "../models/tiny-00001-of-00002.gguf"    relative to the lock file's folder, or absolute
    sha256 = "..."                                 of the file, or of the manifest of several
    size = 123                                     bytes, all files together
    format = "gguf"                                for people; nothing goes by it
    quantization = "Q4_K_M"                        the same
    files = [                                      only where there is a manifest: its lines
      {size = 100, sha256 = "...", name = "tiny-00001-of-00002.gguf"},
      ...
    ]

Equal files make equal text: entries are in order of their paths, and nothing in it is a date or a name of a machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from backends.formats import UnreadableModel
from backends.formats.gguf import parts_of
from backends.formats.manifest import HashedFile, manifest_of
from gateway.config import ConfigError, Problem
from gateway.config.section import Section
from gateway.config.values import Sha256

NAME = "models.lock"
VERSION = 1
MAX_BYTES = 32 << 20
_HEAD = """\
# The hashes of model files, written by `sekisho models lock`. A change in here is a change of what is served.
version = 1
"""
_AGAIN = "write it again with `sekisho models lock`"
_LINE = re.compile(r" \(at line (\d+), column \d+\)$")


class LockedFile(Section):
    """One file of a model that has several."""

    name: str
    size: int = Field(ge=0)
    sha256: Sha256


class LockedModel(Section):
    """One entry. `files` is empty for a model that is one file."""

    path: str = Field(min_length=1)
    sha256: Sha256
    size: int = Field(ge=0)
    format: str | None = None
    quantization: str | None = None
    files: tuple[LockedFile, ...] = ()

    @property
    def agrees_with_itself(self) -> bool:
        """Whether the hash is that of the files: a merge or an edit may have changed only one of them."""
        files = tuple(HashedFile(file.name, file.size, file.sha256) for file in self.files)
        whole = hashlib.sha256(manifest_of(files).encode()).hexdigest()
        return not files or (whole, sum(file.size for file in files)) == (self.sha256, self.size)


class _Lock(Section):
    version: int
    model: tuple[LockedModel, ...] = ()


def key_of(path: str | Path, folder: Path = Path()) -> str:
    """By what a model is found in a lock file: its absolute path, any part of a split GGUF being the first. Links are
    not followed: one that leads elsewhere later on is the same model with other bytes, which has to be noticed."""
    path = folder / path
    with contextlib.suppress(UnreadableModel):
        path = parts_of(path)[0]
    return os.path.abspath(path)


def written(key: str, folder: Path) -> str:
    """How a lock file in `folder` names a model: relative if it is below that folder or the one above."""
    here = Path(os.path.abspath(folder))
    near = here if here.parent == here.parent.parent else here.parent  # not `/`: everything is below that
    return Path(os.path.relpath(key, here)).as_posix() if Path(key).is_relative_to(near) else key


def read_lock(path: Path) -> Mapping[str, LockedModel]:
    """The entries by `key_of` their paths. Raises: ConfigError."""
    text = _text(path)
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = _LINE.search(str(error))
        what = f"not TOML: {_LINE.sub('', str(error))}"
        raise _wrong(path, "", what, _AGAIN, int(line[1]) if line else None) from None
    if given.get("version") != VERSION:
        hint = "update Sekisho, or " + _AGAIN
        raise _wrong(path, "version", f"this version of Sekisho reads {VERSION} only", hint)
    try:
        lock = _Lock.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _wrong(path, ".".join(map(str, first["loc"])), first["msg"].lower(), _AGAIN) from None
    return _by_key(path, lock.model)


def _by_key(path: Path, entries: Iterable[LockedModel]) -> Mapping[str, LockedModel]:
    found: dict[str, LockedModel] = {}
    for entry in entries:
        key = key_of(entry.path, path.absolute().parent)
        if key in found:
            raise _wrong(path, entry.path, "the same path twice", "remove one, or " + _AGAIN)
        if not entry.agrees_with_itself:
            raise _wrong(path, entry.path, "`sha256` or `size` is not that of its `files`", _AGAIN)
        found[key] = entry
    return found


def render(entries: Iterable[LockedModel]) -> str:
    return _HEAD + "".join(_entry(entry) for entry in sorted(entries, key=lambda entry: entry.path))


def write_lock(path: Path, text: str) -> bool:
    """In one step: readers get the old text or the new one. Whether anything had to change. Raises: OSError."""
    target = Path(os.path.realpath(path))
    if target.is_file() and target.read_bytes() == text.encode():
        return False
    umask = os.umask(0o077)
    os.umask(umask)
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~umask
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return True


def _text(path: Path) -> str:
    """Raises: ConfigError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise _wrong(path, "", f"larger than {MAX_BYTES >> 20} MiB", "name a lock file")
        return raw.decode()
    except UnicodeDecodeError:
        raise _wrong(path, "", "not UTF-8 text", _AGAIN) from None
    except OSError as error:
        hint = "correct the path or its permissions"
        raise _wrong(path, "", f"cannot be read ({error.strerror})", hint) from None


def _wrong(path: Path, where: str, message: str, hint: str, line: int | None = None) -> ConfigError:
    return ConfigError([Problem(str(path), line, where, message, hint)])


def _entry(entry: LockedModel) -> str:
    given = entry.model_dump(exclude={"files"}, exclude_none=True)
    lines = ["", "[[model]]", *(f"{name} = {_value(value)}" for name, value in given.items())]
    if entry.files:
        lines += ["files = [", *(_line(file) for file in entry.files), "]"]
    return "\n".join(lines) + "\n"


def _line(file: LockedFile) -> str:
    return f"  {{size = {file.size}, sha256 = {_value(file.sha256)}, name = {_value(file.name)}}},"


def _value(value: Any) -> str:
    """JSON's strings are TOML's, but for one character that JSON leaves as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
