"""Streams from the engine's socket to the client's: framing, fidelity, usage, breaks, time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.doubles.dialects import DIALECTS, NAMED, UPSTREAM_MODEL, USAGE, Dialect, compact
from tests.doubles.engine import Exchange, at, by_bytes
from tests.e2e.harness import Lab, chat, eventually, replica
from tests.e2e.wire import parse

VLLM = DIALECTS["vllm"]
TEXT = "naïve 🎭 漢字, said: [\"data: x\\n\\n\"] \u2028 end"
PIECES = (TEXT[:7], TEXT[7:20], TEXT[20:])
BOOKED = (USAGE["prompt_tokens"], USAGE["completion_tokens"])


def whole(lab: Lab, body: bytes, cut: Callable[[bytes], Any] | None = None) -> Any:
    lab.one("vllm", lambda x: x.raw_stream(body, cut))
    return lab.stream()


# --- framing
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "cut", [None, by_bytes(1), by_bytes(7), by_bytes(997)], ids=["glued", "single bytes", "sevens", "large"]
)
def test_any_slicing_of_any_engines_stream_gives_the_same_events_and_usage(
    lab: Lab, dialect: str, cut: Callable[[bytes], Any] | None
) -> None:
    """An event split across reads, and several in one read."""
    manners = DIALECTS[dialect]
    body = manners.stream(PIECES, usage=USAGE)
    lab.one(dialect, lambda x: x.raw_stream(body, cut))
    answer = lab.stream(stream_options={"include_usage": True})
    sent = manners.chunks(PIECES, usage=USAGE)
    assert answer.chunks_json() == [chunk | {"model": "m"} for chunk in sent]
    assert answer.text() == TEXT and answer.finishes() == ["stop"] and answer.ended_well()
    assert lab.booked(*BOOKED)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_text_whose_bytes_straddle_a_boundary_arrives_whole(lab: Lab, offset: int) -> None:
    body = VLLM.stream(PIECES, usage=USAGE)
    answer = whole(lab, body, at(body.index("🎭".encode()) + offset))
    assert answer.text() == TEXT and "\ufffd" not in answer.body.decode()


def test_events_cut_in_the_middle_of_a_json_string_then_three_in_one_write(lab: Lab) -> None:
    frames = [VLLM.frame(chunk) for chunk in VLLM.chunks([f"piece {n} " for n in range(9)])]
    body = b"".join(frames) + VLLM.frame(b"[DONE]")
    cuts, place = [], 0
    for number, frame in enumerate(frames):
        if number < 5:
            cuts.append(place + frame.index(b"piece") + 2 if b"piece" in frame else place + 9)
        place += len(frame)
    answer = whole(lab, body, at(*cuts))
    assert answer.text() == "".join(f"piece {n} " for n in range(9)) and answer.ended_well()


def plain(chunks: list[dict[str, Any]], make: Callable[[bytes], bytes]) -> bytes:
    return b"".join(make(compact(chunk)) for chunk in chunks) + make(b"[DONE]")


LEGAL_FORMS: dict[str, Callable[[bytes], bytes]] = {
    "LF": lambda data: b"data: " + data + b"\n\n",
    "CRLF": lambda data: b"data: " + data + b"\r\n\r\n",
    "CR": lambda data: b"data: " + data + b"\r\r",
    "no space": lambda data: b"data:" + data + b"\n\n",
    "event line": lambda data: b"event: message\ndata: " + data + b"\n\n",
    "id line": lambda data: b"id: 12\ndata: " + data + b"\n\n",
    "comment above": lambda data: b": note\ndata: " + data + b"\n\n",
    "blank lines": lambda data: b"\n\ndata: " + data + b"\n\n\n",
    "mixed ends": lambda data: b"event: message\r\ndata: " + data + b"\n\r\n",
}


@pytest.mark.parametrize("form", LEGAL_FORMS)
@pytest.mark.parametrize("cut", [None, by_bytes(1), by_bytes(64)], ids=["glued", "single bytes", "64"])
def test_every_legal_form_of_an_event_stream_is_read_alike(
    lab: Lab, form: str, cut: Callable[[bytes], Any] | None
) -> None:
    chunks = VLLM.chunks(['x": ["', " tail"], usage=USAGE)
    answer = whole(lab, plain(chunks, LEGAL_FORMS[form]), cut)
    assert answer.text() == 'x": [" tail' and answer.finishes() == ["stop"] and answer.ended_well()
    assert {chunk["model"] for chunk in answer.chunks_json()} == {"m"}
    assert lab.booked(*BOOKED)


def test_line_end_cut_between_its_two_characters(lab: Lab) -> None:
    body = plain(VLLM.chunks(["a", "b"], usage=USAGE), LEGAL_FORMS["CRLF"])
    places = [place + 1 for place in range(len(body)) if body[place : place + 2] == b"\r\n"]
    answer = whole(lab, body, at(*places))
    assert answer.text() == "ab" and answer.ended_well() and lab.booked(*BOOKED)


def test_one_object_over_several_data_lines(lab: Lab) -> None:
    def split(data: bytes) -> bytes:
        lines = json.dumps(json.loads(data), indent=1).encode() if data != b"[DONE]" else data
        return b"".join(b"data: " + line + b"\n" for line in lines.split(b"\n")) + b"\n"

    answer = whole(lab, plain(VLLM.chunks(["a", "b"], usage=USAGE), split))
    assert answer.text() == "ab" and answer.ended_well()


def test_comments_and_empty_events_of_the_engine_do_no_harm(lab: Lab) -> None:
    """Nothing that leaves the gateway makes a conforming client dispatch an event without data."""

    def odd(x: Exchange) -> None:
        x.begin()
        for noise in (b": ping\n\n", b"id: 4\n\n", b"retry: 3000\n\n", b"data:\n\n", b"data: \n\n", b"event: x\n\n"):
            x.part(noise)
            x.delta("a")
        x.delta({}, "stop")
        x.done()

    lab.one(script=odd)
    answer = lab.stream()
    found = parse(answer.body)
    assert answer.text() == "aaaaaa" and answer.ended_well()
    assert all(event.data for event in found.events) and not found.fields & {"id", "retry"}
    assert lab.tokens("completion") == 6  # comments are no tokens


# --- a long prefill
def test_comments_bridge_a_silent_prefill(lab: Lab) -> None:
    """From the moment the wait starts, before the engine has said anything at all."""
    go = threading.Event()

    def silent(x: Exchange) -> None:
        x.wait(go)
        x.stream()

    engine = lab.engine(script=silent)
    lab.serve({"m": [replica(engine)]}, server={"keepalive_interval": "300ms"})
    with lab.gateway.wire() as wire:
        answer = wire.ask("POST", "/v1/chat/completions", chat(stream=True), key=lab.key)
        while len(parse(answer.body).comments) < 3:
            assert answer.more()
        assert answer.status == 200 and not answer.events()
        go.set()
        answer.rest()
    assert answer.text() == "Hello, world" and answer.ended_well()
    assert not parse(answer.body).fields & {"id", "retry", "event"}


def test_engine_error_after_a_comment_arrives_inside_the_stream(lab: Lab) -> None:
    go = threading.Event()

    def late(x: Exchange) -> None:
        x.wait(go)
        x.fail("temperature must be non-negative", 400)

    engine = lab.engine(script=late)
    lab.serve({"m": [replica(engine)]}, server={"keepalive_interval": "300ms"})
    with lab.gateway.wire() as wire:
        answer = wire.ask("POST", "/v1/chat/completions", chat(stream=True), key=lab.key)
        assert answer.more()
        go.set()
        answer.rest()
    (error,) = answer.stream_errors()
    assert answer.status == 200 and answer.complete and "[DONE]" not in answer.events()
    assert error["type"] == "invalid_request_error" and "temperature" in error["message"]
    assert eventually(lambda: lab.answered(400) == 1)


def test_without_comments_the_engines_status_survives_a_wait(lab: Lab) -> None:
    def late(x: Exchange) -> None:
        x.pause(1.0)
        x.fail("temperature must be non-negative", 400)

    engine = lab.engine(script=late)
    lab.serve({"m": [replica(engine)]}, server={"keepalive_interval": "0s"})
    answer = lab.stream()
    assert answer.status == 400 and answer.error()["code"] == "invalid_value"


def test_no_comment_is_sent_for_an_answer_that_is_not_a_stream(lab: Lab) -> None:
    engine = lab.engine(script=lambda x: (x.pause(1.0), x.reply(x.dialect.completion()))[0])
    lab.serve({"m": [replica(engine)]}, server={"keepalive_interval": "200ms"})
    answer = lab.chat()
    assert answer.status == 200 and answer.json()["choices"]


# --- usage
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("options", "shown"),
    [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": None}, False),
     ({"include_usage": True}, True)],
    ids=["absent", "empty", "false", "null", "true"],
)  # fmt: skip
def test_the_usage_chunk_is_for_those_who_ask_and_is_booked_for_all(
    lab: Lab, dialect: str, options: Any, shown: bool
) -> None:
    engine = lab.one(dialect)
    answer = lab.stream(**({} if options is None else {"stream_options": options}))
    assert engine.last().json()["stream_options"]["include_usage"] is True
    empty = [chunk for chunk in answer.chunks_json() if chunk["choices"] == []]
    separate = DIALECTS[dialect].finish != "with_usage"
    assert len(empty) == (1 if shown and separate else 0)
    assert answer.text() == "Hello, world" and answer.ended_well()
    if shown and separate:
        assert answer.chunks_json()[-1] == empty[0] and empty[0]["usage"] == USAGE
    assert lab.booked(*BOOKED)


def test_explicit_null_stream_options_count_as_none(lab: Lab) -> None:
    lab.one()
    answer = lab.stream(stream_options=None)
    assert all(chunk["choices"] for chunk in answer.chunks_json()) and lab.booked(*BOOKED)


def test_an_early_chunk_without_choices_neither_ends_nor_breaks_the_stream(lab: Lab) -> None:
    def early(x: Exchange) -> None:
        x.begin()
        x.event({"id": "", "object": "", "created": 0, "model": "", "choices": [], "prompt_filter_results": []})
        x.delta("text")
        x.delta({}, "stop")
        x.done()

    lab.one(script=early)
    answer = lab.stream()
    assert answer.text() == "text" and answer.ended_well()


def test_running_usage_on_every_chunk_is_booked_once(lab: Lab) -> None:
    def running(x: Exchange) -> None:
        x.begin()
        for number in range(1, 6):
            x.delta("x", usage={"prompt_tokens": 11, "completion_tokens": number, "total_tokens": 11 + number})
        x.delta({}, "stop", usage=USAGE)
        x.done()

    lab.one(script=running)
    assert lab.stream().text() == "xxxxx" and lab.booked(*BOOKED)


def test_cached_and_reasoning_tokens_are_recorded(lab: Lab) -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 8}, "completion_tokens_details": {"reasoning_tokens": 3}}
    usage = USAGE | details
    lab.one(script=lambda x: x.stream(usage=usage))
    answer = lab.stream()
    line = lab.gateway.access_line(answer.header("x-request-id") or "")
    assert (line["cached_tokens"], line["reasoning_tokens"], line["usage"]) == (8, 3, "engine")
    assert lab.tokens("cached") == 8


def test_an_engine_that_never_reports_usage_is_booked_by_estimate(lab: Lab) -> None:
    lab.one(script=lambda x: x.raw_stream(x.dialect.stream(["a"] * 40)))
    answer = lab.stream()
    line = lab.gateway.access_line(answer.header("x-request-id") or "")
    assert line["usage"] == "estimate" and line["completion_tokens"] == 40 and line["prompt_tokens"] > 0
    assert lab.tokens("completion") == 40


# --- fidelity
def test_one_chunk_stays_one_chunk_with_text_and_finish_together(lab: Lab) -> None:
    def script(x: Exchange) -> None:
        x.begin()
        x.delta({"role": "assistant"})
        x.delta("one")
        x.delta("two", "length")
        x.done()

    lab.one(script=script)
    answer = lab.stream()
    choices = list(answer.choices())
    assert [choice["delta"] for choice in choices] == [{"role": "assistant"}, {"content": "one"}, {"content": "two"}]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
    assert {chunk["id"] for chunk in answer.chunks_json()} == {"chatcmpl-7f3a"} and answer.ended_well()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_interleaved_choices_keep_their_index(lab: Lab, dialect: str) -> None:
    lab.one(dialect, lambda x: x.stream(["a", "b"], n=2))
    answer = lab.stream(n=2)
    assert (answer.text(0), answer.text(1)) == ("ab", "ab") and answer.finishes() == ["stop", "stop"]
    assert answer.ended_well()


@pytest.mark.parametrize("dialect", NAMED)
def test_logprobs_and_unknown_fields_of_a_chunk_pass(lab: Lab, dialect: str) -> None:
    entry = {"content": [{"token": "a", "logprob": -1e-7, "bytes": [97], "top_logprobs": []}]}

    def script(x: Exchange) -> None:
        x.begin()
        for text in "abc":
            chunk = x.dialect.chunk({"content": text})
            chunk["choices"][0] |= {"logprobs": entry, "token_ids": [1, 2]}
            x.event(chunk | {"timings": {"predicted_ms": 1.50}, "future": None})
        x.delta({}, "stop")
        x.done()

    lab.one(dialect, script)
    chunks = lab.stream(logprobs=True).chunks_json()[:3]
    assert all(chunk["choices"][0]["logprobs"] == entry and chunk["future"] is None for chunk in chunks)
    assert all(chunk["choices"][0]["token_ids"] == [1, 2] for chunk in chunks)
    assert all(chunk["timings"] == {"predicted_ms": 1.5} for chunk in chunks)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("dialect", NAMED)
def test_reasoning_reaches_the_client_under_the_engines_name(lab: Lab, dialect: str, name: str) -> None:
    usage = USAGE | {"completion_tokens_details": {"reasoning_tokens": 50}}
    pieces: list[Any] = [{name: f"step {number} "} for number in range(50)]
    lab.one(dialect, lambda x: x.stream([*pieces, "so"], usage=usage))
    answer = lab.stream()
    thoughts = [choice["delta"][name] for choice in answer.choices() if choice["delta"].get(name)]
    assert thoughts == [piece[name] for piece in pieces] and answer.text() == "so"
    line = lab.gateway.access_line(answer.header("x-request-id") or "")
    assert line["reasoning_tokens"] == 50 and "ttft_ms" in line


def test_first_token_time_is_taken_at_the_first_reasoning_chunk(lab: Lab) -> None:
    """The rest waits for a second: had the first token been noticed only then, it would show."""

    def script(x: Exchange) -> None:
        x.begin()
        x.role()
        x.delta({"reasoning": "hmm"})
        x.pause(1.5)
        x.delta("text", "stop")
        x.done()

    lab.one(script=script)
    line = lab.gateway.access_line(lab.stream().header("x-request-id") or "")
    assert line["ttft_ms"] < line["duration_ms"] - 1200


def test_reasoning_in_a_whole_answer_passes(lab: Lab) -> None:
    lab.one(script=lambda x: x.reply(x.dialect.completion("so", reasoning_content="because", reasoning="because")))
    message = lab.chat().json()["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "because"


@pytest.mark.parametrize(
    "deltas",
    [
        [{"tool_calls": [{"id": "a", "index": 0, "function": {"name": "f", "arguments": "{}"}}]},
         {"tool_calls": [{"id": "b", "index": 0, "function": {"name": "g", "arguments": "{}"}}]}],
        [{"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}],
    ],
    ids=["both on index 0", "no index"],
)  # fmt: skip
def test_tool_calls_of_an_engine_with_odd_indexes_pass_unchanged(lab: Lab, deltas: list[dict[str, Any]]) -> None:
    """Documented: what an HTTP engine says about its calls is its own affair."""
    lab.one(script=lambda x: x.stream(deltas, finish="tool_calls"))
    answer = lab.stream()
    assert [choice["delta"] for choice in answer.choices()][1:] == deltas and answer.finishes() == ["tool_calls"]


@pytest.mark.parametrize("size", [700 * 1024, 5 * 1024 * 1024])
def test_a_very_large_event_passes_whole(lab: Lab, size: int) -> None:
    call = {"tool_calls": [{"index": 0, "function": {"arguments": "x" * size}}]}
    lab.one(script=lambda x: x.stream(["a", call, "b"]))
    answer = lab.stream()
    (big,) = [choice["delta"] for choice in answer.choices() if "tool_calls" in choice["delta"]]
    assert big == call and answer.text() == "ab" and answer.ended_well()


def test_an_event_beyond_the_limit_becomes_an_error(lab: Lab) -> None:
    engine = lab.engine(script=lambda x: x.stream(["a", "x" * 2_000_000, "b"]))
    lab.serve({"m": [replica(engine)]}, server={"max_event": "100KiB"})
    answer = lab.stream()
    (error,) = answer.stream_errors()
    assert answer.text() == "a" and answer.complete and "larger than" in error["message"]


# --- how events travel
def test_headers_and_events_are_not_held_back(lab: Lab) -> None:
    """The head comes before the first event, and each event before the next one is made."""
    turns = [threading.Event() for _ in range(4)]

    def script(x: Exchange) -> None:
        x.begin()
        for number, turn in enumerate(turns):
            x.wait(turn)
            x.delta(str(number))
        x.delta({}, "stop")
        x.done()

    lab.one(script=script)
    with lab.gateway.wire() as wire:
        answer = wire.ask(
            "POST", "/v1/chat/completions", chat(stream=True), key=lab.key, headers=["accept-encoding: gzip, br"]
        )
        assert answer.header("content-encoding") is None and "no-cache" in (answer.header("cache-control") or "")
        assert answer.header("x-accel-buffering") == "no"
        assert (answer.header("content-type") or "").startswith("text/event-stream")
        for number, turn in enumerate(turns, 1):
            turn.set()
            answer.until(number)
            assert answer.text() == "0123"[:number]
        assert answer.rest().ended_well()


def test_a_compressed_stream_is_delivered_event_by_event_in_readable_form(lab: Lab) -> None:
    turns = [threading.Event() for _ in range(3)]

    def script(x: Exchange) -> None:
        x.begin(gzipped=True)
        for number, turn in enumerate(turns):
            x.wait(turn)
            x.delta(str(number))
        x.delta({}, "stop")
        x.done()

    lab.one(script=script)
    with lab.gateway.wire() as wire:
        answer = wire.ask("POST", "/v1/chat/completions", chat(stream=True), key=lab.key)
        for number, turn in enumerate(turns, 1):
            turn.set()
            assert answer.until(number).text() == "012"[:number]
        assert answer.rest().ended_well() and answer.header("content-encoding") is None


def test_a_stream_that_ends_with_its_connection(lab: Lab) -> None:
    def script(x: Exchange) -> None:
        x.begin(chunked=False)
        x.part(VLLM.stream(["a", "b"]))

    lab.one(script=script)
    answer = lab.stream()
    assert answer.text() == "ab" and answer.ended_well()


def test_a_stream_without_the_done_marker_gets_one(lab: Lab) -> None:
    def script(x: Exchange) -> None:
        x.begin()
        x.delta("a")
        x.delta({}, "stop")
        x.end()

    lab.one(script=script)
    answer = lab.stream()
    assert answer.text() == "a" and answer.ended_well()


def test_a_last_event_without_its_blank_line_counts(lab: Lab) -> None:
    answer = whole(lab, VLLM.stream(["a", "b"]).rstrip(b"\n"))
    assert answer.text() == "ab" and answer.ended_well()


def test_twenty_thousand_chunks_in_one_answer(lab: Lab) -> None:
    count = 20_000
    lab.one(script=lambda x: x.raw_stream(x.dialect.stream(["ab"] * count, usage=USAGE), by_bytes(30_000)))
    answer = lab.stream()
    assert len(answer.events()) == count + 2 and answer.text() == "ab" * count and answer.ended_well()


# --- breaks
def breaks(how: str) -> Callable[[Exchange], None]:
    def script(x: Exchange) -> None:
        x.begin()
        x.role()
        for text in ("one ", "two ", "three"):
            x.delta(text)
        x.pause(0.2)  # the bytes are on their way before the connection is
        if how == "reset":
            x.reset()
        elif how == "half chunk":
            x.half_chunk()
        elif how == "clean end without finish":
            x.end()
        elif how == "done without finish":
            x.done()
        elif how == "error event":
            x.event({"error": {"message": "CUDA out of memory at http://10.1.2.3:8000/v1", "code": 500}})
            x.end()
        elif how == "error event then done":
            x.event({"error": {"message": "CUDA out of memory", "type": "InternalServerError", "code": 500}})
            x.done()
        elif how == "error as a string":
            x.event({"error": "CUDA out of memory"})
            x.end()
        elif how == "garbage":
            x.part(b"data: {not json\n\n")
            x.done()
        elif how == "wrong types":
            x.part(b'data: {"choices": 5, "model": [], "usage": "x"}\n\n')
            x.end()
        elif how == "broken framing":
            x.send(b"zz\r\nnot a chunk\r\n")

    return script


BREAKS = (
    "reset", "half chunk", "clean end without finish", "done without finish", "error event", "error event then done",
    "error as a string", "garbage", "broken framing",
)  # fmt: skip


@pytest.mark.parametrize("how", BREAKS)
def test_a_stream_that_breaks_ends_with_one_error_and_never_looks_finished(lab: Lab, how: str) -> None:
    lab.one(script=breaks(how))
    answer = lab.stream()
    (error,) = answer.stream_errors()
    assert answer.text() == "one two three" and answer.finishes() == [] and answer.complete
    assert "error" in answer.chunks_json()[-1] and "[DONE]" not in answer.events()
    assert set(error) == {"message", "type", "param", "code"} and error["code"] and error["message"]
    body = answer.body.decode()
    assert "127.0.0.1" not in body and "10.1.2.3" not in body and "Traceback" not in body
    line = lab.gateway.access_line(answer.header("x-request-id") or "")
    assert line["status"] == 502 and line["completion_tokens"] == 3 and line["usage"] == "estimate"
    assert lab.answered(502) == 1 and lab.answered(200) == 0 and lab.tokens("completion") == 3


@pytest.mark.parametrize("how", ["close", "reset", "half_chunk"])
def test_an_engine_that_leaves_after_the_last_finish_has_answered(lab: Lab, how: str) -> None:
    """The finish reason decides, not `[DONE]`: the client gets a whole answer and the replica is not blamed."""

    def script(x: Exchange) -> None:
        x.begin()
        x.role()
        x.delta("all of it")
        x.delta({}, "stop")
        x.pause(0.05)  # a reset takes with it what has not been read
        getattr(x, how)()

    lab.one(script=script)
    answer = lab.chat(stream=True)
    assert answer.ended_well() and answer.text() == "all of it"


def test_one_of_two_choices_cut_short_is_not_a_finished_answer(lab: Lab) -> None:
    def script(x: Exchange) -> None:
        x.begin()
        for index in (0, 1):
            x.delta({"role": "assistant"}, index=index)
        x.delta("a", index=0)
        x.delta("b", index=1)
        x.delta({}, "stop", index=0)
        x.done()

    lab.one(script=script)
    answer = lab.stream(n=2)
    assert len(answer.stream_errors()) == 1 and "[DONE]" not in answer.events()


def test_one_of_two_choices_cut_short_by_an_engine_that_sends_no_roles(lab: Lab) -> None:
    """The second choice is first heard of in an ordinary chunk."""

    def script(x: Exchange) -> None:
        x.begin()
        for text in ("a", "b", "c"):
            x.delta(text, index=0)
        for text in ("a", "b", "c"):
            x.delta(text, index=1)
        x.delta({}, "stop", index=0)
        x.end()

    lab.one("tabbyapi", script)
    answer = lab.stream(n=2)
    assert len(answer.stream_errors()) == 1 and "[DONE]" not in answer.events()


def test_values_of_wrong_types_in_a_chunk_end_in_an_error_and_no_crash(lab: Lab) -> None:
    lab.one(script=breaks("wrong types"))
    answer = lab.stream()
    assert answer.complete and len(answer.stream_errors()) == 1


def test_an_error_event_is_told_at_once_even_if_the_engine_keeps_the_connection_open(lab: Lab) -> None:
    """This engine ends its stream only when it sees the gateway leave."""

    def script(x: Exchange) -> None:
        x.begin()
        x.delta("a")
        x.event({"error": {"message": "CUDA out of memory", "code": 500}})
        x.wait()

    engine = lab.one(script=script, timeouts={"idle": "20s"})
    answer = lab.stream()
    assert len(answer.stream_errors()) == 1 and "CUDA" in answer.stream_errors()[0]["message"]
    assert engine.last().gone.wait(5)


def test_an_answer_is_over_with_its_done_marker_even_if_the_engine_lingers(lab: Lab) -> None:
    """No error event behind a finished answer, and no failure booked for it."""

    def script(x: Exchange) -> None:
        x.begin()
        x.delta("a")
        x.delta({}, "stop")
        x.event(b"[DONE]")
        x.wait()

    lab.one(script=script, timeouts={"idle": "1s"})
    answer = lab.stream()
    assert answer.ended_well() and answer.events()[-1] == "[DONE]"
    assert lab.gateway.access_line(answer.header("x-request-id") or "")["status"] == 200


def test_an_engine_that_answers_a_stream_with_a_document_is_an_error_not_a_hang(lab: Lab) -> None:
    lab.one(script=lambda x: x.reply(x.dialect.completion()))
    answer = lab.stream()
    assert answer.complete and (answer.status == 502 or len(answer.stream_errors()) == 1)


@pytest.mark.parametrize("dialect", NAMED)
def test_the_model_shown_is_the_one_that_was_asked_for(lab: Lab, dialect: str) -> None:
    """Every chunk and every body, whatever case the engine used; text and arguments keep the engine's own name."""
    manners: Dialect = DIALECTS[dialect]
    text = f"I am {UPSTREAM_MODEL} alias {UPSTREAM_MODEL.lower()} \"model\":\"{UPSTREAM_MODEL}\""
    call = {"tool_calls": [{"index": 0, "function": {"arguments": json.dumps({"model": UPSTREAM_MODEL})}}]}

    def script(x: Exchange) -> None:
        if not x.request.json().get("stream"):
            return x.reply(manners.completion(text) | {"model": UPSTREAM_MODEL.lower()})
        x.begin()
        x.role()
        for number, piece in enumerate([text, call, text]):
            delta = {"content": piece} if isinstance(piece, str) else piece
            x.event(manners.chunk(delta) | ({"model": UPSTREAM_MODEL.lower()} if number == 1 else {}))
        x.delta({}, "stop")
        return x.done()

    engine = lab.one(dialect, script, model={"aliases": ["chat", "quoted\"alias\""]})
    for name in ("chat", "m", "quoted\"alias\""):
        answer = lab.stream(name)
        assert {chunk["model"] for chunk in answer.chunks_json()} == {name} and answer.text() == text * 2
        calls = [choice["delta"] for choice in answer.choices() if "tool_calls" in choice["delta"]]
        assert calls == [call]
        document = lab.chat(name).json()
        assert document["model"] == name and document["choices"][0]["message"]["content"] == text
    assert {request.json()["model"] for request in engine.requests} == {UPSTREAM_MODEL}
