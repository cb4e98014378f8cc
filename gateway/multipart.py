"""Forms with files (multipart/form-data), by offsets into the bytes as they came.

Only what every parser reads in the same way is taken: who may use which model depends on one part, and a form that the
engine's parser reads differently would get round it. Files are never looked into.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway.errors import BadRequest, InvalidBody

MOST_PARTS = 128
LARGEST_HEAD = 4096  # bytes of one part's header lines
MOST_HEADERS = 8

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PARAMETER = re.compile(rb"[ \t]*;[ \t]*(" + _TOKEN + rb")=(?:\"([^\"\\\r\n]*)\"|(" + _TOKEN + rb"))")
_FORM = re.compile(rb"[ \t]*multipart/form-data", re.IGNORECASE)
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_HEADER = re.compile(rb"(" + _TOKEN + rb"):[ \t]*([^\r\n\0]*)")
_FORM_DATA = re.compile(rb"form-data", re.IGNORECASE)
_IN_FILE_NAMES = re.compile(rb"\\[\"\\]")  # some clients escape these two; they say nothing about the field


class Part(NamedTuple):
    """One field. `start` and `end` are offsets of its value."""

    name: str
    is_file: bool
    encoded: bool  # a transfer encoding stands between the bytes and their meaning
    start: int
    end: int


def boundary_of(content_type: bytes | None) -> bytes:
    """Raises: BadRequest for anything but a form with one plain boundary."""
    found = _FORM.match(content_type or b"")
    parameters = _parameters(content_type[found.end() :]) if found and content_type else None
    if parameters is None or not {b"boundary"} <= parameters.keys() <= {b"boundary", b"charset"}:
        raise BadRequest("The body has to be multipart/form-data with a boundary.", code="invalid_content_type")
    if parameters.get(b"charset", b"utf-8").lower() != b"utf-8":  # names would be read in it, by some
        raise BadRequest("A form's charset has to be UTF-8.", code="invalid_content_type")
    if not _BOUNDARY.fullmatch(parameters[b"boundary"]):
        raise BadRequest("The form's boundary has characters it may not have.", code="invalid_content_type")
    return parameters[b"boundary"]


def parts_of(raw: bytes, boundary: bytes) -> list[Part]:
    """Raises: InvalidBody."""
    delimiter = b"\r\n--" + boundary
    opening = delimiter[2:]
    if not raw.startswith(opening):
        raise InvalidBody("The form does not begin with its boundary.")
    parts: list[Part] = []
    place = len(opening)
    while not raw.startswith(b"--", place):
        if not raw.startswith(b"\r\n", place):
            raise InvalidBody("The form's boundary is followed by something other than a new line.")
        if len(parts) == MOST_PARTS:
            raise InvalidBody(f"The form has more than {MOST_PARTS} parts.")
        head_end = raw.find(b"\r\n\r\n", place, place + LARGEST_HEAD)
        if head_end < 0:
            raise InvalidBody("A part of the form has no header, or one that is too large.")
        start = head_end + 4
        end = raw.find(delimiter, start)
        if end < 0:
            raise InvalidBody("The form has no end.")
        parts.append(_part(raw[place + 2 : head_end], start, end))
        place = end + len(delimiter)
    if raw[place + 2 :] not in (b"", b"\r\n"):
        raise InvalidBody("Something follows the end of the form.")
    if raw.count(opening) != len(parts) + 1:  # where some parsers would see one more part
        raise InvalidBody("The form's boundary occurs inside a part.")
    return parts


def _part(head: bytes, start: int, end: int) -> Part:
    headers: dict[bytes, bytes] = {}
    lines = head.split(b"\r\n")
    if len(lines) > MOST_HEADERS:
        raise InvalidBody("A part of the form has too many headers.")
    for line in lines:
        found = _HEADER.fullmatch(line)
        if found is None or found[1].lower() in headers:
            raise InvalidBody("A part of the form has a header that is not valid, or the same one twice.")
        headers[found[1].lower()] = found[2]
    disposition = headers.get(b"content-disposition", b"")
    kind = _FORM_DATA.match(disposition)
    parameters = _parameters(_IN_FILE_NAMES.sub(b"_", disposition[kind.end() :])) if kind else None
    # An escape in the name itself would be undone by some parsers and kept by others.
    if parameters is None or b"name" not in parameters or not _is_plain(disposition, parameters):
        raise InvalidBody("A part of the form has no Content-Disposition with one plain name.")
    try:
        name = parameters[b"name"].decode()
    except UnicodeDecodeError:
        raise InvalidBody("A part of the form has a name that is not UTF-8.") from None
    encoding = headers.get(b"content-transfer-encoding", b"binary").strip().lower()
    return Part(
        name,
        is_file=not parameters.keys().isdisjoint({b"filename", b"filename*"}),
        encoded=encoding not in (b"7bit", b"8bit", b"binary"),
        start=start,
        end=end,
    )


def _is_plain(disposition: bytes, parameters: dict[bytes, bytes]) -> bool:
    name = parameters[b"name"]
    written = b'"%b"' % name in disposition or b"=%b" % name in disposition
    return written and all(b"*" not in key or key == b"filename*" for key in parameters)


def _parameters(text: bytes) -> dict[bytes, bytes] | None:
    """`; name=value` as often as it comes; None for anything else, and for the same name twice."""
    found: dict[bytes, bytes] = {}
    place = 0
    while place < len(text.rstrip(b" \t")):
        match = _PARAMETER.match(text, place)
        if match is None or match[1].lower() in found:
            return None
        quoted: bytes | None = match[2]
        found[match[1].lower()] = match[3] if quoted is None else quoted
        place = match.end()
    return found
