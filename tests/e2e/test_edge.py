"""The client's side of the wire, below what an SDK shows: HTTP itself, large and slow bodies, old clients."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.doubles.engine import Certificates, Exchange
from tests.e2e.harness import Gateway, Lab, base_config, chat, eventually, replica, together
from tests.e2e.wire import request


def numbered(x: Exchange) -> None:
    """Answers with the number in the request's prompt."""
    text = x.request.json()["messages"][0]["content"]
    if x.request.json().get("stream"):
        x.stream([text])
    else:
        x.reply(x.dialect.completion(text))


def ask(number: int, **more: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": str(number)}], **more)


# --- pipelining and kept connections
def test_pipelined_requests_are_answered_in_order(lab: Lab) -> None:
    """The first is the slowest; streams, documents, refusals and other routes between them."""
    release = threading.Event()

    def script(x: Exchange) -> None:
        if x.request.json()["messages"][0]["content"] == "0":
            x.wait(release)
        numbered(x)

    engine = lab.one(script=script)
    key = lab.key
    sent = [
        request("POST", "/v1/chat/completions", ask(0), key=key),
        request("POST", "/v1/chat/completions", ask(1, stream=True), key=key),
        request("GET", "/health"),
        request("POST", "/v1/chat/completions", b"{", key=key),
        request("GET", "/v1/models/m", key=key),
        request("POST", "/v1/chat/completions", ask(5), key=key),
    ]
    with lab.gateway.wire() as wire:
        wire.send(b"".join(sent))
        assert eventually(lambda: len(engine.requests) == 1)
        release.set()
        first, second = wire.answer().rest(), wire.answer().rest()
        health, refused, model, last = (wire.answer().rest() for _ in range(4))
    assert first.json()["choices"][0]["message"]["content"] == "0"
    assert second.text() == "1" and second.ended_well()
    assert health.json() == {"status": "ok"} and refused.status == 400 and model.json()["id"] == "m"
    assert last.json()["choices"][0]["message"]["content"] == "5"
    assert [entry.json()["messages"][0]["content"] for entry in engine.requests] == ["0", "1", "5"]


def test_a_pipelined_request_waits_until_its_turn(lab: Lab) -> None:
    """It is not sent to an engine while the one before it is being answered."""
    release = threading.Event()
    engine = lab.one(script=lambda x: (x.wait(release), numbered(x))[1])
    with lab.gateway.wire() as wire:
        wire.send(request("POST", "/v1/chat/completions", ask(0), key=lab.key) * 3)
        assert eventually(lambda: engine.running == 1)
        release.set()
        assert [wire.answer().rest().status for _ in range(3)] == [200] * 3
    assert engine.most_running == 1


def test_leaving_with_requests_in_the_pipeline_sends_none_of_them(lab: Lab) -> None:
    engine = lab.one(script=lambda x: x.wait())
    wire = lab.gateway.wire()
    wire.send(request("POST", "/v1/chat/completions", ask(0), key=lab.key) * 5)
    assert eventually(lambda: engine.running == 1)
    wire.close()
    assert engine.last().gone.wait(4) and lab.at_rest()
    assert len(engine.requests) == 1


@pytest.mark.parametrize("pieces", [1, 3, 40])
def test_a_request_in_pieces(lab: Lab, pieces: int) -> None:
    lab.one(script=numbered)
    data = request("POST", "/v1/chat/completions", ask(7), key=lab.key)
    size = len(data) // pieces + 1
    with lab.gateway.wire() as wire:
        for place in range(0, len(data), size):
            wire.send(data[place : place + size])
        assert wire.answer().rest().json()["choices"][0]["message"]["content"] == "7"


def test_a_request_body_in_chunks(lab: Lab) -> None:
    engine = lab.one(script=numbered)
    body = json.dumps(ask(8)).encode()
    head = request("POST", "/v1/chat/completions", key=lab.key, headers=["transfer-encoding: chunked"])
    head = head.replace(b"content-length: 0\r\n", b"").replace(b"\r\ncontent-length: 0", b"")
    with lab.gateway.wire() as wire:
        wire.send(head)
        for place in range(0, len(body), 10):
            wire.send(b"%x\r\n%b\r\n" % (len(body[place : place + 10]), body[place : place + 10]))
        wire.send(b"0\r\n\r\n")
        assert wire.answer().rest().status == 200
    assert engine.last().values("content-length") == [str(len(engine.last().body))]


def test_many_requests_on_one_connection(lab: Lab) -> None:
    lab.one(script=numbered)
    with lab.gateway.wire() as wire:
        for number in range(30):
            kind = {"stream": True} if number % 3 == 0 else {}
            answer = wire.ask("POST", "/v1/chat/completions", ask(number, **kind), key=lab.key).rest()
            assert answer.complete and str(number).encode() in answer.body
            assert answer.header("connection") is None


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_client_that_asks_to_close_is_closed(lab: Lab, stream: bool) -> None:
    lab.one()
    with lab.gateway.wire() as wire:
        body = chat(stream=stream)
        answer = wire.ask("POST", "/v1/chat/completions", body, key=lab.key, headers=["connection: close"])
        assert answer.rest().complete and answer.header("connection") == "close" and wire.at_end()


# --- old clients
@pytest.mark.parametrize("keep", [False, True], ids=["close", "keep-alive"])
def test_http_1_0_gets_a_document_with_a_length(lab: Lab, keep: bool) -> None:
    lab.one()
    headers = ["connection: keep-alive"] if keep else []
    with lab.gateway.wire() as wire:
        answer = wire.ask("POST", "/v1/chat/completions", chat(), key=lab.key, version="1.0", headers=headers).rest()
        assert answer.json()["model"] == "m" and answer.header("transfer-encoding") is None
        assert answer.header("content-length") == str(len(answer.body))


def test_http_1_0_gets_a_stream_that_ends_with_the_connection(lab: Lab) -> None:
    lab.one()
    with lab.gateway.wire() as wire:
        answer = wire.ask("POST", "/v1/chat/completions", chat(stream=True), key=lab.key, version="1.0").rest()
        assert answer.header("transfer-encoding") is None and answer.header("content-length") is None
        assert answer.text() == "Hello, world" and answer.ended_well() and wire.at_end()


# --- methods
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "GET", "PUT", "DELETE", "PATCH"])
def test_other_methods_on_hot_routes_are_405_and_keep_the_connection(lab: Lab, method: str, path: str) -> None:
    engine = lab.one()
    with lab.gateway.wire() as wire:
        answer = wire.ask(method, path, key=lab.key).rest()
        assert answer.status == 405 and answer.header("allow") == "POST"
        assert method == "HEAD" or answer.error()["code"] == "method_not_allowed"
        assert wire.ask("POST", "/v1/chat/completions", chat(), key=lab.key).rest().status == 200
    assert len(engine.requests) == 1


