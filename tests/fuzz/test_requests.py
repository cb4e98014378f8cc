"""Hostile requests, byte by byte: no 500, no hang, nothing at the engine that should not be there."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles.dialects import UPSTREAM_MODEL
from tests.doubles.engine import Engine
from tests.e2e.harness import Lab, chat, replica
from tests.e2e.wire import request
from tests.fuzz.conftest import SERVER
from tests.fuzz.raw import Reply, converse, converse_all, replies

FUZZ = settings.get_profile("fuzz")
HOT = "/v1/chat/completions"
TOGETHER = 48  # connections at once


@pytest.fixture
def engine(lab: Lab) -> Engine:
    engine = lab.engine()
    lab.serve({"m": [replica(engine)]}, server=SERVER)
    return engine


def prompts(engine: Engine) -> list[str]:
    return [entry.json()["messages"][0]["content"] for entry in engine.requests]


def said(text: str, **more: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": text}], **more)


def check(sent: bytes, received: bytes) -> list[Reply]:
    try:
        found = replies(received)
        for reply in found:
            assert reply.status < 500, reply
            if reply.status >= 400:
                reply.error()
    except (AssertionError, ValueError, KeyError) as error:
        raise AssertionError(f"sent {sent!r}\ngot {received!r}") from error
    return found


def still_works(lab: Lab, engine: Engine) -> None:
    answer = lab.call(said("after"))
    assert answer.status == 200 and answer.json()["choices"] and prompts(engine)[-1] == "after"


# --- mutations of good requests
METHODS = [
    b"GET",
    b"POST",
    b"post",
    b"PUT",
    b"DELETE",
    b"OPTIONS",
    b"PATCH",
    b"TRACE",
    b"PRI",
    b"M-SEARCH",
    b"CONNECT",
    b"P\x00ST",
    b"P OST",
    b"",
    b"POST\t",
    b"\xff\xfe",
    b"X" * 300,
]
TARGETS = [
    b"/",
    b"*",
    b"//",
    b"/v1",
    b"/v1/chat/completions/",
    b"/v1/chat/completions?x=%00",
    b"/V1/CHAT/COMPLETIONS",
    b"http://elsewhere.test/v1/chat/completions",
    b"https://a:b@elsewhere.test:99999/v1/models",
    b"elsewhere.test:80",
    b"/v1/models/%00",
    b"/v1/models/../../etc/passwd",
    b"/v1/models/%2e%2e%2f",
    b"/v1/models/\xff\xfe",
    b"/v1/models/" + "日本".encode(),
    b"/v1/models/%ff",
    b"/%",
    b"/%zz",
    b"/" + b"a" * 5000,
    b"/" + b"a" * 40000,
    b"/v1/chat/completions#x",
    b"/v1/chat/completions;x",
    b"\\v1\\chat",
    b"/v1/chat\x00",
    b"/ HTTP/1.1\r\nx: y",
    b"/admin/v1/replicas",
    b"/admin/v1/replicas/x/drain",
    b"/metrics",
    b"/docs",
    b"/openapi.json",
    b"?",
    b"#",
]
VERSIONS = [
    b"HTTP/1.1",
    b"HTTP/1.0",
    b"HTTP/0.9",
    b"HTTP/2.0",
    b"HTTP/1.2",
    b"HTTP/9.9",
    b"HTTP/1.1 ",
    b"http/1.1",
    b"",
    b"HTTP/1",
    b"HTTP/11",
    b"ICE/1.0",
    b"RTSP/1.0",
]
HEADERS = [
    b"content-length: 0",
    b"content-length: 5",
    b"content-length: -1",
    b"content-length: +5",
    b"content-length: 5, 5",
    b"content-length: 0x10",
    b"content-length: 99999999999999999999999999",
    b"content-length:",
    b"content-length: 1 1",
    b"content-length : 5",
    b"content-length: 70000",
    b"Content-Length: 18446744073709551616",
    b"transfer-encoding: chunked",
    b"transfer-encoding: identity",
    b"transfer-encoding: gzip, chunked",
    b"transfer-encoding: chunked, chunked",
    b"transfer-encoding: xchunked",
    b"transfer-encoding:\x0bchunked",
    b"transfer-encoding : chunked",
    b"Transfer-Encoding: chunked, identity",
    b"transfer-encoding: \tchunked\t",
    b"transfer-encoding: CHUNKED",
    b"transfer-encoding;: chunked",
    b"transfer-encoding:\r\n chunked",
    b"connection: close",
    b"connection: keep-alive",
    b"connection: upgrade",
    b"connection: close, upgrade",
    b"connection: content-length",
    b"upgrade: h2c",
    b"upgrade: websocket",
    b"upgrade: ",
    b"http2-settings: AAMAAABk",
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
    b"sec-websocket-version: 13",
    b"expect: 100-continue",
    b"expect: 5",
    b"host: ",
    b"host: a\r\nhost: b",
    b"x: \x00",
    b"x\x00: y",
    b": y",
    b"x",
    b" folded: y",
    b"x: a\r\n b",
    b"x: \xff\xfe",
    b"x: \r",
    b"x:\ny: z",
    b"x" * 9000 + b": y",
    b"x: " + b"y" * 20000,
    b"authorization: Bearer",
    b"authorization: \xff",
    b"authorization: Bearer " + b"x" * 9000,
    b"x-request-id: \xff\x00",
    b"x-request-id: " + b"a" * 500,
    b"traceparent: \xff\xfe",
    b"tracestate: a\r\n b",
    b"content-type: text/plain",
    b"content-encoding: gzip",
    b"te: trailers",
    b"trailer: content-length",
    b"proxy-connection: keep-alive",
    b"x-forwarded-for: " + b"1.1.1.1, " * 300,
]
BODIES = [
    b"5\r\nhello\r\n0\r\n\r\n",
    b"0\r\n\r\n",
    b"5;ext=1\r\nhello\r\n0\r\n\r\n",
    b'5;a="\n"\r\nhello\r\n0\r\n\r\n',
    b"FFFFFFFFFFFFFFFFFF\r\nx",
    b"7fffffffffffffff\r\nx",
    b"-5\r\nhello\r\n0\r\n\r\n",
    b"5\nhello\n0\n\n",
    b"0x5\r\nhello\r\n",
    b"5\r\nhelloXX0\r\n\r\n",
    b"5 \r\nhello\r\n0\r\n\r\n",
    b"\r\n5\r\nhello\r\n0\r\n\r\n",
    b"5\r\nhello\r\n0\r\nx: y\r\n\r\n",
    b"5\r\nhello\r\n0\r\ncontent-length: 9\r\n\r\n",
    b"5;" + b"e" * 20000 + b"\r\nhello\r\n0\r\n\r\n",
    b"g\r\n",
    b"\x00" * 64,
    b"",
    b"1\r\n{\r\n" * 200 + b"0\r\n\r\n",
    b"{" * 30000,
    b"\xff\xfe",
]


def head(method: bytes, target: bytes, version: bytes, headers: list[bytes], end: bytes = b"\r\n") -> bytes:
    return end.join([method + b" " + target + b" " + version, *headers]) + end + end


@st.composite
def built(draw: st.DrawFn, key: str) -> bytes:
    """A request of which one or two parts are odd."""
    body = json.dumps(said("built")).encode()
    method, target, version, end = b"POST", HOT.encode(), b"HTTP/1.1", b"\r\n"
    headers = [b"host: x", b"authorization: Bearer " + key.encode(), b"content-length: %d" % len(body)]
    for part in draw(st.lists(st.integers(0, 8), min_size=1, max_size=2, unique=True)):
        if part == 0:
            method = draw(st.sampled_from(METHODS))
        elif part == 1:
            target = draw(st.sampled_from(TARGETS))
        elif part == 2:
            version = draw(st.sampled_from(VERSIONS))
        elif part == 3:
            body = draw(st.sampled_from(BODIES))
        elif part == 4:
            body, headers[2] = draw(st.sampled_from(BODIES)), b"transfer-encoding: chunked"
        elif part == 5:
            end = draw(st.sampled_from([b"\n", b"\r", b"\n\r", b"\r\r\n"]))
        elif part == 6:
            headers[draw(st.integers(0, 2))] = draw(st.sampled_from(HEADERS))
        else:
            headers.insert(draw(st.integers(0, 3)), draw(st.sampled_from(HEADERS)))
    return head(method, target, version, headers, end) + body


def mutated(good: bytes, seed: int) -> bytes:
    """One to four changes at places that matter more often than others."""
    choice = random.Random(seed)
    data = bytearray(good)
    for _ in range(choice.randint(1, 4)):
        if not data:
            break
        limit = len(data) if choice.random() < 0.5 else min(len(data), 300)
        place = choice.randrange(limit)
        kind = choice.randrange(6)
        if kind == 0:
            data[place] = choice.randrange(256)
        elif kind == 1:
            del data[place : place + choice.choice([1, 1, 2, 8, 40])]
        elif kind == 2:
            data[place:place] = choice.choice(
                [b"\r", b"\n", b"\r\n", b"\x00", b" ", b"\t", b":", b"\r\n\r\n", b"\xff", b"0"]
            )
        elif kind == 3:
            data[place:place] = data[place : place + choice.choice([4, 20, 100])]
        elif kind == 4:
            del data[place:]
        else:
            data[place:place] = b"\r\n" + choice.choice(HEADERS) + b"\r\n"
    return bytes(data)


def examples(strategy: st.SearchStrategy[bytes], count: int) -> list[bytes]:
    """Hypothesis' choice, gathered first so that many can be under way at once."""
    found: list[bytes] = []

    @settings(FUZZ, max_examples=count)
    @given(strategy)
    def gather(data: bytes) -> None:
        found.append(data)

    gather()
    return found


