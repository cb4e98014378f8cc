"""Content records without processes: framing, streams put together, what is shown, and failures."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.content import record
from gateway.content.answered import answered
from gateway.content.asked import asked
from gateway.content.frames import Frame, Header, buffers, read_frame
from gateway.content.shown import Shown
from gateway.logs import AccessLog

HEADER = Header(
    mode="masked", limit=65536, style="json", time=1.5, request_id="req_1", operation="chat", status=200, tenant="t",
    key="k", model="m", stream=False, aborted=False, error=None, asked_type="application/json", asked_size=2,
    answered_type="application/json", answered_size=2, answered_kept=2,
)  # fmt: skip
SECRET = "taro@example.jp"


def frame(body: Any, answer: Any = None, **more: Any) -> Frame:
    data = answer if isinstance(answer, bytes) else json.dumps(answer or {"choices": []}).encode()
    header = replace(HEADER, answered_size=len(data), answered_kept=len(data), **more)
    return Frame(header, json.dumps(body).encode(), data)


def written(one: Frame) -> dict[str, Any]:
    text, _ = record.line(one)
    assert text.count(b"\n") == 1
    found: dict[str, Any] = json.loads(text)
    return found


# --- frames
PARTS = st.tuples(st.binary(max_size=50), st.lists(st.binary(max_size=20), max_size=5))


@given(st.lists(PARTS, max_size=4), st.integers(0, 60))
def test_frames_come_back_and_a_cut_one_is_none(parts: list[tuple[bytes, list[bytes]]], lost: int) -> None:
    data = b"".join(b"".join(buffers(HEADER, one, many)) for one, many in parts)
    source = io.BytesIO(data)
    for one, many in parts:
        assert read_frame(source) == Frame(HEADER, one, b"".join(many))
    assert read_frame(source) is None
    cut = io.BytesIO(data[: max(0, len(data) - lost - 1)])
    whole = list(iter(lambda: read_frame(cut), None))
    assert whole == [Frame(HEADER, one, b"".join(many)) for one, many in parts][: len(whole)]
    assert len(whole) < len(parts) or not parts


# --- failures
def test_what_cannot_be_masked_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise ValueError(f"cannot mask {SECRET}")

    monkeypatch.setattr("gateway.content.shown.mask", broken)
    text, whole = record.line(frame({"messages": [{"role": "user", "content": SECRET}]}))
    assert not whole
    found = json.loads(text)
    assert found["not_written"] == "reading or masking it failed (ValueError)"
    assert SECRET not in text.decode()
    assert not {"asked", "answered"} & found.keys()


def test_hostile_bodies_make_a_record_all_the_same() -> None:
    for body in (
        {}, {"messages": "x"},
        {"messages": [None, 1, {"content": 5}, {"tool_calls": "x", "content": [None, {"type": 3}]}]},
        {"tools": [None, {"function": None}, {"function": {"name": 7}}], "prompt": [[1, 2], "a", {"b": 1}]},
        {"messages": [{"content": [{"type": "image_url", "image_url": None}, {"type": "file", "file": 5}]}]},
        {"input": {"a": {"b": 1}}, "documents": [1, {"text": "d"}]},
    ):  # fmt: skip
        for answer in ({}, [], {"choices": 5}, {"choices": [None, {"message": [], "index": "x"}]}, b"\xff", b""):
            found = written(frame(body, answer))
            assert "not_written" not in found, (body, answer, found)


# --- streams
EVENTS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 1, "delta": {"content": "other"}}]},
    {"choices": [{"index": 0, "delta": {"content": "Hel"}}, {"index": 1, "delta": {"content": " one"}}]},
    {"choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 1}},
    {"error": {"message": "x"}},
]


def test_choices_of_a_stream_are_kept_apart() -> None:
    events = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in EVENTS)
    body = b": comment\n\n" + events + b"data: [DONE]\n\n"
    found = answered("chat", "text/event-stream", body, len(body), Shown(1000, None))
    assert found == {
        "choices": [
            {"index": 0, "content": "Hello", "finish_reason": "length"},
            {"index": 1, "content": "other one"},
        ]
    }


@given(st.integers(0, 400))
def test_a_stream_may_stop_anywhere(size: int) -> None:
    body = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in EVENTS)[:size]
    found = answered("chat", "text/event-stream", body, 5000, Shown(1000, None))
    text = next((choice["content"] for choice in found["choices"] if choice["index"] == 0 and "content" in choice), "")
    assert "Hello".startswith(text)


def test_texts_of_completions_and_transcriptions() -> None:
    events = [
        {"choices": [{"index": 0, "text": "a"}]},
        {"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]},
    ]
    body = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
    found = answered("completions", "text/event-stream", body, 9, Shown(99, None))
    assert found == {"choices": [{"index": 0, "text": "ab", "finish_reason": "stop"}]}
    events = [{"type": "transcript.text.delta", "delta": piece} for piece in ("a", "b")]
    body = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
    assert answered("transcriptions", "text/event-stream", body, 9, Shown(99, None)) == {"text": "ab"}
    assert answered("transcriptions", "text/vtt", b"WEBVTT", 6, Shown(99, None)) == {"text": "WEBVTT"}
    assert answered("speech", "audio/mpeg", b"", 77, Shown(99, None)) == {"media": "audio/mpeg", "bytes": 77}


# --- what is shown
@given(st.lists(st.text(max_size=30), max_size=8), st.integers(0, 60))
def test_shown_and_left_out_are_all_there_is(texts: list[str], limit: int) -> None:
    shown = Shown(limit, None)
    size = sum(len(shown.text(text).encode()) for text in texts)
    assert size <= limit
    assert size + shown.left_out == sum(len(text.encode()) for text in texts)


def test_empty_messages_have_an_end_too() -> None:
    shown = Shown(1600, None)
    found = asked({"messages": [{"role": "", "content": ""}] * 100_000 + [{"content": "last"}]}, shown)
    assert len(found["messages"]) <= 101
    assert shown.left_out >= 4


def test_media_and_tokens() -> None:
    body = {
        "messages": [{"role": "user", "content": [
            {"type": "input_audio", "input_audio": {"data": "QUJD" * 4, "format": "wav"}},
            {"type": "image_url", "image_url": {"url": "https://example.com/a.png?sig=secret"}},
            {"type": "file", "file": {"file_data": "data:application/pdf;base64,QUJD", "filename": "taxes.pdf"}},
        ]}],
        "input": [[1, 2, 3], [4]],
    }  # fmt: skip
    found = asked(body, Shown(1000, None))
    assert found["messages"][0]["content"] == [
        {"type": "input_audio", "media": "input_audio", "bytes": 12},
        {"type": "image_url", "media": "link"},
        {"type": "file", "media": "application/pdf", "bytes": 3},
    ]
    assert found["input"] == [{"tokens": 3}, {"tokens": 1}]


def test_roles_and_names_are_masked_too() -> None:
    body = {"messages": [{"role": SECRET, "name": SECRET, "content": "x"}], "tools": [{"function": {"name": SECRET}}]}
    counts: Counter[str] = Counter()
    text = json.dumps(asked(body, Shown(1000, counts)))
    assert SECRET not in text
    assert counts["EMAIL"] == 3


def test_a_form_says_its_fields_and_the_size_of_its_file() -> None:
    one = frame({"model": "m", "prompt": f"by {SECRET}"}, {"text": "hi"}, operation="transcriptions",
                asked_type="multipart/form-data", asked_size=1234)  # fmt: skip
    found = written(one)
    assert found["asked"] == {"prompt": "by [EMAIL]", "file": {"media": "multipart/form-data", "bytes": 1234}}
    assert found["answered"] == {"text": "hi"}


def test_what_was_not_kept_is_counted() -> None:
    one = frame({"messages": []}, b"data: {", answered_type="text/event-stream")
    one = replace(one, header=replace(one.header, answered_size=1000))
    assert written(one)["answered_unread"] == 1000 - 7


# --- the way into the log
def test_lines_of_others_are_written_whole_or_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BytesIO()
    log = AccessLog("json", stream)
    assert log.write(b"one\ntwo\n", 2)
    monkeypatch.setattr("gateway.logs._MOST_BYTES", 10)
    assert not log.write(b"x" * 11 + b"\n", 1)
    log.close()
    assert stream.getvalue() == b"one\ntwo\n"
    assert log.dropped == 1
