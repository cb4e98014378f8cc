"""Which hash each model file must have: `sha256` of its replica, or its entry in the lock file; and that one is known.

Nothing is hashed here. The embedded engine does that, in its own process, before it loads a file; what is compared here
are sizes, which costs nothing and finds files that were cut off before an engine is started for them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from backends.formats import UnreadableModel
from backends.formats.manifest import members_of
from backends.formats.reading import size_of
from gateway.config import Config, ProvenanceConfig, ReplicaConfig, load
from gateway.config.checks import Finding
from gateway.config.source import Source
from gateway.provenance.lockfile import NAME, LockedModel, key_of, read_lock
from gateway.provenance.permissions import Place, places_of

_OTHER_FILE = "get the file again, or lock the new one with `sekisho models lock`"
_REMEDY = "give its `sha256`, or write it into the lock file with `sekisho models lock`"


@dataclass(frozen=True, slots=True)
class Hashes:
    """What one reading of the lock file said."""

    required: bool = False
    models: Mapping[str, LockedModel] = field(default_factory=dict)

    def of(self, path: Path) -> str | None:
        """The hash that a model must have; None when any will do."""
        locked = self.models.get(key_of(path))
        return locked.sha256 if locked is not None else None

    def refusal(self, path: Path, size: int | None) -> tuple[str, str] | None:
        """Why a model without a `sha256` of its own may not be loaded, and what to do; None when it may be.
        `size`: its bytes now, None where that is not known."""
        locked = self.models.get(key_of(path))
        if locked is None:
            return ("no SHA-256 is known for it", _REMEDY) if self.required else None
        if size is not None and size != locked.size:
            return f"it has {size} bytes, not the {locked.size} of the lock file", _OTHER_FILE
        return None


def hashes_of(given: ProvenanceConfig) -> Hashes:
    """Reads the lock file, if there is one. Raises: ConfigError."""
    return Hashes(given.require_hashes, read_lock(given.lock_file) if given.lock_file is not None else {})


def default_lock(folder: Path) -> Path | None:
    """The lock file beside a configuration in `folder`; None when there is none."""
    path = folder / NAME
    return path if os.path.lexists(path) else None


class Reading:
    """One reading of the configuration file. `places`: where it, and what it names, lies on the disk."""

    def __init__(self) -> None:
        self.places: tuple[Place, ...] = ()
        self._hashes = Hashes()
        self._lock: Path | None = None

    def config(self, path: Path, kinds: Collection[str], overrides: Mapping[str, object]) -> Config:
        """With the lock file's hashes in its replicas, and its own name in `provenance`. Raises: ConfigError."""
        config = load(path, kinds=kinds, overrides=overrides, more_checks=(self._check,))
        models = tuple(
            model.model_copy(update={"replicas": tuple(map(self._pinned, model.replicas))}) for model in config.models
        )
        provenance = config.provenance.model_copy(update={"lock_file": self._lock})
        return config.model_copy(update={"models": models, "provenance": provenance})

    def _check(self, config: Config, source: Source) -> Iterator[Finding]:
        """Raises: ConfigError for what is wrong with the lock file."""
        given = config.provenance
        self._lock = given.lock_file or default_lock(source.folder)
        self.places = places_of(config, source, self._lock)
        if given.lock_file is not None and not given.lock_file.is_file():
            hint = "write it with `sekisho models lock`"
            yield Finding(("provenance", "lock_file"), f"no such file: {given.lock_file}", hint)
            return
        self._hashes = hashes_of(given.model_copy(update={"lock_file": self._lock}))
        for index, model in enumerate(config.models):
            for position, replica in enumerate(model.replicas):
                yield from self._check_replica(("models", index, "replicas", position), replica)

    def _check_replica(self, path: tuple[str | int, ...], replica: ReplicaConfig) -> Iterator[Finding]:
        if replica.path is None:
            return
        locked = self._hashes.of(replica.path)
        if replica.sha256 is not None and locked is None:
            return
        if replica.sha256 is not None and locked != replica.sha256:
            hint = "correct `sha256`, or write the lock file again with `sekisho models lock`"
            yield Finding((*path, "sha256"), f"the lock file has another hash for {replica.path}", hint)
        elif why := self._hashes.refusal(replica.path, _size_now(replica.path)):
            yield Finding((*path, "path"), f"{replica.path}: {why[0]}", why[1])

    def _pinned(self, replica: ReplicaConfig) -> ReplicaConfig:
        if replica.path is None or replica.sha256 is not None:
            return replica
        return replica.model_copy(update={"sha256": self._hashes.of(replica.path)})


def without_hash(config: Config) -> Iterator[tuple[str, str, str]]:
    """(path, what is wrong, what to do) for each model file that would be loaded although it must not be. The last
    line: whatever a configuration was made of, it comes by here before anything is loaded."""
    for model in config.models if config.provenance.require_hashes else ():
        for replica in model.replicas:
            if replica.path is not None and replica.sha256 is None:
                yield f"models.{model.name}.replicas", f"{replica.path}: no SHA-256 is known for it", _REMEDY


def beyond_reach(config: Config) -> str:
    """A line on what `require_hashes` cannot cover in this configuration; empty when there is nothing."""
    replicas = sum(replica.url is not None for model in config.models for replica in model.replicas)
    found = sum(entry.url is not None for entry in config.discovery)
    if not config.provenance.require_hashes or not replicas + found:
        return ""
    counted = [f"{count} {what}" for count, what in ((replicas, "replica(s)"), (found, "discovery entry(s)")) if count]
    return f"require_hashes does not cover {' and '.join(counted)} reached by url: those engines load their own files"


def _size_now(path: Path) -> int | None:
    """Bytes of a file or of all parts of a split one; None for a folder, and where something is missing."""
    try:
        sizes = [size_of(member.path) for member in members_of(path)] if not path.is_dir() else [None]
    except (UnreadableModel, OSError):
        return None
    return None if None in sizes else sum(size or 0 for size in sizes)
