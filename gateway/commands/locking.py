"""What `sekisho models lock` does: finds the model files, hashes them, compares them with a lock file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from backends.formats import ModelFile, Unreadable, UnreadableModel, inspect, scan
from backends.formats.manifest import Fingerprint, fingerprint, has_manifest, members_of
from backends.formats.reading import size_of
from gateway.config import Config
from gateway.provenance.lockfile import LockedFile, LockedModel, key_of, written

_Start = Callable[[str, int], Callable[[int], None]]  # a name and its bytes -> takes bytes as they are done


_Wanted = dict[str, tuple[Path, ModelFile | None]]  # None: its header cannot be used


@dataclass(slots=True)
class Gathered:
    """`models` by the key of a lock file. `problems` keep it from being written. What is `left_out` lies in a scanned
    folder and cannot be used."""

    models: dict[str, LockedModel] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def gather(config: Config, folder: Path, known: Mapping[str, LockedModel] | None = None) -> Gathered:
    """Hashes every model file of a configuration and of its scanned folders.

    Args: folder: of the lock file. known: what it says, if the two are to be compared: a file in it is hashed also when
          it is no model any more, since that is a difference to be told.
    """
    found = Gathered()
    own = _of_configuration(config, found, known)
    hashes = _given(config)
    with _progress() as start:
        for key, (path, model) in sorted((_of_folders(config, found, known or {}) | own).items()):
            try:
                size = sum(size_of(member.path) or 0 for member in members_of(path))
                hashed = fingerprint(path, start(path.name, size))
            except UnreadableModel as error:
                lines = found.problems if key in own else found.left_out
                lines.append(_plain(f"{error.path}: {error.reason}"))
                continue
            found.problems += [
                _plain(f"{path}: has {hashed.sha256}, and the configuration says {given}: correct one of them")
                for given in hashes.get(key, ()) if given != hashed.sha256
            ]  # fmt: skip
            found.models[key] = _locked(written(key, folder), path, hashed, model)
    return found


def compare(known: Mapping[str, LockedModel], found: Mapping[str, LockedModel]) -> list[str]:
    """One line for each difference between a lock file and what there is."""
    lines = [f"{known[key].path}: in the lock file, and not in use" for key in known.keys() - found.keys()]
    lines += [f"{found[key].path}: not in the lock file" for key in found.keys() - known.keys()]
    for key in known.keys() & found.keys():
        lines += _differences(known[key], found[key])
    return sorted(map(_plain, lines))


def _differences(old: LockedModel, new: LockedModel) -> Iterator[str]:
    if old.sha256 == new.sha256:
        return
    before, now = ({file.name: file for file in one.files} for one in (old, new))
    if not before or not now:
        yield f"{new.path}: {_how(old, new)}"
        return
    for name in before.keys() | now.keys():
        if name not in now:
            yield f"{new.path}: {name} is gone"
        elif name not in before:
            yield f"{new.path}: {name} was not there"
        elif before[name] != now[name]:
            yield f"{new.path}: {name}: {_how(before[name], now[name])}"


def _how(old: LockedFile | LockedModel, new: LockedFile | LockedModel) -> str:
    if old.size != new.size:
        return f"has {new.size} bytes, not {old.size}"
    return f"has sha256 {new.sha256}, not {old.sha256}"


def _of_configuration(config: Config, found: Gathered, known: Mapping[str, LockedModel] | None) -> _Wanted:
    wanted: _Wanted = {}
    for path in dict.fromkeys(one.path for model in config.models for one in model.replicas if one.path is not None):
        model, why = _inspected(path)
        if known is None and why:
            found.problems.append(_plain(why))
        wanted[key_of(path)] = (path, model)
    return wanted


def _inspected(path: Path) -> tuple[ModelFile | None, str]:
    """What its header says, and why it cannot be loaded."""
    try:
        model = inspect(path)
    except UnreadableModel as error:
        return None, f"{error.path}: {error.reason}"
    return model, f"{path}: {'; '.join(model.problems)}" if model.problems else ""


def _of_folders(config: Config, found: Gathered, known: Mapping[str, LockedModel]) -> _Wanted:
    wanted: _Wanted = {}
    for model in scan([entry.scan for entry in config.discovery if entry.scan is not None]):
        why = model.reason if isinstance(model, Unreadable) else "; ".join(model.problems)
        if why and key_of(model.path) not in known:
            found.left_out.append(_plain(f"{model.path} is left out: {why}"))
        else:
            wanted[key_of(model.path)] = (model.path, None if isinstance(model, Unreadable) else model)
    return wanted


def _given(config: Config) -> dict[str, set[str]]:
    hashes: dict[str, set[str]] = {}
    for model in config.models:
        for one in model.replicas:
            if one.path is not None and one.sha256 is not None:
                hashes.setdefault(key_of(one.path), set()).add(one.sha256)
    return hashes


def _locked(name: str, path: Path, found: Fingerprint, model: ModelFile | None) -> LockedModel:
    files = tuple(LockedFile(name=one.name, size=one.size, sha256=one.sha256) for one in found.files)
    return LockedModel(
        path=name,
        sha256=found.sha256,
        size=found.size,
        format=str(model.format) if model is not None and model.format is not None else None,
        quantization=model.quantisation if model is not None else None,
        files=files if has_manifest(path) else (),
    )


@contextlib.contextmanager
def _progress() -> Iterator[_Start]:
    """Bars on standard error, where that is a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda name, size: lambda count: None
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def start(name: str, size: int) -> Callable[[int], None]:
            task = bars.add_task(_plain(name), total=size)
            return lambda count: bars.advance(task, count)

        yield start


def _plain(line: str) -> str:
    """One line without control characters: file names come from whoever made the files."""
    return "".join(char if char.isprintable() else "?" for char in line)
