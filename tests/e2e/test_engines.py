"""Between the gateway and its engines: time limits, second tries, kept connections, TLS, sockets, and nonsense."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.dialects import NAMED
from tests.doubles.engine import Certificates, Engine, Exchange, PeerGone
from tests.e2e.harness import Lab, chat, eventually, free_port, replica, together
from tests.e2e.wire import parse, request


# --- time limits
def stream_in_steps(steps: int, pause: float) -> Callable[[Exchange], None]:
    def script(x: Exchange) -> None:
        x.begin()
        for number in range(steps):
            x.delta(f"{number} ")
            x.pause(pause)
        x.delta({}, "stop")
        x.done()

    return script


def test_a_long_slow_stream_survives_every_limit_but_the_total(lab: Lab) -> None:
    """It lasts longer than each of the other limits."""
    limits = {"connect": "1s", "first_byte": "1s", "idle": "1s"}
    lab.one(script=stream_in_steps(12, 0.25), timeouts=limits)
    answer = lab.stream()
    assert answer.ended_well() and answer.text() == "".join(f"{n} " for n in range(12))


def test_the_total_limit_ends_a_lively_stream(lab: Lab) -> None:
    lab.one(script=stream_in_steps(1000, 0.05), timeouts={"total": "1s"})
    answer = lab.stream()
    (error,) = answer.stream_errors()
    assert answer.complete and error["code"] == "engine_timeout" and "[DONE]" not in answer.events()
    assert answer.text().startswith("0 1 2 ")


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_an_engine_that_never_answers_is_a_504(lab: Lab, stream: bool) -> None:
    engine = lab.one(script=lambda x: x.wait(), timeouts={"first_byte": "600ms"})
    answer = lab.call(chat(stream=stream))
    assert (answer.status, answer.error()["code"]) == (504, "engine_timeout")
    assert engine.last().gone.wait(10) and lab.at_rest()


def test_silence_in_the_middle_ends_with_an_error_event(lab: Lab) -> None:
    def script(x: Exchange) -> None:
        x.begin()
        for text in "abc":
            x.delta(text)
        x.wait()

    engine = lab.one(script=script, timeouts={"idle": "800ms"})
    answer = lab.stream()
    (error,) = answer.stream_errors()
    assert answer.text() == "abc" and answer.complete and error["code"] == "engine_timeout"
    assert engine.last().gone.wait(10)


def test_silence_in_the_middle_of_a_document_is_a_504(lab: Lab) -> None:
    def script(x: Exchange) -> None:
        x.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{")
        x.wait()

    lab.one(script=script, timeouts={"idle": "800ms"})
    assert lab.chat().status == 504


def test_prefill_after_the_headers_is_bounded_by_the_first_byte_limit_not_the_idle_one(lab: Lab) -> None:
    """Engines send their headers at once and their first token when the prompt is read, which may take minutes."""

    def script(x: Exchange) -> None:
        x.begin()
        x.pause(2.0)
        x.stream_body()

    lab.one(script=script, timeouts={"first_byte": "20s", "idle": "700ms"})
    answer = lab.stream()
    assert answer.ended_well(), answer.stream_errors()


def test_a_comment_of_the_engine_resets_its_idle_clock(lab: Lab) -> None:
    def script(x: Exchange) -> None:
        x.begin()
        for _ in range(5):
            x.part(b": ping\n\n")
            x.pause(0.4)
        x.stream_body()

    lab.one(script=script, timeouts={"first_byte": "20s", "idle": "1s"})
    assert lab.stream().ended_well()


def test_headers_that_never_end_are_bounded_by_the_first_byte_limit(lab: Lab) -> None:
    def script(x: Exchange) -> None:
        x.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        x.wait()

    engine = lab.one(script=script, timeouts={"first_byte": "800ms", "idle": "800ms"})
    assert lab.stream().status == 504 and engine.last().gone.wait(10)


def test_an_engine_that_accepts_no_connection_is_bounded_by_the_connect_limit(lab: Lab) -> None:
    import socket

    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        target = replica(f"http://127.0.0.1:{full.getsockname()[1]}", timeouts={"connect": "500ms"})
        lab.serve({"m": [target]})
        answer = lab.chat()
    assert answer.status == 503 and answer.error()["code"] == "engine_unreachable" and answer.header("retry-after")


def test_limits_are_each_engines_own(lab: Lab) -> None:
    slow = lab.engine(script=lambda x: (x.pause(1.2), x.reply(x.dialect.completion()))[1])
    lab.serve({"patient": [replica(slow)], "hasty": [replica(slow, timeouts={"first_byte": "400ms"})]})
    assert lab.chat("hasty").status == 504 and lab.chat("patient").status == 200


# --- second tries
def pair(lab: Lab, first: Callable[[Exchange], None], **sections: Any) -> tuple[Engine, Engine]:
    """Two replicas of which the next request takes the first, and a second try the other."""
    bad, good = lab.engine(script=first), lab.engine()
    entry = {"policy": "least_load", "replicas": [replica(bad, weight=10), replica(good)]}
    lab.serve({"m": entry}, **sections)
    return bad, good


def fails_before_headers(x: Exchange) -> None:
    x.reset()


def fails_after_headers(x: Exchange) -> None:
    x.begin()
    x.pause(0.2)
    x.reset()


def fails_after_a_comment(x: Exchange) -> None:
    x.begin()
    x.part(b": ping\n\n")
    x.pause(0.2)
    x.reset()


def fails_with_503(x: Exchange) -> None:
    x.fail("overloaded", 503)


def fails_with_500(x: Exchange) -> None:
    x.fail("the engine has a bug", 500)


def fails_with_html(x: Exchange) -> None:
    x.html(502)


def fails_with_an_error_event(x: Exchange) -> None:
    x.begin()
    x.event({"error": {"message": "The request queue is full.", "code": 503}})
    x.done()


def fails_with_garbage(x: Exchange) -> None:
    x.send(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
    x.close()


def fails_after_half_a_head(x: Exchange) -> None:
    x.send(b"HTTP/1.1 200 OK\r\ncontent-ty")
    x.close()


def fails_with_an_empty_stream(x: Exchange) -> None:
    x.begin()
    x.end()


EARLY = [
    fails_before_headers, fails_after_headers, fails_after_a_comment, fails_with_503, fails_with_500, fails_with_html,
    fails_with_an_error_event, fails_with_garbage, fails_after_half_a_head, fails_with_an_empty_stream,
]  # fmt: skip


@pytest.mark.parametrize("how", EARLY, ids=lambda how: how.__name__)
def test_before_any_event_another_replica_answers_and_the_client_sees_one_clean_stream(
    lab: Lab, how: Callable[[Exchange], None]
) -> None:
    bad, good = pair(lab, how)
    answer = lab.stream()
    assert answer.ended_well() and answer.text() == "Hello, world" and answer.finishes() == ["stop"]
    assert len(bad.requests) == 1 and len(good.requests) == 1
    line = lab.gateway.access_line(answer.header("x-request-id") or "")
    assert line["attempts"] == 2 and line["status"] == 200
    assert lab.booked(11, 5)  # the failed attempt is not the caller's to pay
    assert lab.gateway.metric("sekisho_upstream_failures_total", replica=lab.gateway.replicas()[0]["id"]) == 1


def test_a_second_try_after_our_own_comment_is_still_one_clean_stream(lab: Lab) -> None:
    def late(x: Exchange) -> None:
        x.pause(1.0)
        x.reset()

    bad, good = pair(lab, late, server={"keepalive_interval": "200ms"})
    answer = lab.stream()
    assert answer.status == 200 and answer.ended_well() and answer.text() == "Hello, world"
    assert parse(answer.body).comments and (len(bad.requests), len(good.requests)) == (1, 1)


@pytest.mark.parametrize(
    "how", [fails_before_headers, fails_with_503, fails_with_html, fails_with_garbage], ids=lambda how: how.__name__
)
def test_a_document_is_tried_again_too(lab: Lab, how: Callable[[Exchange], None]) -> None:
    bad, good = pair(lab, how)
    assert lab.chat().status == 200 and (len(bad.requests), len(good.requests)) == (1, 1)


def test_after_the_first_event_nobody_else_is_asked(lab: Lab) -> None:
    def late(x: Exchange) -> None:
        x.begin()
        x.role()
        x.delta("The answer")
        x.pause(0.2)
        x.reset()

    bad, good = pair(lab, late)
    answer = lab.stream()
    assert answer.text() == "The answer" and len(answer.stream_errors()) == 1 and answer.complete
    assert len(bad.requests) == 1 and not good.requests


def test_a_role_alone_is_an_event_too(lab: Lab) -> None:
    def late(x: Exchange) -> None:
        x.begin()
        x.role()
        x.pause(0.2)
        x.reset()

    _, good = pair(lab, late)
    answer = lab.stream()
    assert len(answer.stream_errors()) == 1 and not good.requests
    assert sum("role" in choice["delta"] for choice in answer.choices()) == 1


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422, 501])
def test_the_callers_mistakes_are_not_tried_elsewhere(lab: Lab, status: int) -> None:
    bad, good = pair(lab, lambda x: x.fail("no such option", status))
    for count in range(1, 6):
        assert 400 <= lab.chat().status < 500 and len(bad.requests) + len(good.requests) == count
    assert not good.requests and all(state["failures_in_a_row"] == 0 for state in lab.gateway.replicas())


def test_each_replica_is_tried_once_and_three_at_most(lab: Lab) -> None:
    engines = [lab.engine(script=fails_with_500) for _ in range(5)]
    lab.serve({"m": [replica(engine) for engine in engines]})
    answer = lab.chat()
    assert answer.status == 502 and [len(engine.requests) for engine in engines].count(1) == 3
    assert lab.gateway.access_line(answer.header("x-request-id") or "")["attempts"] == 3


def test_a_request_that_kills_its_engine_is_not_sent_down_every_kept_connection(lab: Lab) -> None:
    """One kept connection may be stale, so there is one more try on a fresh one, and no third."""
    engine = lab.one(script=lambda x: (x.pause(0.4), x.reply(x.dialect.completion()))[1])
    assert [answer.status for answer in together([lab.chat] * 6)] == [200] * 6
    assert engine.connections >= 6
    before = len(engine.requests)
    engine.script = lambda x: x.reset()
    assert lab.chat().status == 502
    assert len(engine.requests) - before <= 2


# --- kept connections
def test_connections_are_kept_and_used_again(lab: Lab) -> None:
    engine = lab.one()
    for number in range(6):
        assert (lab.stream() if number % 2 else lab.chat()).status == 200
    assert {request.connection for request in engine.requests} == {engine.requests[0].connection}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_stale_connection_is_replaced_and_the_engine_sees_one_request(lab: Lab, stream: bool) -> None:
    """The engine closes what it kept, before or just when the next request is on its way."""
    engine = lab.one()
    lab.gateway.wait_for_replica()  # or a probe's connection is dropped too
    for _ in range(10):
        assert lab.call(chat(stream=stream)).status == 200
        engine.drop_idle()
    assert len(engine.requests) == 10
    assert len({request.connection for request in engine.requests}) == 10
    (state,) = lab.gateway.replicas()
    assert state["failures_in_a_row"] == 0


def test_an_engine_that_closes_after_every_answer_is_fine(lab: Lab) -> None:
    engine = lab.one()
    engine.closing_idle = True
    assert [lab.stream().ended_well() for _ in range(10)] == [True] * 10 and len(engine.requests) == 10


def test_a_connection_whose_answer_was_broken_off_is_not_used_again(lab: Lab) -> None:
    engine = lab.one()
    engine.once(lambda x: (x.begin(), x.delta("a"), x.wait())[2])
    with lab.gateway.wire() as wire:
        wire.ask("POST", "/v1/chat/completions", chat(stream=True), key=lab.key).until(1)
    assert engine.last().gone.wait(10)
    assert lab.stream().ended_well() and engine.requests[0].connection != engine.requests[1].connection


def test_bytes_after_an_answer_spoil_the_connection_and_nothing_else(lab: Lab) -> None:
    """What an engine sends unasked must never be taken for the next caller's answer."""

    def smuggles(x: Exchange) -> None:
        evil = x.dialect.dump(x.dialect.completion("evil"))
        x.reply(x.dialect.completion("good"))
        with contextlib.suppress(PeerGone):
            x.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(evil), evil))

    lab.one(script=smuggles)
    for _ in range(10):
        answer = lab.chat()  # both in one read make one document that is none
        assert b"evil" not in answer.body
        assert answer.status in (502, 503) or answer.json()["choices"][0]["message"]["content"] == "good"
        time.sleep(0.05)  # on a connection that is used again at once, nothing tells the two answers apart