def send(lab: Lab, payloads: list[bytes]) -> list[list[Reply]]:
    """Sends each on a connection of its own and checks what comes back."""
    found = []
    for start in range(0, len(payloads), TOGETHER):
        batch = payloads[start : start + TOGETHER]
        found += [check(*pair) for pair in zip(batch, converse_all(lab.gateway.port, batch), strict=True)]
    return found


def test_odd_requests(lab: Lab, engine: Engine) -> None:
    found = send(lab, examples(built(lab.key), 320))
    assert set(prompts(engine)) <= {"built"}
    statuses = {reply.status for one in found for reply in one}
    assert {200, 400, 401, 404, 405, 408} <= statuses, statuses  # odd enough, and not hopeless
    still_works(lab, engine)


def test_damaged_requests(lab: Lab, engine: Engine) -> None:
    """What comes through the damage reaches the engine with the gateway's own framing, or not at all."""
    good = (
        request("POST", HOT, said("one"), key=lab.key)
        + request("POST", HOT, said("two", stream=True), key=lab.key, headers=["expect: 100-continue"])
        + request("GET", "/v1/models", key=lab.key)
    )
    send(lab, [mutated(good, seed) for seed in range(TOGETHER * 6)])
    assert engine.requests
    for entry in engine.requests:
        assert entry.json()["model"] == UPSTREAM_MODEL and entry.target == HOT and entry.method == "POST"
        assert len(entry.values("content-length")) == 1 and not entry.values("transfer-encoding")
    still_works(lab, engine)


