"""Clients that leave, and clients that do not read: what the engine notices, what is booked, what is kept in memory."""

from __future__ import annotations

import threading
from typing import Any

import psutil
import pytest

from tests.doubles.dialects import UPSTREAM_MODEL
from tests.doubles.engine import Engine, Exchange
from tests.e2e.harness import Lab, chat, digest, eventually, replica
from tests.e2e.wire import request


def two_then_silence(x: Exchange) -> None:
    x.begin()
    x.role()
    x.delta("one ")
    x.delta("two ")
    x.wait()


def leaves_after(lab: Lab, events: int, *, reset: bool = False, **more: Any) -> str:
    """Opens a stream, reads some events and closes. Returns the request id."""
    with lab.gateway.wire() as wire:
        answer = wire.ask("POST", "/v1/chat/completions", chat(stream=True, **more), key=lab.key)
        answer.until(events)
        if reset:
            wire.reset()
        return answer.header("x-request-id") or ""


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
def test_leaving_a_stream_reaches_the_engine(lab: Lab, reset: bool) -> None:
    engine = lab.one(script=two_then_silence)
    line = lab.gateway.access_line(leaves_after(lab, 3, reset=reset))
    assert engine.last().gone.wait(10) and lab.at_rest()
    assert (line["status"], line["error"]) == (499, "client_closed_request")
    assert line["completion_tokens"] == 2 and line["usage"] == "estimate" and line["prompt_tokens"] > 0
    assert lab.gateway.metric("sekisho_upstream_failures_total", replica=line["replica"]) == 0


def test_leaving_a_busy_stream_reaches_the_engine(lab: Lab) -> None:
    """The engine never stops writing, so only a failing write or a closed socket can tell it."""
    seen = threading.Event()

    def endless(x: Exchange) -> None:
        x.begin()
        try:
            while not x.engine.stopping.is_set():
                x.delta("token ")
        finally:
            seen.set()

    engine = lab.one(script=endless)
    leaves_after(lab, 50)
    assert seen.wait(10) and engine.last().gone.is_set() and lab.at_rest()


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_leaving_before_any_answer_reaches_the_engine(lab: Lab, stream: bool) -> None:
    """Three impatient calls in a row never pile up; nothing of it counts against the engine."""
    engine = lab.one(script=lambda x: x.wait())
    for number in range(1, 4):
        wire = lab.gateway.wire()
        wire.send(request("POST", "/v1/chat/completions", chat(stream=stream), key=lab.key))
        assert eventually(lambda number=number: len(engine.requests) == number)  # type: ignore[misc]
        wire.close()
        assert engine.last().gone.wait(10)
        assert eventually(lambda: engine.running == 0)
    assert engine.most_running == 1 and lab.at_rest()
    assert eventually(lambda: lab.answered(499) == 3) and lab.answered(502) == 0
    (state,) = lab.gateway.replicas()
    assert state["failures_in_a_row"] == 0 and state["routable"]