# --- nonsense
def endless_headers(x: Exchange) -> None:
    x.send(b"HTTP/1.1 200 OK\r\n")
    x.push(b"x-more: " + b"a" * 1000 + b"\r\n", 64 << 20)
    x.wait()


def endless_header(x: Exchange) -> None:
    x.send(b"HTTP/1.1 200 OK\r\nx-more: ")
    x.push(b"a" * 65536, 64 << 20)
    x.wait()


def endless_reason(x: Exchange) -> None:
    x.send(b"HTTP/1.1 200 ")
    x.push(b"a" * 65536, 64 << 20)
    x.wait()


@pytest.mark.parametrize("how", [endless_headers, endless_header, endless_reason], ids=lambda how: how.__name__)
def test_a_head_without_end_is_given_up_early(lab: Lab, how: Callable[[Exchange], None]) -> None:
    engine = lab.one(script=how, timeouts={"first_byte": "20s", "idle": "20s"})
    answer = lab.chat()
    assert answer.status == 502 and engine.last().gone.wait(10)


def test_large_but_decent_headers_pass(lab: Lab) -> None:
    lab.one(script=lambda x: x.reply(x.dialect.completion(), x_large="a" * 30_000))
    assert lab.chat().status == 200


NONSENSE: dict[str, bytes] = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "TLS": b"\x15\x03\x01\x00\x02\x02\x46",
    "no status": b"HTTP/1.1\r\n\r\n",
    "odd status": b"HTTP/1.1 999999 X\r\n\r\n",
    "bad length": b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n{}",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 7\r\n\r\n{}{}{}",
    "bad chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "upgrade": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\nxx",
    "not gzip": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 5\r\n\r\nhello",
    "odd encoding": b"HTTP/1.1 200 OK\r\ncontent-encoding: br\r\ncontent-length: 5\r\n\r\nhello",
    "redirect": b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n",
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "HTTP/0.9": b"<html>hello</html>",
}