def test_head_of_an_open_path_has_no_body(lab: Lab) -> None:
    with lab.gateway.wire() as wire:
        assert wire.ask("HEAD", "/health").rest().status in (200, 405)
        assert wire.ask("GET", "/health").rest().json() == {"status": "ok"}


# --- expectations and refusals before the body
def test_the_body_is_asked_for_when_it_is_wanted(lab: Lab) -> None:
    engine = lab.one()
    body = json.dumps(chat()).encode()
    head, data = request("POST", "/v1/chat/completions", body, key=lab.key, headers=["expect: 100-continue"]).split(
        b"\r\n\r\n"
    )
    with lab.gateway.wire() as wire:
        wire.send(head + b"\r\n\r\n")
        assert wire.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue"
        wire.send(data)
        assert wire.answer().rest().status == 200
    assert not engine.last().values("expect")


@pytest.mark.parametrize("key", [None, "sk-wrong"])
def test_a_body_nobody_wants_is_not_asked_for(lab: Lab, key: str | None) -> None:
    lab.one()
    with lab.gateway.wire() as wire:
        answer = wire.ask(
            "POST", "/v1/chat/completions", key=key, headers=["expect: 100-continue"], length=50_000_000
        ).rest()
        assert answer.status == 401 and not answer.informational and wire.at_end()


