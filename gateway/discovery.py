"""Publishes what engines report and what folders hold, as models beside those of the configuration.

Every entry of `discovery:` is looked at again now and then, so models come and go with their engines. What is found
becomes ordinary configuration (`ModelConfig`), and goes the way a changed file goes: compiled as a whole, swapped in
one step. An engine that does not answer keeps what it had: it may be restarting.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import httpx
from pydantic import ValidationError

import backends
from backends.base import ModelCard, ModelFormat
from backends.formats import Level, ModelFile, Role, Unreadable, UnreadableModel, estimate, inspect, scan, support
from gateway.config import Config, ConfigError, DiscoveryConfig, ModelConfig, ProvenanceConfig, ReplicaConfig
from gateway.engine_client import EngineClient
from gateway.provenance import Hashes, hashes_of
from gateway.snapshot import EMBEDDED, LONGEST_CONTEXT, engine_endpoint
from gateway.tls import blame

MOST_MODELS = 1000  # one entry may publish
_MEMORY = Path("/proc/meminfo")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")  # a model in several files
_NO_NAME = re.compile(r"[\s@*?\[\]]+")  # what a model's name may not have in it

log = logging.getLogger("sekisho.discovery")

Found = tuple[str, dict[str, object]]  # a name, and the replica that serves it


class Discovery:
    """What was found last, entry by entry."""

    def __init__(self, available: Callable[[], int | None] | None = None) -> None:
        self._client = EngineClient()
        self._found: dict[DiscoveryConfig, tuple[ModelConfig, ...]] = {}
        self._due: dict[DiscoveryConfig, float] = {}  # steady clock: the next look
        self._told: dict[DiscoveryConfig | None, set[str]] = {}  # what has been logged once
        self._room = Room(available or available_memory)

    async def look(self, config: Config, *, due_only: bool = False) -> Config:
        """The configuration with everything that is found now; `config` itself when there is nothing."""
        now = time.monotonic()
        entries = config.discovery
        asked = [entry for entry in entries if not due_only or self._due.get(entry, 0.0) <= now]
        for entry, found in zip(asked, await asyncio.gather(*(self._ask(one, config) for one in asked)), strict=True):
            self._due[entry] = time.monotonic() + entry.interval
            if found is not None:
                self._found[entry] = found
        return self.extend(config)

    def pause(self, config: Config) -> float:
        """Seconds until an entry is due, at most one: a reload may bring others."""
        soonest = min((self._due.get(entry, 0.0) for entry in config.discovery), default=float("inf"))
        return min(1.0, max(0.05, soonest - time.monotonic()))

    async def forget(self, config: Config) -> None:
        """What is not in `config`, once that is in force: a reload that fails must not cost what was found."""
        entries = config.discovery
        self._found = {entry: self._found[entry] for entry in entries if entry in self._found}
        self._due = {entry: self._due[entry] for entry in entries if entry in self._due}
        self._told = {about: self._told[about] for about in (None, *entries) if about in self._told}
        await self._client.forget({engine_endpoint(entry)[0] for entry in entries if entry.url is not None})

    def extend(self, config: Config) -> Config:
        """The configuration with what was found by the last look."""
        models = {model.name: model for model in config.models}
        owners = {name: model.name for model in config.models for name in (model.name, *model.aliases)}
        loaded: set[Path] = set()
        told: set[str] = set()
        for entry in config.discovery:
            for found in self._found.get(entry, ()):
                owner = owners.get(found.name)
                if owner is not None and not entry.join:
                    text = f"{found.name} is found again by {_where(entry)} and left out; `join: true` would add it"
                    told.add(text)
                    continue
                path = found.replicas[0].path
                if path is not None and path not in loaded:
                    if (short := self._room.claim(path)) is not None:
                        told.add(f"{found.name} in {_where(entry)} is left out: {short}")
                        continue
                    loaded.add(path)
                if owner is None:
                    models[found.name] = found
                    owners[found.name] = found.name
                elif not _is_there(found, models[owner]):
                    known = models[owner]
                    models[owner] = known.model_copy(update={"replicas": known.replicas + found.replicas})
        self._room.keep(loaded)
        self._tell(None, told)
        return config if not any(self._found.values()) else config.model_copy(update={"models": tuple(models.values())})

    async def close(self) -> None:
        await self._client.forget(set())

    async def _ask(self, entry: DiscoveryConfig, config: Config) -> tuple[ModelConfig, ...] | None:
        """What one entry publishes; None when it cannot be told now."""
        told: set[str] = set()
        try:
            if entry.scan is not None:
                own = [replica for model in config.models for replica in model.replicas if replica.path is not None]
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(None, self._files, entry, own, config.provenance, told)
            else:
                found = [(card.id, _of_card(entry, card)) for card in await self._cards(entry)]
            return tuple(_models(entry, found, told))
        except (httpx.HTTPError, OSError, TimeoutError, ValueError) as error:
            why = blame(error) or type(error).__name__
            told.add(f"{_where(entry)} does not list its models ({why}); what it had stays")
            return None
        finally:
            self._tell(entry, told)

    async def _cards(self, entry: DiscoveryConfig) -> Sequence[ModelCard]:
        backend = backends.load(str(entry.backend))
        endpoint, prefix = engine_endpoint(entry)
        key = entry.api_key.get_secret_value() if entry.api_key is not None else None
        status, body = await self._client.get(endpoint, prefix + (backend.probes.models or "/v1/models"), key)
        if status != 200:
            raise ValueError(f"status {status}")
        return backend.read_models(body)[:MOST_MODELS]

    def _files(
        self, entry: DiscoveryConfig, own: Sequence[ReplicaConfig], provenance: ProvenanceConfig, told: set[str]
    ) -> list[Found]:
        """What a folder holds for the embedded engine, but for files that the configuration loads itself."""
        assert entry.scan is not None
        known = {_resolved(Path(str(replica.path))) for replica in own}
        hashes = _hashes(provenance, told)
        self._room.reserved = sum(map(_need_of_own, own))
        found: list[Found] = []
        for file in scan([entry.scan]):
            if isinstance(file, Unreadable):
                told.add(f"{file.path} is left out: {file.reason}")
            elif file.format is ModelFormat.GGUF and file.role in (Role.MODEL, Role.EMBEDDING) and not file.problems:
                if _resolved(file.path) not in known and len(found) < MOST_MODELS:
                    if (why := hashes.refusal(file.path, file.disk_bytes)) is not None:
                        told.add(f"{file.path} is left out: {', '.join(why)}")
                        continue
                    replica = _of_file(file) | {"sha256": hashes.of(file.path)}
                    self._room.needs(file.path, _need(file))
                    found.append((_name_of(file), replica))
            else:
                told.add(f"{file.path} is left out: {_why_not(file)}")
        return found

    def _tell(self, about: DiscoveryConfig | None, told: set[str]) -> None:
        """Each line once, and once more when it has not been true in between."""
        for text in sorted(told - self._told.get(about, set())):
            log.warning("%s", "".join(char if char.isprintable() else "?" for char in text))
        self._told[about] = told


class Room:
    """Memory for the files that discovery has loaded. The operating system's own figure is not enough: what is being
    loaded is not in it yet, and weights that are mapped from their file never are."""

    def __init__(self, available: Callable[[], int | None]) -> None:
        self._available = available
        self._total = available()  # before any of them is loaded
        self.reserved = 0  # bytes for the files that the configuration loads
        self._needs: dict[Path, int | None] = {}
        self._claimed: dict[Path, int] = {}

    def needs(self, path: Path, size: int | None) -> None:
        """Bytes; None when its header does not say enough to tell."""
        self._needs[path] = size

    def claim(self, path: Path) -> str | None:
        """Why a file does not fit. What has been let in stays in."""
        need, total, now = self._needs.get(path), self._total, self._available()
        if path in self._claimed or total is None or now is None:
            return None
        if need is None:
            return "its header does not tell how much memory it takes"
        free = min(now, total - self.reserved - sum(self._claimed.values()))
        if need > free:
            return f"it takes about {_size(need)} of memory, which is more than there is left"
        self._claimed[path] = need
        return None

    def keep(self, paths: set[Path]) -> None:
        """Forgets the claims of all others."""
        self._claimed = {path: need for path, need in self._claimed.items() if path in paths}


def available_memory() -> int | None:
    """Bytes that can be taken without swapping; None where the system does not say."""
    try:
        lines = _MEMORY.read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def _models(entry: DiscoveryConfig, found: Iterable[Found], told: set[str]) -> Iterator[ModelConfig]:
    """One model for every name that the entry lets through; names no model may have are left out."""
    seen: set[str] = set()
    for name, replica in found:
        if not any(fnmatchcase(name, glob) for glob in entry.allow):
            continue
        if any(fnmatchcase(name, glob) for glob in entry.deny):
            continue
        if name in seen and entry.scan is None:
            continue  # an engine that lists a model twice
        seen.add(name)
        try:
            yield ModelConfig(name=entry.name_prefix + name, replicas=(ReplicaConfig(**replica),))
        except ValidationError:
            shown = name if len(name) <= 100 else name[:100] + "..."
            told.add(f"{_where(entry)} lists {shown!r}, whose name or properties cannot be used; it is left out")


def _where(entry: DiscoveryConfig) -> str:
    return f"the folder {entry.scan}" if entry.scan is not None else f"the {entry.backend} at {entry.url}"


def _is_there(found: ModelConfig, known: ModelConfig) -> bool:
    """Whether the model has this replica already."""
    new = found.replicas[0]
    return any(
        (one.url, one.path) == (new.url, new.path) and (one.model or known.name) == (new.model or found.name)
        for one in known.replicas
    )


def _of_card(entry: DiscoveryConfig, card: ModelCard) -> dict[str, object]:
    """A replica of an engine's model, with whatever the engine says of it."""
    given: dict[str, object] = {
        name: getattr(entry, name)
        for name in ("backend", "url", "api_key", "ca_file", "client_cert_file", "client_key_file")
        if getattr(entry, name) is not None
    }
    said = {
        # Where the window is set with each request, the longest possible one would take all of the engine's memory.
        "context_length": None if backends.load(str(entry.backend)).translates else card.context_length,
        "format": card.format,
        "quantization": card.quantization,
        "capabilities": card.capabilities or None,
    }
    return given | {"model": card.id} | {name: value for name, value in said.items() if value is not None}