@pytest.mark.parametrize("case", NONSENSE)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_nonsense_is_an_error_of_the_engine_and_not_a_hang(lab: Lab, case: str, stream: bool) -> None:
    def script(x: Exchange) -> None:
        x.send(NONSENSE[case])
        x.close()

    lab.one(script=script)
    answer = lab.call(chat(stream=stream))
    error = answer.stream_errors()[0] if answer.status == 200 else answer.error()
    assert answer.complete and error["type"] == "server_error" and (answer.status in (200, 502))
    assert lab.at_rest()


def test_a_compressed_answer_that_blows_up_is_given_up(lab: Lab) -> None:
    import gzip

    bomb = gzip.compress(b" " * (200 << 20), 9)
    lab.one(script=lambda x: x.reply(bomb, content_encoding="gzip"))
    answer = lab.chat()
    assert answer.status == 502


# --- ways to an engine
@pytest.mark.parametrize("dialect", NAMED)
def test_an_engine_on_a_unix_socket(lab: Lab, tmp_path_factory: pytest.TempPathFactory, dialect: str) -> None:
    folder: Path = tmp_path_factory.mktemp("s")
    engine = lab.engine(dialect, unix=folder / "e.sock")
    lab.serve({"m": [replica(engine)]})
    lab.gateway.wait_for_replica()
    assert lab.chat().status == 200 and lab.stream().ended_well() and engine.last().values("host") == ["localhost"]
    assert {request.connection for request in engine.requests} == {engine.requests[0].connection}
    engine.stop()
    assert lab.chat().status == 503


