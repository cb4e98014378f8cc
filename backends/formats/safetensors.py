"""Headers of safetensors files: u64 length, then JSON {tensor: {dtype, shape, data_offsets}, "__metadata__": {...}}."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from backends.formats.json_stream import JsonStream
from backends.formats.model import UnreadableModel
from backends.formats.reading import opened

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_TENSORS = 1 << 18
_MAX_ENTRY = 1 << 16  # characters of one tensor's description
_MAX_METADATA_PAIRS = 100_000
_MAX_METADATA_TEXT = 4 << 20  # characters of one value: LoRA trainers store whole logs there
_MAX_DIMENSIONS = 16
_MAX_ELEMENTS = 1 << 62

BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    bytes: int


def tensors_in(path: Path, metadata: dict[str, str]) -> Iterator[Tensor]:
    """Every tensor of a file; short entries of its metadata are added to `metadata` on the way.

    Raises: UnreadableModel while iterating.
    """
    with opened(path) as (file, size):
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise UnreadableModel(path, "cut off in its header, or not a safetensors file")
        if length > MAX_HEADER_BYTES:
            raise UnreadableModel(path, f"header larger than {MAX_HEADER_BYTES // 1_000_000} MB")
        try:
            yield from _entries(JsonStream(file, length), size - 8 - length, metadata)
        except ValueError as error:
            raise UnreadableModel(path, f"header: {error}") from error


def _entries(stream: JsonStream, data_bytes: int, metadata: dict[str, str]) -> Iterator[Tensor]:
    """What follows the object can only be the blanks that align the data; nothing is gained by reading them."""
    found = 0
    for name in stream.keys():
        if name == "__metadata__":
            _metadata(stream, metadata)
            continue
        found += 1
        if found > MAX_TENSORS:
            raise ValueError(f"more than {MAX_TENSORS} tensors")
        yield _tensor(name, stream.value(_MAX_ENTRY), data_bytes)


def _metadata(stream: JsonStream, metadata: dict[str, str]) -> None:
    for found, key in enumerate(stream.keys()):
        if found >= _MAX_METADATA_PAIRS:
            raise ValueError(f"more than {_MAX_METADATA_PAIRS} entries of metadata")
        if stream.peek() != '"':
            raise ValueError("metadata that is not text")
        value = stream.value(_MAX_METADATA_TEXT)
        if len(value) <= 256 and len(metadata) < 64:
            metadata[key[:256]] = value


def _tensor(name: str, entry: Any, data_bytes: int) -> Tensor:
    if not isinstance(entry, dict):
        raise ValueError("a tensor without a description")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _are_sizes(shape, _MAX_DIMENSIONS) or not _are_sizes(offsets, 2):
        raise ValueError("a tensor without dtype, shape or offsets")
    if len(offsets) != 2 or not offsets[0] <= offsets[1]:
        raise ValueError("offsets that make no sense")
    if offsets[1] > data_bytes:
        raise ValueError(f"cut off: tensors end at byte {offsets[1]} of the data, which has {data_bytes}")
    elements = 1
    for length in shape:
        elements *= length
        if elements > _MAX_ELEMENTS:
            raise ValueError("a tensor too large for any memory")
    size = offsets[1] - offsets[0]
    if dtype in BITS and -(-elements * BITS[dtype] // 8) != size:
        raise ValueError("a tensor whose shape and offsets disagree")
    return Tensor(name, dtype, tuple(shape), elements, size)


def _are_sizes(value: Any, most: int) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > most:
        return False
    return all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= 1 << 63 for item in value)
