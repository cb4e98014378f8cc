"""Ollama's model store ($OLLAMA_MODELS, ~/.ollama/models): manifests by name, contents in blobs by digest.

Layout: manifests/<host>/<namespace>/<model>/<tag> is JSON {config: {digest}, layers: [{mediaType, digest, size}]},
and blobs/sha256-<hex> holds each. A model layer is a GGUF file as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from backends.base import ModelFormat
from backends.formats import reading
from backends.formats.gguf import inspect_gguf
from backends.formats.model import ModelFile, Role, Unreadable, UnreadableModel
from backends.formats.reading import mapping, names_in, printable, read_json, size_of

MAX_MANIFESTS = 10_000
_DIGEST = re.compile(r"sha256[:-](?P<hex>[0-9a-f]{64})")
_KIND = "application/vnd.ollama.image."
_DEFAULT = ("registry.ollama.ai", "library")  # host and namespace that Ollama leaves out of names


def is_store(folder: Path) -> bool:
    try:
        return (folder / "manifests").is_dir() and (folder / "blobs").is_dir()
    except (OSError, ValueError):
        return False


def models_in(store: Path) -> Iterator[ModelFile | Unreadable]:
    """Every model of a store under the name that Ollama's API gives it, such as `llama3:latest`."""
    found = 0
    try:
        for manifest in _manifests(store / "manifests", 4, set()):
            found += 1
            if found > MAX_MANIFESTS:
                yield Unreadable(store, f"more than {MAX_MANIFESTS} manifests")
                return
            try:
                yield _model(store, manifest)
            except UnreadableModel as error:
                yield Unreadable(error.path, error.reason)
    except UnreadableModel as error:
        yield Unreadable(error.path, error.reason)


def _manifests(folder: Path, depth: int, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """Files exactly `depth` levels down. Raises: UnreadableModel; links in a circle are followed once."""
    try:
        status = folder.stat()
    except (OSError, RuntimeError) as error:
        raise UnreadableModel(folder, reading.reason_of(error)) from error
    if (status.st_dev, status.st_ino) in seen:
        return
    seen.add((status.st_dev, status.st_ino))
    if len(seen) > MAX_MANIFESTS:
        raise UnreadableModel(folder, f"more than {MAX_MANIFESTS} folders")
    for name in names_in(folder):
        path = folder / name
        if depth == 1:
            if not name.startswith(".") and size_of(path) is not None:
                yield path
        elif os.path.isdir(path):
            yield from _manifests(path, depth - 1, seen)


def _name(manifest: Path) -> str:
    host, namespace, model, tag = manifest.parts[-4:]
    parts = [model]
    if (host, namespace) != _DEFAULT:
        parts = [namespace, model] if host == _DEFAULT[0] else [host, namespace, model]
    return printable(f"{'/'.join(parts)}:{tag}") or "?"


def _model(store: Path, manifest: Path) -> ModelFile:
    content = read_json(manifest)
    listed = content.get("layers")
    layers = [mapping(layer) for layer in listed] if isinstance(listed, list) else []
    config = _config(store, content)
    models = [layer for layer in layers if layer.get("mediaType") == f"{_KIND}model"]
    if not models:
        return _without_gguf(manifest, layers, config)
    found = inspect_gguf(_blob(store, manifest, models[0]))
    kinds = {layer.get("mediaType") for layer in layers if isinstance(layer.get("mediaType"), str)}
    beside = tuple(f"with a {kind} layer" for kind in ("projector", "adapter") if f"{_KIND}{kind}" in kinds)
    return replace(
        found,
        name=_name(manifest),
        quantisation=found.quantisation or printable(config.get("file_type"), 32),
        chat_template=found.chat_template or f"{_KIND}template" in kinds,
        context_length=found.context_length or reading.count(config.get("context_length")),
        notes=found.notes + beside,
    )


def _config(store: Path, content: dict[str, Any]) -> dict[str, Any]:
    digest = _DIGEST.fullmatch(str(mapping(content.get("config")).get("digest")))
    if digest is None:
        return {}
    try:
        return read_json(store / "blobs" / f"sha256-{digest['hex']}")
    except UnreadableModel:  # it only adds to what the blob itself says
        return {}


def _blob(store: Path, manifest: Path, layer: dict[str, Any]) -> Path:
    """Raises: UnreadableModel when the digest is not one, so that a manifest cannot point elsewhere, or not there."""
    digest = _DIGEST.fullmatch(str(layer.get("digest")))
    if digest is None:
        raise UnreadableModel(manifest, "a layer without a sha256 digest")
    blob = store / "blobs" / f"sha256-{digest['hex']}"
    if size_of(blob) is None:
        raise UnreadableModel(manifest, f"its blob {blob.name[:19]}... is missing")
    return blob


def _without_gguf(manifest: Path, layers: list[dict[str, Any]], config: dict[str, Any]) -> ModelFile:
    """Weights in one blob per tensor, which only Ollama reads, or a model that runs elsewhere."""
    tensors = [layer for layer in layers if layer.get("mediaType") == f"{_KIND}tensor"]
    if not tensors:
        host = printable(config.get("remote_host"), 128)
        note = f"runs at {host}" if host else "holds no weights"
        return ModelFile(manifest, _name(manifest), None, Role.UNKNOWN, notes=(note,))
    size = sum(reading.count(layer.get("size")) or 0 for layer in tensors)
    return ModelFile(
        path=manifest,
        name=_name(manifest),
        format=ModelFormat.SAFETENSORS,
        quantisation=printable(config.get("file_type"), 32),
        method="ollama",
        architecture=printable(config.get("model_family"), 64),
        context_length=reading.count(config.get("context_length")),
        weight_bytes=size,
        disk_bytes=size,
        chat_template=True,
        notes=("one blob per tensor: only Ollama reads it",),
    )