def test_an_engine_behind_tls_is_verified_against_its_ca(lab: Lab, certificates: Certificates) -> None:
    engine = lab.engine(tls=certificates)
    lab.serve({"m": [replica(engine, ca_file=str(certificates.ca_file))]})
    lab.gateway.wait_for_replica()
    assert lab.chat().status == 200 and lab.stream().ended_well()
    assert lab.stream(messages=[{"role": "user", "content": "x" * 500_000}]).ended_well()


def test_an_engine_with_an_unknown_certificate_gets_nothing(lab: Lab, certificates: Certificates) -> None:
    engine = lab.engine(tls=certificates)
    lab.serve({"m": [replica(engine, api_key="upstream-token")]})
    answer = lab.chat()
    # Whoever asks first finds out: this request, or a probe before it.
    assert answer.status == 503 and answer.error()["code"] in ("engine_unreachable", "no_replica")
    assert "certificate" not in answer.error()["message"].lower() or "127.0.0.1" not in answer.error()["message"]
    assert not engine.requests and not engine.probes


def test_an_engine_that_breaks_off_tls_in_a_stream(lab: Lab, certificates: Certificates) -> None:
    def script(x: Exchange) -> None:
        x.begin(chunked=False)
        x.delta("a")
        x.pause(0.2)
        x.close()

    engine = lab.engine(script=script, tls=certificates)
    lab.serve({"m": [replica(engine, ca_file=str(certificates.ca_file))]})
    answer = lab.stream()
    assert answer.text() == "a" and len(answer.stream_errors()) == 1


