"""Publishes what engines report and what folders hold, as models beside those of the configuration.

Every entry of `discovery:` is looked at again now and then, so models come and go with their engines. What is found
becomes ordinary configuration (`ModelConfig`), and goes the way a changed file goes: compiled as a whole, swapped in
one step. An engine that does not answer keeps what it had: it may be restarting.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import httpx
from pydantic import ValidationError

import backends
from backends.base import ModelCard, ModelFormat
from backends.formats import ModelFile, Role, Unreadable, scan
from gateway.config import Config, DiscoveryConfig, ModelConfig, ReplicaConfig
from gateway.engine_client import EngineClient
from gateway.snapshot import engine_endpoint

INTERVAL = 30.0  # seconds between two looks
MOST_MODELS = 1000  # one entry may publish

log = logging.getLogger("sekisho.discovery")


class Discovery:
    """What was found last, entry by entry."""

    def __init__(self) -> None:
        self._client = EngineClient()
        self._found: dict[DiscoveryConfig, tuple[ModelConfig, ...]] = {}
        self._told: set[str] = set()  # what has been logged once

    async def look(self, config: Config) -> Config:
        """The configuration with everything that is found now; `config` itself when there is nothing."""
        entries = config.discovery
        self._found = {entry: self._found[entry] for entry in entries if entry in self._found}
        for entry, found in zip(entries, await asyncio.gather(*map(self._ask, entries)), strict=True):
            if found is not None:
                self._found[entry] = found
        return self.extend(config)

    def extend(self, config: Config) -> Config:
        """The configuration with what was found by the last look."""
        models = {model.name: model for model in config.models}
        taken = {alias for model in config.models for alias in model.aliases}
        for entry in config.discovery:
            for found in self._found.get(entry, ()):
                known = models.get(found.name)
                if known is None and found.name not in taken:
                    models[found.name] = found
                elif known is not None and entry.join:
                    models[found.name] = known.model_copy(update={"replicas": known.replicas + found.replicas})
                else:
                    self._tell(f"{found.name} is found again by {_where(entry)} and left out; `join: true` adds it")
        return config if len(models) == len(config.models) and not self._found else config.model_copy(
            update={"models": tuple(models.values())}
        )  # fmt: skip

    async def close(self) -> None:
        await self._client.forget(set())

    async def _ask(self, entry: DiscoveryConfig) -> tuple[ModelConfig, ...] | None:
        """What one entry publishes; None when it cannot be told now."""
        try:
            if entry.scan is not None:
                files = await asyncio.get_running_loop().run_in_executor(None, _files, entry.scan)
                return tuple(self._models(entry, ((name, _of_file(file)) for name, file in files)))
            return tuple(self._models(entry, ((card.id, _of_card(entry, card)) for card in await self._cards(entry))))
        except (httpx.HTTPError, OSError, ssl.SSLError, TimeoutError, ValueError) as error:
            self._tell(f"{_where(entry)} does not list its models ({type(error).__name__})")
            return None

    async def _cards(self, entry: DiscoveryConfig) -> Sequence[ModelCard]:
        backend = backends.load(str(entry.backend))
        endpoint, prefix = engine_endpoint(entry)
        key = entry.api_key.get_secret_value() if entry.api_key is not None else None
        status, body = await self._client.get(endpoint, prefix + (backend.probes.models or "/v1/models"), key)
        if status != 200:
            raise ValueError(f"status {status}")
        return backend.read_models(body)[:MOST_MODELS]

    def _models(self, entry: DiscoveryConfig, found: Iterable[tuple[str, dict[str, object]]]) -> Iterator[ModelConfig]:
        """One model for every name that the entry lets through; names no model may have are left out."""
        for name, replica in found:
            if not any(fnmatchcase(name, glob) for glob in entry.allow):
                continue
            if any(fnmatchcase(name, glob) for glob in entry.deny):
                continue
            try:
                yield ModelConfig(name=entry.name_prefix + name, replicas=(ReplicaConfig(**replica),))
            except ValidationError:
                self._tell(f"{_where(entry)} lists a model whose name or properties cannot be used; it is left out")

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)


def _where(entry: DiscoveryConfig) -> str:
    return f"the folder {entry.scan}" if entry.scan is not None else f"the {entry.backend} at {entry.url}"


def _of_card(entry: DiscoveryConfig, card: ModelCard) -> dict[str, object]:
    """A replica of an engine's model, with whatever the engine says of it."""
    given: dict[str, object] = {
        name: getattr(entry, name)
        for name in ("backend", "url", "api_key", "ca_file", "client_cert_file", "client_key_file")
        if getattr(entry, name) is not None
    }
    # Where a replica's window goes along with each request, the longest a model can take must not be asked for.
    sets_window = backends.load(str(entry.backend)).translates
    said = {
        "context_length": None if sets_window else card.context_length,
        "format": card.format,
        "quantization": card.quantization,
        "capabilities": card.capabilities or None,
    }
    return given | {"model": card.id} | {name: value for name, value in said.items() if value is not None}


def _files(folder: Path) -> list[tuple[str, ModelFile]]:
    """Models in a folder that the embedded engine can load, by the name they get."""
    return [
        (file.name, file)
        for file in scan([folder])
        if not isinstance(file, Unreadable)
        and file.format is ModelFormat.GGUF
        and file.role in (Role.MODEL, Role.EMBEDDING)
        and not file.problems
    ][:MOST_MODELS]


def _of_file(file: ModelFile) -> dict[str, object]:
    return {"backend": "llamacpp", "path": file.path}
