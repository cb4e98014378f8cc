"""What goes over the pipe to the child: three lengths, then a header as JSON, what was asked, what was answered."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final

import orjson

_LENGTHS: Final = struct.Struct("!IQQ")  # header, asked, answered


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of a request without looking into it. Sizes in bytes, time in Unix seconds."""

    mode: str  # masked or full
    limit: int  # of each of the two
    style: str  # json or text
    time: float
    request_id: str
    operation: str
    status: int
    tenant: str
    key: str | None
    model: str
    stream: bool
    aborted: bool  # the client has not got all of the answer
    error: str | None
    asked_type: str  # media type; a form's fields come as JSON
    asked_size: int
    answered_type: str
    answered_size: int
    answered_kept: int  # of that, what comes along


@dataclass(frozen=True, slots=True)
class Frame:
    header: Header
    asked: bytes
    answered: bytes


def buffers(header: Header, asked: bytes, answered: Sequence[bytes]) -> list[bytes]:
    """A frame in pieces, for a write that gathers them."""
    head = orjson.dumps(header)
    return [_LENGTHS.pack(len(head), len(asked), sum(map(len, answered))), head, asked, *answered]


def read_frame(source: BinaryIO) -> Frame | None:
    """The next frame; None at the end, and when the end comes in the middle of one."""
    lengths = source.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    sizes = _LENGTHS.unpack(lengths)
    parts = [source.read(size) for size in sizes]
    if any(len(part) < size for part, size in zip(parts, sizes, strict=True)):
        return None
    return Frame(Header(**orjson.loads(parts[0])), parts[1], parts[2])