# --- the fleet
def test_a_burst_spreads_by_our_own_count(lab: Lab) -> None:
    """Thirty requests at once over three equal replicas; the engines' own metrics say nothing useful in time."""
    release = threading.Event()
    engines = [lab.engine(script=lambda x: (x.wait(release), x.stream())[1]) for _ in range(3)]
    lab.serve({"m": [replica(engine) for engine in engines]})

    def release_when_all_run() -> None:
        eventually(lambda: sum(engine.running for engine in engines) == 30)
        release.set()

    watcher = threading.Thread(target=release_when_all_run)
    watcher.start()
    answers = together([lab.stream] * 30)
    watcher.join()
    assert all(answer.ended_well() for answer in answers)
    assert [len(engine.requests) for engine in engines] == [10, 10, 10]


def test_a_replica_that_fails_at_once_does_not_attract_the_traffic(lab: Lab) -> None:
    bad, good = lab.engine(script=fails_with_500), lab.engine()
    lab.serve({"m": [replica(bad), replica(good)]})
    assert [lab.chat().status for _ in range(60)] == [200] * 60 and len(bad.requests) <= 6


def test_many_streams_cut_at_once_count_as_one_fall_not_as_many(lab: Lab) -> None:
    """An engine restarts under eight streams: it is left alone for one short pause, not for the longest one."""
    cut = threading.Event()

    def script(x: Exchange) -> None:
        x.begin()
        x.delta("a")
        if x.engine.running == 8:
            cut.set()
        x.wait(cut)
        x.reset()

    lab.one(script=script)
    answers = together([lab.stream] * 8)
    assert all(len(answer.stream_errors()) == 1 for answer in answers)
    (state,) = lab.gateway.replicas()
    assert state["failures_in_a_row"] >= 3 and 0 < state["paused_s"] <= 5.0 and not state["routable"]


def test_a_full_replica_is_said_to_be_full(lab: Lab) -> None:
    release = threading.Event()
    never = {"queue": {"max_waiting": 0}}
    engine = lab.one(script=lambda x: (x.wait(release), x.stream())[1], model=never, max_inflight=1)
    with lab.gateway.wire() as wire:
        wire.send(request("POST", "/v1/chat/completions", chat(stream=True), key=lab.key))
        assert eventually(lambda: engine.running == 1)
        refused = lab.stream()
        assert (refused.status, refused.error()["code"]) == (503, "model_busy") and refused.header("retry-after")
        release.set()
        assert wire.answer().rest().ended_well()


def test_a_port_nobody_listens_on_is_a_503_with_a_hint(lab: Lab) -> None:
    lab.serve({"m": [replica(f"http://127.0.0.1:{free_port()}")]})
    for _ in range(5):
        answer = lab.chat()
        assert answer.status == 503 and int(answer.header("retry-after") or 0) >= 1
        assert "127.0.0.1" not in answer.body.decode()
