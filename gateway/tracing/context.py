"""W3C Trace Context: which trace a client says its request belongs to.

Grammar: https://www.w3.org/TR/trace-context-2/. What does not follow it is treated as if it had not been sent, so that
nothing but these two well-formed values ever gets from a client's head into an engine's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

SAMPLED = 0x01
RANDOM = 0x02  # the trace id was chosen at random
MOST_MEMBERS = 32  # of a tracestate
LONGEST_STATE = 8192  # bytes; the standard demands 512 to be passed on

# A version 00 is 55 bytes long; later ones may say more behind the flags; ff is none.
_PARENT = re.compile(
    rb"(?:00(?=.{53}\Z)|(?!00|ff)[0-9a-f]{2})"
    rb"-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-[\x21-\x7e]{0,256})?"
)
_MEMBER = re.compile(
    rb"[a-z0-9][a-z0-9_\-*/@]{0,255}"
    rb"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)


class Parent(NamedTuple):
    """The caller's span. Ids in lower-case hexadecimal digits."""

    trace_id: str  # 32
    span_id: str  # 16
    flags: int


def read_parent(headers: Mapping[bytes, bytes]) -> Parent | None:
    """The caller's span; None where `traceparent` is missing or not valid. Header names in lower case."""
    value = headers.get(b"traceparent", b"").strip(b" \t")
    found = _PARENT.fullmatch(value)
    if found is None:
        return None
    return Parent(found[1].decode(), found[2].decode(), int(found[3], 16))


def read_state(headers: Mapping[bytes, bytes]) -> bytes:
    """The `tracestate` of a request whose `traceparent` is valid; empty where it is missing or not valid itself."""
    value = headers.get(b"tracestate", b"").strip(b" \t")
    if not value or len(value) > LONGEST_STATE:
        return b""
    members = [member for part in value.split(b",") if (member := part.strip(b" \t"))]
    if not members or len(members) > MOST_MEMBERS or not all(map(_MEMBER.fullmatch, members)):
        return b""
    return b",".join(members)


def passed_on(headers: Mapping[bytes, bytes]) -> bytes:
    """Header lines for an engine while the gateway makes no spans: the client's own, as far as they are valid."""
    if read_parent(headers) is None:
        return b""
    return header_lines(headers[b"traceparent"].strip(b" \t"), read_state(headers))


def header_lines(parent: bytes, state: bytes) -> bytes:
    lines = b"traceparent: %b\r\n" % parent
    return b"%btracestate: %b\r\n" % (lines, state) if state else lines
