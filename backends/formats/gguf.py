"""A GGUF file, or all parts of a split one, as a ModelFile."""

from __future__ import annotations

import re
from pathlib import Path

from backends.base import ModelFormat
from backends.formats.ggml_types import FILE_TYPES, GUESSED, POOLING_RANK, TENSOR_TYPES
from backends.formats.gguf_geometry import Fields, geometry_of
from backends.formats.gguf_header import MAGIC, Header, Tensors, Value, read_header
from backends.formats.model import ModelFile, Role, UnreadableModel
from backends.formats.reading import opened, printable, size_of

MAX_PARTS = 1000
_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.DOTALL)


def is_gguf(path: Path) -> bool:
    """By its first four bytes. Raises: UnreadableModel when they cannot be read."""
    with opened(path) as (file, _):
        return file.read(len(MAGIC)) == MAGIC


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files that belong together, first part first, whether they exist or not; just `path` when it is not split.

    Raises: UnreadableModel when the name claims more parts than any model has.
    """
    named = _PART.fullmatch(path.name)
    if named is None:
        return (path,)
    total = int(named["parts"])
    if not 1 <= int(named["part"]) <= total <= MAX_PARTS:
        raise UnreadableModel(path, f"part {int(named['part'])} of {total} makes no sense")
    return tuple(path.with_name(f"{named['stem']}-{part:05}-of-{total:05}.gguf") for part in range(1, total + 1))


def inspect_gguf(path: Path) -> ModelFile:
    """What a GGUF file is; any part of a split one stands for the whole.

    Raises: UnreadableModel when a part is damaged, or when the first one, which holds the description, is missing.
    """
    parts = parts_of(path)
    if size_of(parts[0]) is None and len(parts) > 1:
        raise UnreadableModel(path, f"the first part, {parts[0].name}, is missing")
    first = read_header(parts[0])
    tensors, disk_bytes, missing = Tensors(), 0, []
    for index, part in enumerate(parts):
        if size_of(part) is None:
            missing.append(part)
            continue
        header = first if index == 0 else read_header(part)
        tensors.add(header.tensors)
        disk_bytes += header.file_bytes
    return _described(parts, first, tensors, disk_bytes, _split_problems(parts, missing, first))


def _split_problems(parts: tuple[Path, ...], missing: list[Path], first: Header) -> tuple[str, ...]:
    claimed = first.pairs.get("split.count", 1)
    if missing:
        return (f"{len(missing)} of {len(parts)} parts are missing, first {missing[0].name}",)
    if isinstance(claimed, int) and claimed > 1 and claimed != len(parts):
        return (f"header says {claimed} parts: names must end in -00001-of-{claimed:05}.gguf, all in one folder",)
    return ()


def _described(
    parts: tuple[Path, ...], header: Header, tensors: Tensors, disk_bytes: int, problems: tuple[str, ...]
) -> ModelFile:
    pairs = header.pairs
    architecture = printable(pairs.get("general.architecture"), 64)
    fields = Fields(pairs, architecture or "")
    named = _PART.fullmatch(parts[0].name)
    stem = named["stem"] if named else parts[0].name.removesuffix(".gguf")
    role = _role(pairs, fields, parts[0].name, architecture)
    return ModelFile(
        path=parts[0],
        name=printable(pairs.get("general.name"), 128) or printable(stem) or "?",
        format=ModelFormat.GGUF,
        role=role,
        quantisation=_quantisation(pairs, tensors, stem),
        bits=round(tensors.bytes * 8 / tensors.elements, 2) if tensors.elements else None,
        architecture=architecture,
        parameters=None if problems else tensors.elements,
        context_length=fields.count("context_length"),
        weight_bytes=None if problems else tensors.bytes,
        disk_bytes=disk_bytes,
        files=parts,
        chat_template=bool(pairs.get("tokenizer.chat_template")),
        big_endian=header.big_endian,
        version=header.version,
        geometry=geometry_of(fields, header.vocabulary),
        notes=_notes(header, tensors),
        problems=problems,
    )


def _role(pairs: dict[str, Value], fields: Fields, file_name: str, architecture: str | None) -> Role:
    kind = pairs.get("general.type")
    if kind == "adapter" or "adapter.type" in pairs:
        return Role.ADAPTER
    if kind == "mmproj" or architecture == "clip" or file_name.lower().startswith("mmproj"):
        return Role.PROJECTOR
    pooling = fields.count("pooling_type")
    if pooling == POOLING_RANK:
        return Role.RERANK
    # A chat model may carry a pooling type too; without a template it was made for embeddings.
    if (pooling and not pairs.get("tokenizer.chat_template")) or pairs.get(f"{architecture}.attention.causal") is False:
        return Role.EMBEDDING
    return Role.MODEL if architecture else Role.UNKNOWN


def _quantisation(pairs: dict[str, Value], tensors: Tensors, stem: str) -> str | None:
    """The label that the file gives itself, else the type of most weights, else what its name says."""
    given = pairs.get("general.file_type")
    if isinstance(given, int) and not isinstance(given, bool) and given & ~GUESSED in FILE_TYPES:
        return FILE_TYPES[given & ~GUESSED]
    if tensors.elements_by_type:
        most = max(tensors.elements_by_type, key=lambda kind: tensors.elements_by_type[kind])
        return TENSOR_TYPES[most].name
    return next((label for label in sorted(FILE_TYPES.values(), key=len)[::-1] if label in stem.upper()), None)


def _notes(header: Header, tensors: Tensors) -> tuple[str, ...]:
    notes = []
    if header.big_endian:
        notes.append("big-endian: loads only on hosts of that byte order")
    if not tensors.count:
        notes.append("holds no tensors: a vocabulary only")
    return tuple(notes)