def test_a_large_slow_body_with_a_wrong_key_is_refused_without_being_read(lab: Lab) -> None:
    """The answer comes at the first byte; what is still sent is thrown away."""
    lab.one()
    process = psutil.Process(lab.gateway.process.pid)
    before = process.memory_info().rss
    with lab.gateway.wire() as wire:
        wire.send(request("POST", "/v1/chat/completions", b"{", key="sk-wrong", length=200_000_000))
        answer = wire.answer().rest()
        assert answer.status == 401 and answer.error()["code"] == "invalid_api_key"
        assert answer.header("connection") == "close"
        try:
            for _ in range(50):
                wire.send(b"x" * 1_000_000)
        except (BrokenPipeError, ConnectionError):
            pass
    assert process.memory_info().rss - before < 20 << 20


def test_a_limit_refuses_before_the_body_too(lab: Lab) -> None:
    lab.serve({"m": [replica(lab.engine())]}, limits={"requests": "1/min"})
    assert lab.chat().status == 200
    with lab.gateway.wire() as wire:
        wire.send(request("POST", "/v1/chat/completions", b"{", key=lab.key, length=10_000_000))
        assert wire.answer().rest().status == 429


def test_a_body_that_says_it_is_too_large_is_a_413_at_once(lab: Lab) -> None:
    engine = lab.one()
    with lab.gateway.wire() as wire:
        wire.send(request("POST", "/v1/chat/completions", b"{", key=lab.key, length=300 << 20))
        answer = wire.answer().rest()
        assert answer.status == 413 and answer.error()["code"] and wire.at_end()
    assert not engine.requests


def test_a_body_that_turns_out_too_large_is_a_413_without_reading_on(lab: Lab) -> None:
    """In chunks, so that no length tells."""
    engine = lab.engine()
    lab.serve({"m": [replica(engine)]}, server={"max_body": "1MiB"})
    head = request("POST", "/v1/chat/completions", key=lab.key, headers=["transfer-encoding: chunked"])
    block = b"%x\r\n%b\r\n" % (65536, b"x" * 65536)
    with lab.gateway.wire() as wire:
        wire.send(head.replace(b"\r\ncontent-length: 0", b""))
        for _ in range(20):
            wire.send(block)
        answer = wire.answer().rest()
        assert answer.status == 413 and answer.header("connection") == "close"
    assert not engine.requests