def test_noise(lab: Lab, engine: Engine) -> None:
    send(lab, examples(st.binary(max_size=200), 150))
    assert not engine.requests
    still_works(lab, engine)


# --- requests hidden in other requests
def hidden(key: str) -> bytes:
    return request("POST", HOT, said("hidden"), key=key)


def outer(
    key: str, headers: list[bytes], body: bytes, *, method: bytes = b"POST", version: bytes = b"HTTP/1.1"
) -> bytes:
    return head(
        method, HOT.encode(), version,
        [b"host: x", b"authorization: Bearer " + key.encode(), b"content-type: application/json", *headers],
    ) + body  # fmt: skip


def chunked(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n0\r\n\r\n" % (len(data), extension, data)


def vectors(key: str) -> dict[str, bytes]:
    """Each is one request by any reading a front proxy may have had, with another inside its body."""
    good = json.dumps(said("outer")).encode()
    inside = hidden(key)
    ended = b"0\r\n\r\n" + inside
    length = b"content-length: %d"
    whole = length % len(good + inside)
    found = {
        "CL.TE": outer(key, [length % len(ended), b"transfer-encoding: chunked"], ended),
        "CL.TE, TE first": outer(key, [b"transfer-encoding: chunked", length % len(ended)], ended),
        "TE.CL": outer(key, [b"transfer-encoding: chunked", b"content-length: 4"], chunked(inside)),
        "CL twice, the longer first": outer(key, [whole, length % len(good)], good + inside),
        "CL twice, the shorter first": outer(key, [length % len(good), whole], good + inside),
        "CL twice, in other letters": outer(key, [length % len(good), whole.title()], good + inside),
        "CL as a list": outer(key, [b"content-length: %d, %d" % (len(good), len(good + inside))], good + inside),
        "CL with a sign": outer(key, [b"content-length: +%d" % len(good + inside)], good + inside),
        "CL in hex": outer(key, [b"content-length: 0x%x" % len(good + inside)], good + inside),
        "CL with a space before the colon": outer(key, [b"content-length : %d" % len(good + inside)], good + inside),
        "CL folded": outer(key, [b"content-length:\r\n %d" % len(good + inside)], good + inside),
        "CL behind a NUL": outer(key, [b"content-length: \x00%d" % len(good + inside)], good + inside),
        "CL negative": outer(key, [b"content-length: -1"], inside),
        "CL too large for a number": outer(key, [b"content-length: 18446744073709551616"], inside),
        "bare LF": outer(key, [b"x: y\ntransfer-encoding: chunked", length % len(ended)], ended),
        "bare CR": outer(key, [b"x: y\rtransfer-encoding: chunked", length % len(ended)], ended),
        "a header without a name": outer(key, [b": transfer-encoding: chunked", length % len(ended)], ended),
        "TE in HTTP/1.0": outer(key, [b"transfer-encoding: chunked", length % len(ended)], ended, version=b"HTTP/1.0"),
        "GET with a body": outer(key, [whole], good + inside, method=b"GET"),
        "a chunk size that overflows": outer(key, [b"transfer-encoding: chunked"], b"10000000000000000\r\n" + inside),
        "a negative chunk": outer(key, [b"transfer-encoding: chunked"], b"-1\r\n" + inside),
        "a chunk ended by LF": outer(key, [b"transfer-encoding: chunked"], b"5\r\nhello\n0\n\n" + inside),
        "a chunk size ended by LF": outer(key, [b"transfer-encoding: chunked"], b"0\n\n" + inside),
        "a chunk longer than it says": outer(key, [b"transfer-encoding: chunked"], b"3\r\nhello\r\n" + ended),
        "an extension with a line end": outer(key, [b"transfer-encoding: chunked"], b'5;a="\n0\r\n\r\n' + inside),
        "a trailer that is a request": outer(key, [b"transfer-encoding: chunked"], b"0\r\n" + inside),
    }  # fmt: skip
    for name, line in (
        ("twice, then another", b"transfer-encoding: chunked\r\ntransfer-encoding: cow"),
        ("twice, another first", b"transfer-encoding: cow\r\ntransfer-encoding: chunked"),
        ("identity last", b"transfer-encoding: chunked, identity"),
        ("identity twice", b"transfer-encoding: chunked\r\nTransfer-Encoding: identity"),
        ("another word", b"transfer-encoding: xchunked"),
        ("in quotes", b'transfer-encoding: "chunked"'),
        ("a vertical tab", b"transfer-encoding:\x0bchunked"),
        ("a NUL", b"transfer-encoding: chunked\x00"),
        ("a space before the colon", b"transfer-encoding : chunked"),
        ("a tab before the colon", b"transfer-encoding\t: chunked"),
        ("folded", b"transfer-encoding:\r\n chunked"),
        ("a space before the name", b" transfer-encoding: chunked"),
        ("not ASCII", b"transfer-encoding: ch\xfcnked"),
        ("empty", b"transfer-encoding: "),
    ):
        found[f"CL.TE, TE {name}"] = outer(key, [length % len(ended), *line.split(b"\r\n", 1)], ended)
    for name, offer in (
        ("h2c", [b"connection: upgrade", b"upgrade: h2c"]),
        ("websocket", [b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="]),
    ):
        found |= {
            f"{name}: CL.TE": outer(key, [*offer, length % len(ended), b"transfer-encoding: chunked"], ended),
            f"{name}: TE then CL": outer(key, [*offer, b"transfer-encoding: chunked", length % 4], chunked(inside)),
            f"{name}: CL twice": outer(key, [*offer, whole, length % len(good)], good + inside),
            f"{name}: CL twice, in other letters": outer(
                key, [*offer, length % len(good), whole.title()], good + inside
            ),
            f"{name}: TE twice": outer(
                key, [*offer, b"transfer-encoding: chunked", b"transfer-encoding: identity", length % len(ended)], ended
            ),
            f"{name}: TE other letters": outer(
                key, [*offer, b"transfer-encoding: chunked", b"Transfer-Encoding: identity"], chunked(good + inside)
            ),
            f"{name}: no body": outer(key, offer, b""),
            f"{name}: a list": outer(key, [*offer, length % len(good), b"connection: content-length"], good),
        }
    return found


TAKEN = {"h2c: a list", "websocket: a list"}


def test_a_request_inside_a_request_is_never_answered(lab: Lab, engine: Engine) -> None:
    """Refused, or taken for the one request it is."""
    given = vectors(lab.key)
    found = dict(zip(given, send(lab, list(given.values())), strict=True))
    twice = {name: answers for name, answers in found.items() if len(answers) > 1}
    assert not twice and "hidden" not in prompts(engine)
    assert {name for name, (answer,) in found.items() if answer.status == 200} == TAKEN
    assert {answer.status for name, (answer,) in found.items() if name not in TAKEN} == {400, 405}
    assert len(engine.requests) == len(TAKEN)
    still_works(lab, engine)


# --- the rest of a connection's life
def test_a_request_that_stops_anywhere(lab: Lab, engine: Engine) -> None:
    whole = request("POST", HOT, said("partial"), key=lab.key)
    for answers in send(lab, [whole[:size] for size in range(1, len(whole), 2)]):
        assert [answer.status for answer in answers] == [408]
    assert not engine.requests
    still_works(lab, engine)


def test_a_long_pipeline_with_rubbish_at_its_end(lab: Lab, engine: Engine) -> None:
    sent = request("POST", HOT, said("piped"), key=lab.key) * 100 + b"\x00\x01\x02"
    found = check(sent, converse(lab.gateway.port, sent))
    assert {reply.status for reply in found} <= {200, 400}
    assert len([reply for reply in found if reply.status == 200]) <= len(engine.requests) <= 100
    still_works(lab, engine)


def test_offers_to_upgrade(lab: Lab, engine: Engine) -> None:
    cases = list(itertools.product(["h2c", "websocket", "TLS/1.0", "", "a, b"], [HOT, "/v1/models", "/nothing"]))

    def offering(offer: str, path: str) -> bytes:
        headers = ["connection: Upgrade, HTTP2-Settings", f"upgrade: {offer}", "http2-settings: AAMAAABk"]
        hot = path == HOT
        return request("POST" if hot else "GET", path, said("offer") if hot else None, key=lab.key, headers=headers)

    for case, answers in zip(cases, send(lab, [offering(*case) for case in cases]), strict=True):
        assert [answer.status for answer in answers] == [404 if case[1] == "/nothing" else 200], case
    still_works(lab, engine)


@pytest.mark.parametrize("target", ["example.test:443", "http://example.test/", HOT])
def test_it_is_no_proxy(lab: Lab, engine: Engine, target: str) -> None:
    sent = b"CONNECT %b HTTP/1.1\r\nhost: x\r\n\r\n" % target.encode() + hidden(lab.key)
    found = check(sent, converse(lab.gateway.port, sent))
    assert [reply.status for reply in found] == [400] and not engine.requests
    still_works(lab, engine)
