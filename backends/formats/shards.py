"""The safetensors files of a folder: which belong to the model, which are missing, and what they add up to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from backends.formats.json_stream import JsonStream
from backends.formats.model import UnreadableModel
from backends.formats.quantisation import Quantisation
from backends.formats.reading import opened, size_of
from backends.formats.safetensors import BITS, Tensor, tensors_in

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20  # the largest models' have 10 MB
MAX_SHARDS = 1000
_MAX_INDEX_ENTRY = 1 << 16  # characters
_MAX_TENSORS = 1 << 20  # in a folder
_SHARD = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.safetensors", re.DOTALL)


@dataclass(slots=True)
class Weights:
    """Sums over the tensors of all files that are there."""

    present: tuple[Path, ...] = ()
    missing: tuple[str, ...] = ()
    parameters: int | None = 0  # None once one tensor cannot be told
    bytes: int = 0
    disk_bytes: int = 0
    bytes_by_dtype: dict[str, int] = field(default_factory=dict)


def weight_files(folder: Path, names: Iterable[str]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Files with weights, and the names of those that should be there.

    Raises: UnreadableModel when the index is damaged or names files elsewhere.
    """
    names = tuple(name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_"))
    wanted = _indexed(folder) if size_of(folder / INDEX) is not None else _by_name(names)
    if len(wanted) > MAX_SHARDS:
        raise UnreadableModel(folder, f"more than {MAX_SHARDS} weight files")
    present = tuple(folder / name for name in wanted if size_of(folder / name) is not None)
    missing = tuple(name for name in wanted if size_of(folder / name) is None)
    return present, missing


def _indexed(folder: Path) -> tuple[str, ...]:
    """The files that an index names. It is read entry by entry: tens of MB of it come down to a few names."""
    named: set[str] = set()
    with opened(folder / INDEX) as (file, size):
        if size > MAX_INDEX_BYTES:
            raise UnreadableModel(folder / INDEX, f"larger than {MAX_INDEX_BYTES >> 20} MiB")
        stream = JsonStream(file, size)
        try:
            for key in stream.keys():
                if key == "weight_map":
                    _collect(stream, named)
                else:
                    stream.value(_MAX_INDEX_ENTRY)
        except ValueError as error:
            raise UnreadableModel(folder / INDEX, str(error)) from error
    return tuple(sorted(named))


def _collect(stream: JsonStream, named: set[str]) -> None:
    for _tensor in stream.keys():
        name = stream.value(_MAX_INDEX_ENTRY)
        if not isinstance(name, str) or not name or "/" in name or "\\" in name or "\0" in name or len(name) > 255:
            raise ValueError("names files outside its folder")
        named.add(name)
        if len(named) > MAX_SHARDS:
            raise ValueError(f"names more than {MAX_SHARDS} weight files")


def _by_name(names: tuple[str, ...]) -> tuple[str, ...]:
    """Without an index: the file of the usual name, or numbered ones with their gaps filled, else every file.

    Some folders hold the same weights a second time under another name, such as consolidated.safetensors.
    """
    if "model.safetensors" in names:
        return ("model.safetensors",)
    wanted: set[str] = set()
    for name in names:
        numbered = _SHARD.fullmatch(name)
        if numbered and int(numbered["parts"]) <= MAX_SHARDS:
            total = int(numbered["parts"])
            wanted |= {f"{numbered['stem']}-{part:05}-of-{total:05}.safetensors" for part in range(1, total + 1)}
            if len(wanted) > MAX_SHARDS:
                break
    return tuple(sorted(wanted)) or names


def file_metadata(path: Path) -> dict[str, str]:
    """A file's own metadata, which comes first; its tensors are not read. Raises: UnreadableModel."""
    metadata: dict[str, str] = {}
    next(tensors_in(path, metadata), None)
    return metadata


def weigh(present: tuple[Path, ...], missing: tuple[str, ...], quantisation: Quantisation) -> Weights:
    """Raises: UnreadableModel when a header is damaged."""
    weights, count = Weights(present, missing), 0
    for path in present:
        weights.disk_bytes += size_of(path) or 0
        for tensor in tensors_in(path, {}):
            count += 1
            if count > _MAX_TENSORS:
                raise UnreadableModel(path.parent, f"more than {_MAX_TENSORS} tensors")
            _add(weights, tensor, quantisation)
    return weights


def _add(weights: Weights, tensor: Tensor, quantisation: Quantisation) -> None:
    weights.bytes += tensor.bytes
    dtype = tensor.dtype if tensor.dtype in BITS else "other"  # or a file could make this grow without end
    weights.bytes_by_dtype[dtype] = weights.bytes_by_dtype.get(dtype, 0) + tensor.bytes
    logical = quantisation.logical(tensor)
    weights.parameters = None if logical is None or weights.parameters is None else weights.parameters + logical