def test_leaving_in_the_middle_of_a_whole_answer_reaches_the_engine(lab: Lab) -> None:
    def half(x: Exchange) -> None:
        x.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n{"id":')
        x.wait()

    engine = lab.one(script=half)
    wire = lab.gateway.wire()
    wire.send(request("POST", "/v1/chat/completions", chat(), key=lab.key))
    assert eventually(lambda: bool(engine.requests))
    wire.close()
    assert engine.last().gone.wait(10) and lab.at_rest()


def test_leaving_while_the_body_is_still_being_sent_never_reaches_an_engine(lab: Lab) -> None:
    engine = lab.one()
    wire = lab.gateway.wire()
    wire.send(request("POST", "/v1/chat/completions", chat(), key=lab.key, length=100_000))
    wire.close()
    assert eventually(lambda: lab.answered(499) == 1)
    assert not engine.requests and lab.tokens("prompt") == 0


def test_leaving_two_hundred_times_leaks_nothing(lab: Lab) -> None:
    engine = lab.one(script=two_then_silence, max_inflight=20)
    process = psutil.Process(lab.gateway.process.pid)
    leaves_after(lab, 3)
    assert eventually(lambda: engine.running == 0) and lab.at_rest()
    before = process.num_fds()
    for _ in range(200):
        leaves_after(lab, 3)
    engine.script = lambda x: x.stream()
    assert eventually(lambda: lab.stream().status == 200)  # no place is held by those who left
    assert eventually(lambda: engine.running == 0) and engine.most_running <= 20 and lab.at_rest()
    assert eventually(lambda: process.num_fds() <= before + 5), (before, process.num_fds())
    assert all(entry.gone.is_set() for entry in engine.requests[:201])


# --- what is booked
def test_leaving_just_before_the_usage_chunk_is_not_free(lab: Lab) -> None:
    """A budget stops those who always leave early."""
    pause = threading.Event()

    def script(x: Exchange) -> None:
        x.begin()
        for _ in range(300):
            x.delta("word ")
        x.wait(pause)

    engine = lab.engine(script=script)
    lab.serve({"m": [replica(engine)]}, limits={"token_budget": "1000/day"})
    statuses = []
    for _ in range(6):
        with lab.gateway.wire() as wire:
            answer = wire.ask("POST", "/v1/chat/completions", chat(stream=True, max_tokens=10), key=lab.key)
            statuses.append(answer.status)
            if answer.status == 200:
                answer.until(300)
        assert lab.at_rest()
    assert statuses[:3] == [200] * 3 and statuses[4:] == [429] * 2
    assert 900 <= lab.tokens("completion") <= 1200


def test_leaving_before_the_first_token_books_the_prompt(lab: Lab) -> None:
    engine = lab.one(script=lambda x: x.wait())
    wire = lab.gateway.wire()
    wire.send(request("POST", "/v1/chat/completions", chat(stream=True), key=lab.key))
    assert eventually(lambda: bool(engine.requests))
    wire.close()
    assert eventually(lambda: lab.tokens("prompt") > 0) and lab.tokens("completion") == 0


def test_leaving_while_the_engine_cannot_be_reached_books_nothing(lab: Lab) -> None:
    """A listener whose queue is full: the connection is never made."""
    import socket

    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        target = {"backend": "openai_compatible", "url": f"http://127.0.0.1:{full.getsockname()[1]}"}
        lab.serve({"m": [target | {"timeouts": {"connect": "30s"}}]})
        wire = lab.gateway.wire()
        wire.send(request("POST", "/v1/chat/completions", chat(stream=True), key=lab.key))
        assert eventually(lambda: lab.gateway.metric("sekisho_inflight_requests", model="m") == 1)
        wire.close()
        assert eventually(lambda: lab.answered(499) == 1)
    assert lab.tokens("prompt") == 0


def test_concurrency_is_given_back_however_a_request_ends(lab: Lab) -> None:
    engine = lab.engine()
    lab.serve({"m": [replica(engine, timeouts={"first_byte": "500ms"})]}, limits={"concurrency": 1})
    engine.once(two_then_silence)
    leaves_after(lab, 3)
    assert lab.at_rest()

    def settles(expected: int) -> bool:
        return eventually(lambda: lab.chat().status == expected)

    assert settles(200)
    engine.once(lambda x: x.wait())
    assert lab.chat().status == 504
    engine.once(lambda x: x.fail("bug", 500))
    assert lab.chat().status == 502
    assert lab.chat("unknown").status == 404 and lab.call(b"{").status == 400
    with lab.gateway.wire() as wire:
        wire.send(request("POST", "/v1/chat/completions", chat(), key=lab.key, length=10_000))
    assert settles(200)


# --- clients that do not read, engines that do not stop
@pytest.mark.parametrize("framed", [True, False], ids=["chunked", "until close"])
def test_a_client_that_does_not_read_stops_the_engine(lab: Lab, framed: bool) -> None:
    """What the gateway takes from the engine, and keeps, is bounded; later everything arrives in order."""
    most = 256 << 20
    taken: list[int] = []
    resumed = threading.Event()

    def firehose(x: Exchange) -> None:
        x.begin(chunked=framed)
        event = x.dialect.frame(x.dialect.chunk({"content": "x" * 4000}))
        x.part(event)
        taken.append(x.push(b"%x\r\n%b\r\n" % (len(event), event) if framed else event, most))
        resumed.set()
        x.wait()

    engine = lab.one(script=firehose)
    process = psutil.Process(lab.gateway.process.pid)
    before = process.memory_info().rss
    with lab.gateway.wire(receive_buffer=32 << 10) as wire:
        wire.send(request("POST", "/v1/chat/completions", chat(stream=True), key=lab.key))
        assert resumed.wait(60)
        assert 0 < taken[0] < 64 << 20, taken
        assert process.memory_info().rss - before < 48 << 20
        assert lab.gateway.get("/health", None).status_code == 200
        answer = wire.answer().until(500)
        assert all(choice["delta"]["content"] == "x" * 4000 for choice in answer.choices())
    assert engine.last().gone.wait(10) and lab.at_rest()


def test_a_paused_stream_is_not_taken_for_a_silent_engine(lab: Lab) -> None:
    """The client stops reading for longer than the idle limit, and gets all of it when it goes on."""
    count = 8000  # 32 MB: more than the kernel buffers of both sides take in
    sent = threading.Event()

    def script(x: Exchange) -> None:
        x.begin()
        for number in range(count):
            x.delta(f"{number} " + "x" * 4000)
        x.delta({}, "stop")
        sent.set()
        x.done()

    lab.one(script=script, timeouts={"idle": "1s"})
    with lab.gateway.wire(receive_buffer=32 << 10) as wire:
        answer = wire.ask("POST", "/v1/chat/completions", chat(stream=True), key=lab.key)
        answer.until(1)
        stuck = not sent.wait(3)
        answer.rest()
    assert stuck and answer.ended_well()
    assert [choice["delta"]["content"].split()[0] for choice in answer.choices() if choice["delta"]] == [
        str(number) for number in range(count)
    ]


def test_a_slow_request_delays_no_other(lab: Lab) -> None:
    """One engine hangs in its prefill, the other's stream goes on, and so does everything else."""
    release = threading.Event()
    slow = lab.engine(script=lambda x: (x.wait(release), x.stream())[1])
    quick = lab.engine()
    lab.serve({"slow": [replica(slow)], "m": [replica(quick)]})
    with lab.gateway.wire() as wire:
        wire.send(request("POST", "/v1/chat/completions", chat("slow", stream=True), key=lab.key))
        assert eventually(lambda: slow.running == 1)
        for _ in range(20):
            assert lab.stream().ended_well()
        assert lab.gateway.get("/health", None).status_code == 200
        assert [entry["id"] for entry in lab.gateway.get("/v1/models", lab.key).json()["data"]] == ["slow", "m"]
        assert slow.running == 1 and not slow.last().ended.is_set()
        release.set()
        assert wire.answer().rest().ended_well()


def test_an_engine_that_dies_takes_nobody_with_it(lab: Lab) -> None:
    """The worker process behind one model crashes: its caller gets an error, other engines' streams live on."""
    release = threading.Event()

    def steady(x: Exchange) -> None:
        x.begin()
        x.delta("before ")
        x.wait(release)
        x.delta("after", "stop")
        x.done()

    crashing: Engine = lab.engine(script=lambda x: x.reset())
    lab.serve({"crash": [replica(crashing)], "m": [replica(lab.engine(script=steady))]})
    with lab.gateway.wire() as wire:
        answer = wire.ask("POST", "/v1/chat/completions", chat(stream=True), key=lab.key).until(1)
        for _ in range(4):
            failed = lab.chat("crash")
            assert failed.status in (502, 503) and failed.error()["code"]
        release.set()
        assert answer.rest().text() == "before after" and answer.ended_well()
    crashing.script = lambda x: x.reply(x.dialect.completion())  # restarted
    assert eventually(lambda: lab.chat("crash").status == 200)


def test_leaving_frees_the_models_place_and_tokens(lab: Lab) -> None:
    engine = lab.engine(script=lambda x: x.wait())
    lab.serve({"m": {"replicas": [replica(engine)], "limits": {"concurrency": 1, "tokens": "600/min"}}})
    with lab.gateway.wire() as wire:
        wire.send(request("POST", "/v1/chat/completions", chat(stream=True, max_tokens=500), key=lab.key))
        assert eventually(lambda: engine.running == 1)
        refused = lab.stream(max_tokens=1)
        assert refused.status == 429 and "this model" in refused.error()["message"]
    assert engine.last().gone.wait(10)
    engine.script = lambda x: x.stream()
    assert eventually(lambda: lab.stream(max_tokens=500).status == 200)


def test_leaving_a_waiting_request_frees_its_tenants_place(lab: Lab) -> None:
    """Limits of one key are not held by its own abandoned requests, nor by another key's."""
    other = {"name": f"{lab.tenant}-b", "keys": [{"name": "b", "sha256": digest("sk-other" + "o" * 40)}]}
    engine = lab.engine(script=two_then_silence)
    lab.serve({"m": [{"backend": "vllm", "url": engine.url, "model": UPSTREAM_MODEL}]},
              limits={"concurrency": 1}, tenants=[other])  # fmt: skip
    with lab.gateway.wire() as wire:
        wire.ask("POST", "/v1/chat/completions", chat(stream=True), key=lab.key).until(3)
        refused = lab.stream()
        assert refused.status == 429 and refused.header("retry-after") == "1"
        with lab.gateway.wire() as second:
            allowed = second.ask("POST", "/v1/chat/completions", chat(stream=True), key="sk-other" + "o" * 40)
            assert allowed.status == 200
    engine.script = lambda x: x.stream()
    assert eventually(lambda: lab.stream().status == 200)
