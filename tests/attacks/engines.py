"""Engines that attack: each of their answers ends in bounded time and memory, with an error that a client can read."""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import repeat

from tests.attacks.target import Target
from tests.doubles.engine import Engine, Exchange
from tests.e2e.harness import eventually, replica, together
from tests.e2e.wire import Answer

MIB = 1 << 20
PATIENCE = {"connect": "10s", "first_byte": "500ms", "idle": "500ms", "total": "2s"}
PATIENT = {**PATIENCE, "total": None}  # what ends an answer then is not the time that it takes
TAKES_TIME = {"comments without end", "events without end", "line ends without end"}  # they could be an answer
GROWTH = 96  # MiB
LONGEST = 25.0  # seconds that a script goes on sending at most
OK = b"HTTP/1.1 200 OK\r\n"
JSON, EVENTS, CHUNKED = (
    b"content-type: application/json\r\n",
    b"content-type: text/event-stream\r\n",
    b"transfer-encoding: chunked\r\n",
)
GZIPPED, DEFLATED = b"content-encoding: gzip\r\n", b"content-encoding: deflate\r\n"
CODES = {
    "engine_connection_lost",
    "engine_error",
    "engine_timeout",
    "invalid_value",
    "unsupported_value",
    "engine_busy",
}


def endless(start: bytes, block: bytes) -> Iterator[bytes]:
    yield start
    yield from repeat(block)


def bomb(size: int) -> bytes:
    return gzip.compress(bytes(size))


def _document(x: Exchange) -> bytes:
    return x.dialect.dump(x.dialect.completion())


def _whole(x: Exchange, *lines: bytes, status: bytes = OK) -> bytes:
    body = _document(x)
    return status + JSON + b"".join(lines) + b"content-length: %d\r\n\r\n%b" % (len(body), body)


