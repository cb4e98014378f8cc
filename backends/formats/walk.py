"""From paths that a user names to the models in them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from backends.base import ModelFormat
from backends.formats import compiled, folders, ollama_store, shards
from backends.formats.gguf import inspect_gguf, is_gguf, parts_of
from backends.formats.model import ModelFile, Unreadable, UnreadableModel
from backends.formats.quantisation import Quantisation
from backends.formats.reading import names_in, reason_of, size_of

MAX_DEPTH = 12  # folders below the one that was named
MAX_ENTRIES = 200_000  # files and folders looked at for one named path


def inspect(path: Path) -> ModelFile:
    """What one file or folder is, from its headers; weights are never read.

    A part of a split GGUF stands for the whole. A folder is one model: config.json with its weights, a LoRA adapter,
    an engine, or a single GGUF file.

    Raises: UnreadableModel, and nothing else, whatever the bytes: not a model, damaged, over a limit, out of reach.
    """
    try:
        path.stat()
        return _folder(path, names_in(path)) if path.is_dir() else _file(path)
    except (OSError, ValueError, RuntimeError) as error:
        raise UnreadableModel(path, reason_of(error)) from error


def scan(paths: Iterable[Path]) -> Iterator[ModelFile | Unreadable]:
    """Every model at or below the paths, in order of name; what cannot be read comes as a value with the reason.

    Goes down at most MAX_DEPTH folders and looks at MAX_ENTRIES names for each path; a folder reached twice, as through
    a loop of links, is looked at once. Files that are no models are passed over, except those named in `paths`.
    """
    seen: set[tuple[int, int]] = set()
    for path in paths:
        try:
            path.stat()
            is_folder = path.is_dir()
        except (OSError, ValueError, RuntimeError) as error:
            yield Unreadable(path, reason_of(error))
            continue
        if is_folder:
            yield from _Walk(seen).folder(path, 0)
        else:
            yield _tried(path)


def _tried(path: Path) -> ModelFile | Unreadable:
    try:
        return inspect(path)
    except UnreadableModel as error:
        return Unreadable(error.path, error.reason)


def _file(path: Path) -> ModelFile:
    lowered = path.name.lower()
    if lowered.endswith(".onnx"):
        return compiled.inspect_onnx_file(path)
    if is_gguf(path):
        return inspect_gguf(path)
    if lowered.endswith(".gguf"):
        raise UnreadableModel(path, "not a GGUF file")
    if lowered.endswith(".safetensors"):
        shards.weigh((path,), (), Quantisation(ModelFormat.SAFETENSORS))  # its header must at least be sound
        return folders.unknown(path, "a lone safetensors file: engines need its config.json, name the folder")
    raise UnreadableModel(path, "not a model file")


def _folder(folder: Path, names: tuple[str, ...]) -> ModelFile:
    found = _recognised(folder, names)
    if found is not None:
        return found
    if ollama_store.is_store(folder):
        raise UnreadableModel(folder, "an Ollama store: it holds several models, scan it")
    gguf = _gguf_models(folder, names)
    if len(gguf) == 1:
        return inspect_gguf(gguf[0])
    raise UnreadableModel(folder, f"holds {len(gguf)} GGUF models: name one" if gguf else "not a model folder")


def _recognised(folder: Path, names: tuple[str, ...]) -> ModelFile | None:
    """A folder that is one model as a whole. The order matters: several have a config.json."""
    if compiled.is_engine(names):
        return compiled.inspect_engine(folder, names)
    if compiled.is_checkpoint(names):
        return compiled.inspect_checkpoint(folder, names)
    if "model_index.json" in names:
        return folders.unknown(folder, "a diffusers pipeline: makes images, not text")
    weights = any(name.endswith((".safetensors", ".bin", ".pt", ".pth")) for name in names)
    if "adapter_config.json" in names and "config.json" not in names:
        return folders.inspect_peft(folder, names)
    if "config.json" in names and (weights or shards.INDEX in names):
        return folders.inspect_hf(folder, names)
    if any(name.endswith(".onnx") for name in names) or "genai_config.json" in names:
        return compiled.inspect_onnx_folder(folder, names)
    return None


def _gguf_models(folder: Path, names: tuple[str, ...]) -> tuple[Path, ...]:
    """Model files in a folder, a split one once; without projectors, which are loaded beside a model."""
    found = {_first_part(folder / name) for name in names if name.endswith(".gguf")}
    return tuple(sorted(path for path in found if not path.name.lower().startswith("mmproj")))


def _first_part(path: Path) -> Path:
    try:
        return parts_of(path)[0]
    except UnreadableModel:
        return path


class _Walk:
    def __init__(self, seen: set[tuple[int, int]]) -> None:
        self._seen = seen
        self._looked_at = 0

    def folder(self, folder: Path, depth: int) -> Iterator[ModelFile | Unreadable]:
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in self._seen:
                return
            self._seen.add((status.st_dev, status.st_ino))
            if ollama_store.is_store(folder):
                yield from ollama_store.models_in(folder)
                return
            names = names_in(folder)
            recognised = _recognised(folder, names)
        except UnreadableModel as error:
            yield Unreadable(error.path, error.reason)
            return
        except (OSError, ValueError, RuntimeError) as error:
            yield Unreadable(folder, reason_of(error))
            return
        if recognised is not None:
            yield recognised
        yield from self._gguf_files(folder, names)
        if recognised is None:
            yield from self._below(folder, names, depth)

    def _gguf_files(self, folder: Path, names: tuple[str, ...]) -> Iterator[ModelFile | Unreadable]:
        listed: set[Path] = set()
        for name in names:
            path = folder / name
            if not name.endswith((".gguf", ".GGUF")) or (first := _first_part(path)) in listed:
                continue
            listed.add(first)
            yield _tried(path)

    def _below(self, folder: Path, names: tuple[str, ...], depth: int) -> Iterator[ModelFile | Unreadable]:
        for name in names:
            self._looked_at += 1
            if self._looked_at > MAX_ENTRIES:
                if self._looked_at == MAX_ENTRIES + 1:
                    yield Unreadable(folder, f"stopped after {MAX_ENTRIES} entries")
                return
            path = folder / name
            if not os.path.isdir(path):
                if name.endswith(".safetensors") and size_of(path) is not None:
                    yield _tried(path)
            elif depth < MAX_DEPTH:
                yield from self.folder(path, depth + 1)