@pytest.mark.parametrize("size", [150_000, 2_000_000])
def test_ordinary_large_prompts_work_by_default(lab: Lab, size: int) -> None:
    engine = lab.one()
    body = chat(messages=[{"role": "user", "content": "日本 text " * (size // 12)}])
    assert lab.call(body).status == 200 and engine.last().json()["messages"] == body["messages"]


def test_ten_bodies_of_twenty_megabytes_stall_nobody(lab: Lab) -> None:
    """An ordinary stream goes on between them, and memory comes back."""
    stop = threading.Event()

    def script(x: Exchange) -> None:
        if not x.request.json().get("stream"):
            x.reply(x.dialect.completion())
            return
        x.begin()
        while not stop.is_set():
            x.delta("tick ")
            x.pause(0.02)
        x.delta({}, "stop")
        x.done()

    engine = lab.one(script=script)
    process = psutil.Process(lab.gateway.process.pid)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 20_000_000}}
    body = json.dumps(chat(messages=[{"role": "user", "content": [image]}])).encode()
    with lab.gateway.wire() as wire:
        stream = wire.ask("POST", "/v1/chat/completions", chat(stream=True), key=lab.key).until(1)
        answers = [answer for _ in range(2) for answer in together([lambda: lab.call(body)] * 5)]
        ticks = len(stream.events())
        stop.set()
        assert stream.rest().ended_well() and len(stream.events()) > ticks + 1
    assert [answer.status for answer in answers] == [200] * 10
    assert all(len(entry.body) > 20_000_000 for entry in engine.requests[1:])
    assert eventually(lambda: process.memory_info().rss < 400 << 20)


def test_a_huge_text_for_an_unknown_model_is_refused(lab: Lab) -> None:
    engine = lab.one()
    answer = lab.chat("unknown", messages=[{"role": "user", "content": "word " * 1_500_000}])
    assert answer.status == 404 and not engine.requests


# --- slow and hostile clients
def test_headers_that_do_not_come_are_a_408(lab: Lab) -> None:
    lab.serve({}, server={"header_timeout": "500ms"})
    with lab.gateway.wire() as wire:
        wire.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        assert wire.answer().rest().status == 408 and wire.at_end()


def test_a_body_that_does_not_come_is_a_408(lab: Lab) -> None:
    lab.serve({"m": [replica(lab.engine())]}, server={"body_timeout": "500ms"})
    with lab.gateway.wire() as wire:
        wire.send(request("POST", "/v1/chat/completions", b"{", key=lab.key, length=100))
        assert wire.answer().rest().status == 408 and wire.at_end()


def test_an_idle_connection_is_closed(lab: Lab) -> None:
    lab.serve({"m": [replica(lab.engine())]}, server={"idle_timeout": "500ms"})
    with lab.gateway.wire() as wire:
        assert wire.ask("POST", "/v1/chat/completions", chat(), key=lab.key).rest().status == 200
        assert wire.at_end()


@pytest.mark.parametrize(
    "start",
    [b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-long: ", b"GET /", b"GET /health HTTP/1.1\r\nhost: x\r\nx",
     b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: "],
    ids=["value", "target", "name", "expect"],
)  # fmt: skip
def test_a_head_without_end_is_refused_early(lab: Lab, start: bytes) -> None:
    """One header that never ends costs no memory, and needs no key."""
    lab.one()
    process = psutil.Process(lab.gateway.process.pid)
    before = process.memory_info().rss
    with lab.gateway.wire() as wire:
        wire.send(start)
        wire.send(b"a" * 200_000)
        assert wire.answer().rest().status in (400, 431)
        try:
            for _ in range(500):
                wire.send(b"a" * 65536)
        except (BrokenPipeError, ConnectionError):
            pass
    assert process.memory_info().rss - before < 20 << 20


def test_headers_that_are_too_large_are_a_431(lab: Lab) -> None:
    lab.serve({"m": [replica(lab.engine())]}, server={"max_header": "8KiB"})
    with lab.gateway.wire() as wire:
        headers = ["x-long: " + "a" * 20_000]
        answer = wire.ask("POST", "/v1/chat/completions", chat(), key=lab.key, headers=headers).rest()
        assert answer.status == 431 and answer.error()["code"] == "headers_too_large" and wire.at_end()
    assert lab.call(chat(), headers=["x-long: " + "a" * 6_000]).status == 200


SMUGGLING = {
    "length and chunks": b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\n\r\n",
    "two lengths": b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    "negative length": b"content-length: -1\r\n\r\n",
    "length in hex": b"content-length: 0x5\r\n\r\nhello",
    "huge length": b"content-length: 99999999999999999999999999\r\n\r\n",
    "odd coding": b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "bad chunk": b"transfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
    "space before the colon": b"content-length : 5\r\n\r\nhello",
    "folded header": b"x-a: b\r\n c: d\r\ncontent-length: 0\r\n\r\n",
    "NUL in a value": b"x-a: b\x00c\r\ncontent-length: 0\r\n\r\n",
    "bare CR": b"x-a: b\rc\r\ncontent-length: 0\r\n\r\n",
}


@pytest.mark.parametrize("case", SMUGGLING)
def test_ambiguous_framing_is_refused_and_the_connection_closed(lab: Lab, case: str) -> None:
    """Where the fault is in the body, an answer may be under way already: then there is only the close."""
    engine = lab.one()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n" % lab.key.encode()
    with lab.gateway.wire() as wire:
        wire.send(head + SMUGGLING[case])
        if not (case == "bad chunk" and wire.at_end()):
            answer = wire.answer().rest()
            assert answer.status in (400, 413) and answer.error()["type"] == "invalid_request_error"
            assert wire.at_end()
    assert not engine.requests


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", b"\x00" * 100, b"GET\r\n\r\n",
     b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
    ids=["TLS", "words", "zeros", "no target", "HTTP/2"],
)  # fmt: skip
def test_what_is_not_http_is_a_400(lab: Lab, data: bytes) -> None:
    with lab.gateway.wire() as wire:
        wire.send(data)
        answer = wire.answer().rest()
        assert answer.status == 400 and answer.error()["code"] == "invalid_http" and wire.at_end()


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_an_offer_to_upgrade_is_ignored(lab: Lab, stream: bool) -> None:
    """Java's own HTTP client sends one with its first request, body and all."""
    lab.one()
    headers = ["connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAAB"]
    assert lab.call(chat(stream=stream), headers=headers).status == 200


def test_more_connections_than_allowed_are_refused_with_a_hint(lab: Lab) -> None:
    lab.serve({"m": [replica(lab.engine())]}, server={"max_connections": 8})
    wires = [lab.gateway.wire() for _ in range(12)]
    try:
        refused = [wire for wire in wires[8:] if wire.answer().rest().status == 503]
        assert len(refused) >= 3
    finally:
        for wire in wires:
            wire.close()
    assert eventually(lambda: lab.chat().status == 200)


# --- one address, many connections
def test_one_address_cannot_take_everybodys_place(lab: Lab) -> None:
    """And gets its places back one by one as its connections end."""
    lab.serve({"m": [replica(lab.engine())]}, server={"max_connections": 60, "max_connections_per_address": 8})
    kept = [connect(lab, "127.0.0.9") for _ in range(8)]
    try:
        for _ in range(5):
            assert health(connect(lab, "127.0.0.9")) == b"503"
        assert lab.chat().status == 200  # from another address
        kept.pop().close()
        assert eventually(lambda: health(connect(lab, "127.0.0.9")) == b"200")
    finally:
        for sock in kept:
            sock.close()


def test_proxies_are_many_callers(lab: Lab) -> None:
    server = {"max_connections": 60, "max_connections_per_address": 2, "trusted_proxies": ["127.0.0.10/32"]}
    lab.serve({"m": [replica(lab.engine())]}, server=server)
    for source, wanted in (("127.0.0.10", b"200"), ("127.0.0.11", b"503")):
        kept = [connect(lab, source) for _ in range(4)]
        assert health(connect(lab, source)) == wanted
        for sock in kept:
            sock.close()


def test_refused_connections_take_no_place_of_others(lab: Lab) -> None:
    """They are let go slowly, so that they can read why; meanwhile they count for nobody."""
    lab.serve({"m": [replica(lab.engine())]}, server={"max_connections": 12, "max_connections_per_address": 2})
    socks = [connect(lab, "127.0.0.9") for _ in range(40)]
    assert lab.chat().status == 200
    for sock in socks:
        sock.close()


def test_the_limit_holds_before_a_handshake_is_over(
    start: Callable[..., Gateway], certificates: Certificates
) -> None:
    """Who connects and says nothing has taken a place already."""
    tls = {"cert_file": str(certificates.cert_file), "key_file": str(certificates.key_file)}
    server = {"tls": tls, "max_connections": 60, "max_connections_per_address": 4}
    verify = ssl.create_default_context(cafile=str(certificates.ca_file))
    gateway = start(base_config({}, [], server=server), scheme="https", verify=verify)

    def ask(source: str) -> bytes:
        with socket.create_connection(("127.0.0.1", gateway.port), 20, (source, 0)) as plain:
            with verify.wrap_socket(plain, server_hostname="localhost") as sock:
                sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                return sock.recv(1 << 16).split(b" ")[1]

    silent = [socket.create_connection(("127.0.0.1", gateway.port), 20, ("127.0.0.9", 0)) for _ in range(4)]
    assert eventually(lambda: ask("127.0.0.9") == b"503")
    assert ask("127.0.0.12") == b"200"
    for sock in silent:
        sock.close()
    assert eventually(lambda: ask("127.0.0.9") == b"200")


def connect(lab: Lab, source: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", lab.gateway.port), 20, (source, 0))


def health(sock: socket.socket) -> bytes:
    """The status of /health, or of the refusal that came before it was asked for."""
    with sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return sock.recv(1 << 16).split(b" ")[1]


# --- parts in great number
@pytest.mark.parametrize(("count", "status"), [(190, 200), (201, 431), (3000, 431)])
def test_heads_of_many_headers_are_refused(lab: Lab, count: int, status: int) -> None:
    engine = lab.one()
    answer = lab.call(chat(), headers=[f"x-{number}: a" for number in range(count)])
    assert answer.status == status and len(engine.requests) == (status == 200)


def test_a_request_needs_a_host_unless_it_is_an_old_one(lab: Lab) -> None:
    lab.one()
    for version, hosts, status in (("1.1", b"", 400), ("1.0", b"", 200), ("1.1", b"hOsT: x\r\n", 200)):
        data = request("POST", "/v1/chat/completions", chat(), key=lab.key, version=version)
        with lab.gateway.wire() as wire:
            wire.send(data.replace(b"host: localhost\r\n", hosts))
            assert wire.answer().rest().status == status


@pytest.mark.parametrize(
    ("start", "block"),
    [(b"0\r\nx: ", b"a" * 4096), (b"0\r\n", b"x: a\r\n" * 500), (b"1;", b"a" * 4096)],
    ids=["one trailer", "trailers", "an extension"],
)
def test_what_is_around_a_body_is_bounded(lab: Lab, start: bytes, block: bytes) -> None:
    """A trailer of 200 MB would stop the event loop for half a minute."""
    engine = lab.one()
    head = request("POST", "/v1/chat/completions", key=lab.key, headers=["transfer-encoding: chunked"])
    with lab.gateway.wire() as wire:
        wire.send(head.replace(b"\r\ncontent-length: 0", b"") + start)
        try:
            for _ in range(2000):
                wire.send(block)
        except (BrokenPipeError, ConnectionError):
            pass
        answer = wire.answer().rest()
        assert answer.status == 400 and answer.error()["code"] == "invalid_http"
    assert not engine.requests


def test_a_body_of_crumbs_costs_what_it_weighs(lab: Lab) -> None:
    """Two million pieces of two bytes would take more than 100 MB."""
    lab.serve({"m": [replica(lab.engine())]}, server={"max_body": "32MiB"})
    process = psutil.Process(lab.gateway.process.pid)
    head = request("POST", "/v1/chat/completions", key=lab.key, headers=["transfer-encoding: chunked"])
    body = json.dumps(chat(padding="x" * 4_000_000)).encode()
    crumbs = [b"2\r\n%b\r\n" % body[place : place + 2] for place in range(0, len(body) - 1, 2)]
    rest = body[2 * len(crumbs) :]
    before = process.memory_info().rss
    with lab.gateway.wire() as wire:
        wire.send(head.replace(b"\r\ncontent-length: 0", b"") + b"".join(crumbs))
        assert process.memory_info().rss - before < 32 << 20
        wire.send((b"%x\r\n%b\r\n" % (len(rest), rest) if rest else b"") + b"0\r\n\r\n")
        assert wire.answer().rest().status == 200


@pytest.mark.parametrize("kind", ["refused", "unknown", "broken"])
def test_memory_of_large_requests_that_fail_comes_back(lab: Lab, kind: str) -> None:
    """The error knows where it was raised, and so all that was at hand there."""
    lab.one(script=lambda x: x.fail("no", 400))
    process = psutil.Process(lab.gateway.process.pid)
    body = json.dumps(chat("nobody" if kind == "unknown" else "m", x="A" * 20_000_000)).encode()
    before = process.memory_info().rss
    for _ in range(20):
        assert lab.call(body[:-1] if kind == "broken" else body).status in (400, 404)
    assert eventually(lambda: process.memory_info().rss - before < 220 << 20)