# What an engine sends, as pieces. Those in GOOD are to be taken for what they are.
ANSWERS: dict[str, Callable[[Exchange], Iterator[bytes]]] = {
    "a head without end": lambda x: endless(OK, b"x: a\r\n" * 1000),
    "one header without end": lambda x: endless(OK + b"x: ", b"a" * 65536),
    "interim answers without end": lambda x: endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "early hints without end": lambda x: endless(b"", b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" * 1000),
    "10,000 headers": lambda x: iter([OK + b"".join(b"h%d: a\r\n" % n for n in range(10_000)) + b"\r\n{}"]),
    "a reason without end": lambda x: endless(b"HTTP/1.1 200 ", b"a" * 65536),
    "a status of ten digits": lambda x: iter([b"HTTP/1.1 2000000000 OK\r\n\r\n"]),
    "a body without end": lambda x: endless(OK + JSON + b"\r\n", b"{" * 65536),
    "chunks without end": lambda x: endless(OK + JSON + CHUNKED + b"\r\n", b"1000\r\n" + b"a" * 4096 + b"\r\n"),
    "a chunk extension without end": lambda x: endless(OK + JSON + CHUNKED + b"\r\n1;", b"a" * 65536),
    "one trailer without end": lambda x: endless(OK + JSON + CHUNKED + b"\r\n2\r\n{}\r\n0\r\nx: ", b"a" * 65536),
    "trailers without end": lambda x: endless(OK + JSON + CHUNKED + b"\r\n2\r\n{}\r\n0\r\n", b"x: a\r\n" * 1000),
    "a gzip bomb": lambda x: iter([OK + JSON + GZIPPED + b"\r\n" + bomb(256 * MIB)]),
    "a deflate bomb": lambda x: iter([OK + JSON + DEFLATED + b"\r\n" + zlib.compress(bytes(256 * MIB))]),
    "a gzip bomb in a stream": lambda x: iter([OK + EVENTS + GZIPPED + b"\r\n" + bomb(256 * MIB)]),
    "gzip in gzip": lambda x: iter([OK + JSON + b"content-encoding: gzip, gzip\r\n\r\n" + bomb(100)]),
    "an unknown encoding": lambda x: iter([OK + JSON + b"content-encoding: br\r\n\r\nxxx"]),
    "gzip that is none": lambda x: iter([OK + JSON + GZIPPED + b"content-length: 5\r\n\r\nhello"]),
    "204 with a body": lambda x: iter([_whole(x, status=b"HTTP/1.1 204 No Content\r\n")]),
    "304 with a body": lambda x: iter([_whole(x, status=b"HTTP/1.1 304 Not Modified\r\n")]),
    "101": lambda x: iter(
        [b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n" + b"x" * 999]
    ),
    "401 and a wish": lambda x: iter([b"HTTP/1.1 401 No\r\nwww-authenticate: Basic\r\ncontent-length: 0\r\n\r\n"]),
    "407": lambda x: iter([b"HTTP/1.1 407 No\r\nproxy-authenticate: Basic\r\ncontent-length: 0\r\n\r\n"]),
    "a length that is too long": lambda x: iter([OK + JSON + b"content-length: 9999\r\n\r\n{}"]),
    "a length below zero": lambda x: iter([OK + JSON + b"content-length: -1\r\n\r\n{}"]),
    "a length beyond all numbers": lambda x: iter([OK + JSON + b"content-length: 18446744073709551617\r\n\r\n{}"]),
    "two lengths": lambda x: iter([OK + JSON + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}x"]),
    "a length and chunks": lambda x: iter([OK + JSON + CHUNKED + b"content-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]),
    "a chunk of a negative size": lambda x: iter([OK + JSON + CHUNKED + b"\r\n-2\r\n{}\r\n0\r\n\r\n"]),
    "a chunk size that overflows": lambda x: iter([OK + JSON + CHUNKED + b"\r\nfffffffffffffffff\r\n{}"]),
    "a web page": lambda x: iter([OK + b"content-type: text/html\r\ncontent-length: 13\r\n\r\n<html></html>"]),
    "no UTF-8": lambda x: iter([OK + JSON + b'content-length: 9\r\n\r\n{"a":"\xff\xfe"}'[:100]]),
    "a stream of no UTF-8": lambda x: iter([OK + EVENTS + b'\r\ndata: {"choices":[{"index":0,"delta":"\xff"}]}\n\n']),
    "a stream of one event without end": lambda x: endless(OK + EVENTS + b"\r\ndata: ", b"a" * 65536),
    "comments without end": lambda x: endless(OK + EVENTS + b"\r\n", b": x\n\n" * 1000),
    "events without end": lambda x: endless(OK + EVENTS + b"\r\n", x.dialect.frame(x.dialect.chunk({"content": "x"}))),
    "line ends without end": lambda x: endless(OK + EVENTS + b"\r\n", b"\n" * 4096),
    "an error of 300 MB": lambda x: endless(
        b"HTTP/1.1 500 No\r\n" + JSON + b"content-length: 300000000\r\n\r\n", b"a" * 65536
    ),
    "an error in lists": lambda x: iter([_error(b"[" * 100_000)]),
    "a list in lists": lambda x: iter([OK + JSON + b"content-length: 200000\r\n\r\n" + b"[" * 200_000]),
    "a redirect": lambda x: iter([_moved(x, b"307 Temporary Redirect")]),
    "a permanent redirect": lambda x: iter([_moved(x, b"308 Permanent Redirect")]),
    "a redirect to a GET": lambda x: iter([_moved(x, b"303 See Other")]),
    "HTTP/0.9": lambda x: iter([b"<html>hello</html>"]),
    "HTTP/2": lambda x: iter([b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + bytes(18)]),
    "a space before a colon": lambda x: iter([_whole(x, b"x : y\r\n")]),
    "a folded header": lambda x: iter([_whole(x, b"x: y\r\n z\r\n")]),
    "NUL in a header": lambda x: iter([_whole(x, b"x: \x00\r\n")]),
    "nothing": lambda x: iter([]),
    "half a status": lambda x: iter([b"HTTP/1."]),
}
GOOD: dict[str, Callable[[Exchange], Iterator[bytes]]] = {
    "cookies and servers": lambda x: iter([_whole(x, b'set-cookie: a=b\r\nserver: x\r\nalt-svc: h3=":1"\r\n')]),
    "two answers": lambda x: iter([_whole(x) + _whole(x).replace(b"Hello", b"FORGED")]),
    "interim answers before it": lambda x: iter([b"HTTP/1.1 102 Processing\r\n\r\n" * 20 + _whole(x)]),
    "bytes behind it": lambda x: iter([_whole(x) + b"\x00" * 5000]),
}


def _error(body: bytes) -> bytes:
    return b"HTTP/1.1 500 No\r\n" + JSON + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def _moved(x: Exchange, status: bytes) -> bytes:
    where = f"http://127.0.0.1:{x.engine.port}/v1/elsewhere".encode()
    return b"HTTP/1.1 %b\r\nlocation: %b\r\ncontent-length: 0\r\n\r\n" % (status, where)


def _script(x: Exchange) -> None:
    """Sends what the model's name says, then waits for the gateway to leave."""
    name = x.request.json()["model"].replace("_", " ")
    make = (ANSWERS | GOOD)[name]
    deadline = time.monotonic() + LONGEST
    for piece in make(x):
        x.send(piece)
        assert time.monotonic() < deadline, "the gateway takes it without end"
    x.pause(0.0 if name in GOOD else LONGEST)
    x.close()


def hostile_answers(target: Target) -> None:
    """Each alone behind a model of its own, whole and streamed, all at once."""
    with Engine(script=_script) as engine:
        entries = {
            _model(name): [replica(engine, model=_model(name), timeouts=PATIENCE if name in TAKES_TIME else PATIENT)]
            for name in (*ANSWERS, *GOOD)
        }
        target.gateway.configure(target.config(entries, max_response="8MiB", max_event="1MiB"))
        with target.bounded(GROWTH):
            for stream in (False, True):
                for start in range(0, len(ANSWERS), 8):
                    some = list(ANSWERS)[start : start + 8]
                    answers = together([_asking(target, name, stream) for name in some])
                    for name, answer in zip(some, answers, strict=True):
                        target.tally.add("hostile answers", _refusal(name, answer))
                    target.works()
            for name in GOOD:
                answer = target.lab.chat(_model(name))
                assert answer.status == 200 and b"FORGED" not in answer.body, (name, answer.body)
                assert not {"set-cookie", "server", "alt-svc"} & {header for header, _ in answer.headers}
                target.tally.add("odd answers that are answers", "200")
        assert target.at_rest() and not engine.surprises, engine.surprises
        assert not any(entry.target.endswith("elsewhere") for entry in (*engine.requests, *engine.probes))
    target.gateway.configure(target.config())
    target.works()


def _model(name: str) -> str:
    """Names of models have no blanks."""
    return name.replace(" ", "_")


def _asking(target: Target, name: str, stream: bool) -> Callable[[], Answer]:
    return lambda: target.lab.chat(_model(name), stream=stream)


def _refusal(name: str, answer: Answer) -> str:
    assert answer.complete, (name, answer.status, answer.body[-200:])
    if answer.status == 200:
        errors = answer.stream_errors()
        assert len(errors) == 1 and errors[0]["code"] in CODES and answer.events()[-1] != "[DONE]", (
            name,
            answer.body[-300:],
        )
        return "an error event"
    assert answer.status in (400, 429, 502, 503, 504) and answer.error()["code"] in CODES, (
        name,
        answer.status,
        answer.body,
    )
    return str(answer.status)


def early_answers(target: Target) -> None:
    """An answer before the request is read, and one on a connection where nothing was asked."""
    early = Engine(script=_script)
    with early:
        early.script = lambda x: (
            x.reply(x.dialect.completion()),
            x.send(_whole(x).replace(b"Hello", b"FORGED")),
            None,
        )[2]
        target.gateway.configure(target.config({"early": [replica(early, model="early", timeouts=PATIENCE)]}))
        for _ in range(20):
            answer = target.lab.chat("early")
            assert b"FORGED" not in answer.body and answer.status in (200, 502)
            target.tally.add("a second answer on a kept connection", str(answer.status))
    target.gateway.configure(target.config())
    assert eventually(target.at_rest)
    target.works()


ALL = (hostile_answers, early_answers)