def _name_of(file: ModelFile) -> str:
    """The file's own name, which people choose, and not the one in its header, which is often nobody's. What Ollama
    keeps has a name that Ollama gave it."""
    if file.path.suffix.lower() != ".gguf":
        return file.name
    return _NO_NAME.sub("-", _SPLIT.sub("", file.path.stem))


def _of_file(file: ModelFile) -> dict[str, object]:
    embeds = {"capabilities": ("embeddings",)} if file.role is Role.EMBEDDING else {}
    return {"backend": EMBEDDED, "path": file.path, **embeds}


def _hashes(provenance: ProvenanceConfig, told: set[str]) -> Hashes:
    """Raises: ValueError when the lock file cannot be used, which is told then."""
    try:
        return hashes_of(provenance)
    except ConfigError as error:
        told.add(str(error))
        raise ValueError from None


def _need(file: ModelFile, given: ReplicaConfig | None = None) -> int | None:
    """Bytes its engine will take, with the context and the number of requests that it is started with."""
    context = min(file.context_length or LONGEST_CONTEXT, LONGEST_CONTEXT)
    parallel: int = ReplicaConfig.model_fields["parallel"].default
    if given is not None:
        context, parallel = given.context_length or context, given.parallel
    found = estimate(file, context=context, sequences=parallel)
    return found.total if found is not None else None


def _need_of_own(given: ReplicaConfig) -> int:
    try:
        return _need(inspect(Path(str(given.path))), given) or 0
    except UnreadableModel:
        return 0


def _why_not(file: ModelFile) -> str:
    if file.problems:
        return "; ".join(file.problems)
    engines = sorted(name for name, how in support(file).items() if how.level is not Level.NO and name != EMBEDDED)
    hint = f"serve it with {', '.join(engines)}, and add that engine" if engines else "no engine here serves it"
    kind = file.format or "unknown"
    return f"{kind} ({file.role}): {hint}"


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path
