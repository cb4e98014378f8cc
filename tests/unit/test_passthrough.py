"""Answers that pass as they came: which, under what name, and how they are put on the wire."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import UpstreamBroken
from gateway.outcome import Outcome
from gateway.passthrough import Passing, is_whole, media_type, read_document


class Reply:
    def __init__(self, kind: bytes | None, **headers: bytes) -> None:
        self.headers = {name.replace("_", "-").encode(): value for name, value in headers.items()}
        if kind is not None:
            self.headers[b"content-type"] = kind


class Cycle:
    """What is written to a client."""

    def __init__(self) -> None:
        self.started, self.begun, self.out = False, (), b""

    def begin_raw(self, content_type: bytes, length: int | None, *, events: bool) -> None:
        self.started, self.begun = True, (content_type, length, events)

    def received(self, data: bytes) -> None:
        self.out += data

    def end(self) -> None:
        self.out += b"<end>"


def passing(reply: Reply, kind: str) -> tuple[Any, Cycle]:
    cycle: Any = Cycle()
    given: Any = reply
    return Passing(cycle, Outcome("speech", "r", 0.0), given, kind), cycle


@pytest.mark.parametrize(
    ("given", "kind", "whole"),
    [
        (b"application/json", "application/json", True),
        (b"Application/JSON; charset=utf-8", "application/json", True),
        (b"text/plain;charset=utf-8", "text/plain", True),
        (b"text/vtt", "text/vtt", True),
        (b"application/x-subrip", "application/x-subrip", True),
        (b"audio/mpeg", "audio/mpeg", False),
        (b"audio/L16; rate=24000", "audio/l16", False),
        (b"application/octet-stream", "application/octet-stream", False),
        (b"text/event-stream; charset=utf-8", "text/event-stream", False),
    ],
)
def test_types_that_pass(given: bytes, kind: str, whole: bool) -> None:
    reply: Any = Reply(given)
    assert media_type(reply) == kind and is_whole(kind) is whole


@pytest.mark.parametrize(
    "given", [None, b"", b"text/html", b"image/png", b"video/mp4", b"xaudio/wav", b"audio/\xff", b"audio/" + b"a" * 300]
)
def test_types_that_do_not(given: bytes | None) -> None:
    reply: Any = Reply(given)
    with pytest.raises(UpstreamBroken):
        media_type(reply)


def test_documents() -> None:
    same = b'{ "text": "a",  "n": 1.0 }'
    assert read_document(same, "m") == (same, None)
    assert read_document(b'{"text":"a", "model":"engine"}', "m") == (b'{"text":"a", "model":"m"}', None)
    assert read_document(b'"text"', "m") == (b'"text"', None)
    assert read_document(b'{"error":{"message":"no"}}', "m")[1] is not None
    with pytest.raises(UpstreamBroken):
        read_document(b"text", "m")


@pytest.mark.parametrize(
    ("headers", "length"),
    [
        ({"content_length": b"5"}, 5),
        ({}, None),
        ({"content_length": b"5", "content_encoding": b"gzip"}, None),  # the length of something else
        ({"transfer_encoding": b"chunked"}, None),
    ],
)
def test_the_head_waits_for_the_first_byte(headers: dict[str, bytes], length: int | None) -> None:
    sink, cycle = passing(Reply(b"audio/wav", **headers), "audio/wav")
    assert not cycle.started
    sink.received(b"ab")
    sink.received(b"data:")
    sink.ended()
    assert cycle.begun == (b"audio/wav", length, False) and cycle.out == b"abdata:<end>" and sink.events == 0


def test_an_empty_answer_has_a_head() -> None:
    sink, cycle = passing(Reply(b"audio/wav", content_length=b"0"), "audio/wav")
    sink.ended()
    assert cycle.begun == (b"audio/wav", 0, False) and cycle.out == b"<end>"


@pytest.mark.parametrize("size", range(1, 12))
def test_events_are_counted_however_they_are_cut(size: int) -> None:
    stream = b'data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n\n'
    sink, cycle = passing(Reply(b"text/event-stream"), "text/event-stream")
    for place in range(0, len(stream), size):
        sink.received(stream[place : place + size])
    sink.finish_event()
    assert sink.events == 3 and cycle.out == stream


def test_a_broken_event_is_closed() -> None:
    sink, cycle = passing(Reply(b"text/event-stream"), "text/event-stream")
    sink.finish_event()
    assert cycle.out == b""  # nothing was sent: there is nothing to close
    sink.received(b'data: {"a')
    sink.finish_event()
    assert cycle.out == b'data: {"a\n\n'
