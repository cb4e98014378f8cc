"""Reads a GGUF header: key-value pairs that matter and a summary of the tensors. Weights are never touched.

Versions 1 to 3, both byte orders. Strings and arrays that nobody asks for are skipped without being built, so a
vocabulary of millions costs no memory. Layout: docs/gguf.md in ggml; version 1 had 32-bit counts and lengths.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from backends.formats.ggml_types import TENSOR_TYPES
from backends.formats.model import UnreadableModel
from backends.formats.reading import MAX_LAYERS, opened

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 64 << 20
MAX_PAIRS = 1_000_000
MAX_TENSORS = 1 << 18
MAX_STRING_BYTES = 16 << 20
MAX_KEY_BYTES = 65_535  # GGUF's own limit
MAX_ARRAY_STRINGS = 1 << 21  # in all arrays: skipped one by one, and the largest models have about 1 000 000
_MAX_KEPT_BYTES = 4096  # a longer string is noted as present and not read
_MAX_KEPT_PAIRS = 128
_MAX_KEPT_KEY = 128  # characters
_MAX_DIMENSIONS = 4  # ggml's
_MAX_ELEMENTS = 1 << 62

_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SIZES = {kind: struct.calcsize(code) for kind, code in _NUMBERS.items()}

# What is kept: whole keys, and keys of an architecture by what follows its name.
_KEYS = {
    "general.architecture", "general.name", "general.type", "general.file_type", "general.alignment",
    "tokenizer.chat_template", "adapter.type", "split.no", "split.count", "split.tensors.count",
}  # fmt: skip
_ARCHITECTURE_KEYS = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "pooling_type",
    "expert_count", "expert_used_count", "expert_shared_count", "expert_feed_forward_length", "nextn_predict_layers",
    "full_attention_interval", "shortconv.l_cache", "wkv.head_size", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "attention.key_length_mla", "attention.kv_lora_rank",
    "attention.key_length_swa", "attention.value_length_swa", "attention.sliding_window",
    "attention.sliding_window_pattern", "attention.shared_kv_layers", "attention.causal",
    "attention.recurrent_layers", "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.group_count",
}  # fmt: skip
_COUNTED = "tokenizer.ggml.tokens"  # only its length is kept

Value = int | float | bool | str | tuple[int | float | bool, ...]


@dataclass(slots=True)
class Tensors:
    """Sums over the tensors of one file or of all parts of a split."""

    count: int = 0
    elements: int = 0
    bytes: int = 0
    elements_by_type: dict[int, int] = field(default_factory=dict)

    def add(self, other: Tensors) -> None:
        self.count += other.count
        self.elements += other.elements
        self.bytes += other.bytes
        for kind, elements in other.elements_by_type.items():
            self.elements_by_type[kind] = self.elements_by_type.get(kind, 0) + elements


@dataclass(frozen=True, slots=True)
class Header:
    version: int
    big_endian: bool
    file_bytes: int
    pairs: dict[str, Value]
    vocabulary: int | None
    tensors: Tensors


def read_header(path: Path) -> Header:
    """Raises: UnreadableModel."""
    with opened(path) as (file, size):
        return _Reader(path, file, size).header()


class _Reader:
    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._at = 0
        self._end = min(size, MAX_HEADER_BYTES)
        self._order = "<"
        self._wide = True  # 64-bit counts and lengths: since version 2
        self._pairs: dict[str, Value] = {}
        self._vocabulary: int | None = None
        self._strings = 0  # in arrays so far

    def header(self) -> Header:
        if self._take(4) != MAGIC:
            raise self._wrong("not a GGUF file")
        version = self._version()
        tensor_count, pair_count = self._length(), self._length()
        if pair_count > MAX_PAIRS or tensor_count > MAX_TENSORS:
            raise self._wrong(f"claims {pair_count} key-value pairs and {tensor_count} tensors")
        for _ in range(pair_count):
            self._pair()
        tensors = self._tensors(tensor_count)
        return Header(version, self._order == ">", self._size, self._pairs, self._vocabulary, tensors)

    def _version(self) -> int:
        raw = self._take(4)
        version = int.from_bytes(raw, "little")
        if version & 0xFFFF == 0:  # llama.cpp's test for the other byte order
            self._order, version = ">", int.from_bytes(raw, "big")
        if version not in (1, 2, 3):
            raise self._wrong(f"GGUF version {version} is unknown")
        self._wide = version > 1
        return version

    def _pair(self) -> None:
        key = self._string(MAX_KEY_BYTES)
        kind = self._number("I")
        wanted = key in _KEYS or key.partition(".")[2] in _ARCHITECTURE_KEYS
        wanted = wanted and len(key) <= _MAX_KEPT_KEY and len(self._pairs) < _MAX_KEPT_PAIRS
        if kind == _ARRAY:
            self._array(key, wanted)
        elif kind == _STRING:
            self._text(key, wanted)
        elif kind in _NUMBERS:
            value = self._number(_NUMBERS[kind])
            if wanted:
                self._pairs[key] = value
        else:
            raise self._wrong(f"value type {kind} is unknown")

    def _text(self, key: str, wanted: bool) -> None:
        length = self._length()
        if length > MAX_STRING_BYTES:
            raise self._wrong(f"a string of {length} bytes")
        if wanted and length <= _MAX_KEPT_BYTES:
            self._pairs[key] = self._take(length).decode("utf-8", "replace")
        else:
            self._skip(length)
            if wanted:
                self._pairs[key] = "..."

    def _array(self, key: str, wanted: bool) -> None:
        kind, length = self._number("I"), self._length()
        if key == _COUNTED:
            self._vocabulary = length
        if kind == _STRING:
            self._skip_strings(length)
        elif kind not in _NUMBERS:
            raise self._wrong(f"an array of type {kind}")
        elif wanted and length <= MAX_LAYERS:
            items = self._take(length * _SIZES[kind])
            self._pairs[key] = struct.unpack(f"{self._order}{length}{_NUMBERS[kind]}", items)
        else:
            self._skip(length * _SIZES[kind])

    def _skip_strings(self, count: int) -> None:
        self._strings += count
        if self._strings > MAX_ARRAY_STRINGS:
            raise self._wrong(f"arrays of {self._strings} strings")
        for _ in range(count):
            self._skip(self._length())

    def _tensors(self, count: int) -> Tensors:
        total, end = Tensors(), 0
        for _ in range(count):
            self._skip(self._length())  # its name
            end = max(end, self._tensor(total))
        start = self._data_start()
        if count and start + end > self._size:
            raise self._wrong(f"cut off: tensors end at byte {start + end}, the file at {self._size}")
        return total

    def _tensor(self, total: Tensors) -> int:
        """Adds one tensor and returns where it ends, in bytes from the start of the data."""
        dimensions = self._number("I")
        if dimensions > _MAX_DIMENSIONS:
            raise self._wrong(f"a tensor of {dimensions} dimensions")
        elements = row = 1
        for index in range(dimensions):
            length = self._length()
            row = length if index == 0 else row
            elements *= length
            if elements > _MAX_ELEMENTS:
                raise self._wrong("a tensor too large for any memory")
        kind, offset = self._number("I"), self._number("Q")
        size = self._tensor_bytes(kind, elements, row)
        total.count += 1
        total.elements += elements
        total.bytes += size
        total.elements_by_type[kind] = total.elements_by_type.get(kind, 0) + elements
        return int(offset) + size

    def _tensor_bytes(self, kind: int, elements: int, row: int) -> int:
        known = TENSOR_TYPES.get(kind)
        if known is None:
            raise self._wrong(f"tensor type {kind} is unknown")
        if row % known.block:
            raise self._wrong(f"a row of {row} weights does not divide into blocks of {known.name}")
        return elements // known.block * known.bytes

    def _data_start(self) -> int:
        alignment = self._pairs.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self._wrong(f"general.alignment is {alignment!r}")
        return -(-self._at // alignment) * alignment

    def _string(self, longest: int) -> str:
        length = self._length()
        if length > longest:
            raise self._wrong(f"a key of {length} bytes")
        return self._take(length).decode("utf-8", "replace")

    def _length(self) -> int:
        return int(self._number("Q" if self._wide else "I"))

    def _number(self, code: str) -> int:
        # An int for every place that does arithmetic with it; float and bool only ever land in `pairs`.
        code = self._order + code
        value: int = struct.unpack(code, self._take(struct.calcsize(code)))[0]
        return value

    def _take(self, length: int) -> bytes:
        self._advance(length)
        data = self._file.read(length)
        if len(data) != length:
            raise self._wrong("shrank while being read")
        return data

    def _skip(self, length: int) -> None:
        self._advance(length)
        self._file.seek(length, 1)

    def _advance(self, length: int) -> None:
        self._at += length
        if self._at > self._end:
            large = self._size > MAX_HEADER_BYTES
            raise self._wrong(f"header larger than {MAX_HEADER_BYTES >> 20} MiB" if large else "cut off in its header")

    def _wrong(self, reason: str) -> UnreadableModel:
        return UnreadableModel(self._path, reason)
