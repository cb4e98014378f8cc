"""Too much, too slowly, too often: every attack ends in a bounded time, costs bounded memory, and others are served."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from tests.attacks.target import Target, connect, ending, pour, reset
from tests.doubles.engine import Exchange, PeerGone
from tests.e2e.harness import chat, eventually
from tests.e2e.wire import request
from tests.fuzz.raw import replies

HOT = "/v1/chat/completions"
MIB = 1 << 20
GROWTH = 48  # MiB that all attempts of one class may leave behind


def heads(target: Target) -> None:
    """Heads that are large, long or of many parts. Some are legal, and are then answered."""
    body = json.dumps(chat()).encode()
    start = (
        b"POST %b HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\nconnection: close\r\ncontent-length: %d\r\n"
        % (
            HOT.encode(),
            target.key.encode(),
            len(body),
        )
    )
    end = b"\r\n" + body
    many = b"".join(b"h%d:\r\n" % number for number in range(10_000))
    get = b"GET /%b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    cases = {
        "150 headers": (start + b"".join(b"x-%d: a\r\n" % n for n in range(150)) + end, {"200"}),
        "300 headers": (start + b"".join(b"x-%d: a\r\n" % n for n in range(300)) + end, {"431"}),
        "10,000 headers": (start + many[: 60 * 1024].rpartition(b"h")[0] + end, {"431"}),
        "10,000 headers of one name": (start + b"x:\r\n" * 10_000 + end, {"200", "431"}),
        "100 KiB in one header": (start + b"x: " + b"a" * 100_000 + b"\r\n" + end, {"431"}),
        "100 KiB in one name": (start + b"a" * 100_000 + b": b\r\n" + end, {"400", "431"}),
        "a target of 60 KiB": (get % (b"a" * 60_000), {"401"}),
        "a target of 100 KiB": (get % (b"a" * 100_000), {"400", "431"}),
        "a target of 60 KiB of escapes": (get % (b"%2f" * 20_000), {"401"}),
        "a query of 60 KiB": (get % (b"v1/models?" + b"a=b&" * 15_000), {"401"}),
        "a host of 60 KiB": (start.replace(b"host: x", b"host: " + b"x" * 60_000) + end, {"200"}),
        "a key of 60 KiB": (start.replace(target.key.encode(), b"sk-" + b"x" * 60_000) + end, {"401"}),
        "60 KiB of X-Forwarded-For": (start + b"x-forwarded-for: " + b"1.1.1.1," * 7500 + b"\r\n" + end, {"200"}),
    }
    with target.bounded(GROWTH):
        for name, (data, wanted) in cases.items():
            _, received = pour(connect(target.port), data, b"", 0)
            assert ending(received) in wanted, (name, received[:300])
            target.tally.add("large heads", ending(received))
        for name, begun in {"a header": start + b"x: ", "a name": start, "a target": b"GET /"}.items():
            taken, received = pour(connect(target.port), begun, b"a" * 8192, 4000)
            assert ending(received) in ("400", "431", "closed"), (name, taken, received)
            target.tally.add("endless heads", ending(received))
        with connect(target.port) as sock:
            for byte in start + end:
                sock.sendall(bytes([byte]))
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
        target.tally.add("a head byte by byte", "200")
    target.works()


def bodies(target: Target) -> None:
    """Bodies that are no requests, or blow up."""
    start, end = b'{"model":"m","messages":[{"role":"user","content":"x"}],', b"}"
    text = json.dumps(chat()).encode()
    cases: dict[str, tuple[bytes, set[str]]] = {
        "lists in lists": (start + b'"x":' + b"[" * 200_000 + b"]" * 200_000 + end, {"400"}),
        "objects in objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, {"400"}),
        "lists without end": (b"[" * 900_000, {"400"}),
        "15,000 keys": (start + b",".join(b'"k%d":1' % n for n in range(15_000)) + end, {"200"}),
        "90,000 keys": (start + b",".join(b'"%d":1' % n for n in range(90_000)) + end, {"200"}),
        "300,000 lists": (start + b'"x":[' + b",".join([b"[]"] * 300_000) + b"]" + end, {"200"}),
        "a number of 900,000 digits": (start + b'"x":' + b"9" * 900_000 + end, {"400"}),
        "a number beyond all numbers": (start + b'"seed":1e999' + end, {"400"}),
        "a number of many places": (start + b'"temperature":0.' + b"0" * 900_000 + b"1" + end, {"200", "400"}),
        "a key of 900,000 letters": (start + b'"' + b"k" * 900_000 + b'":1' + end, {"200"}),
        "a model of 900,000 letters": (json.dumps(chat("m" * 900_000)).encode(), {"404"}),
        "escapes": (start + b'"x":"' + b"\\u0041" * 140_000 + b'"' + end, {"200"}),
        "half a surrogate": (start + b'"x":"\\ud800"' + end, {"400"}),
        "backslashes": (start + b'"x":"' + b'\\\\\\"' * 200_000 + b'"' + end, {"200"}),
        "no UTF-8": (start + b'"x":"' + b"\xff" * 500_000 + b'"' + end, {"400"}),
        "gzip": (gzip.compress(text), {"400"}),
        "a gzip bomb": (gzip.compress(b"a" * (64 * MIB)), {"400"}),
        "NULs": (b"\x00" * 900_000, {"400"}),
        "UTF-16": (text.decode().encode("utf-16"), {"400"}),
    }
    with target.bounded(2 * GROWTH):
        for name, (body, wanted) in cases.items():
            more = ["connection: close"] + ["content-encoding: gzip"] * ("gzip" in name)
            _, received = pour(connect(target.port), request("POST", HOT, body, key=target.key, headers=more), b"", 0)
            assert ending(received) in wanted, (name, received[:300])
            target.tally.add("bodies that are no requests, or heavy ones", ending(received))
    target.works()


def large_bodies(target: Target) -> None:
    """300 MB, with and without a length or a key, to every kind of route; trailers, extensions, crumbs."""
    key = target.key.encode()
    keyed = b"POST %b HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n" % (HOT.encode(), key)
    keyless = b"POST %b HTTP/1.1\r\nhost: x\r\n" % HOT.encode()
    length, coded = b"content-length: 300000000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"
    plain, chunk = b"a" * 65536, b"10000\r\n" + b"a" * 65536 + b"\r\n"
    admin = b"POST /admin/v1/keys HTTP/1.1\r\nhost: x\r\n"
    with_key = admin + b"authorization: Bearer " + key + b"\r\n"
    models = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + key + b"\r\n"
    cases = {
        "with a length": (keyed + length, plain, {"413"}),
        "in chunks": (keyed + coded, chunk, {"413"}),
        "with a length, no key": (keyless + length, plain, {"401"}),
        "in chunks, no key": (keyless + coded, chunk, {"401"}),
        "to an unknown model": (keyed + coded + b"1\r\n{\r\n", chunk, {"413"}),
        "to administration, no key": (admin + length, plain, {"401"}),
        "to administration, a caller's key": (with_key + length, plain, {"403"}),
        "to a GET": (models + length, plain, {"200"}),
        "to a GET in chunks": (models + coded, chunk, {"200"}),
        "to /health": (b"GET /health HTTP/1.1\r\nhost: x\r\n" + coded, chunk, {"200"}),
        "to nothing": (b"POST /nothing HTTP/1.1\r\nhost: x\r\n" + length, plain, {"401"}),
        "one trailer": (keyed + coded + b"0\r\nx: ", plain, {"400"}),
        "many trailers": (keyed + coded + b"0\r\n", b"x: a\r\n" * 10_000, {"400"}),
        "a chunk extension": (keyed + coded + b"1;", plain, {"400"}),
        "crumbs": (keyed + coded, b"1\r\na\r\n" * 10_000, {"413"}),
    }
    with target.bounded(GROWTH):
        for name, (start, block, wanted) in cases.items():
            _, received = pour(connect(target.port), start, block, 300_000_000 // len(block))
            # An answer may be lost to the reset that our own going on causes.
            assert ending(received) in wanted | {"closed"}, (name, received[:300])
            target.tally.add("300 MB bodies", ending(received))
    target.works()


def _drip(target: Target, start: bytes, drops: Iterator[bytes], most: int) -> str:
    """Sends drop by drop, each a moment after the other, until the gateway has had enough."""
    with connect(target.port, "127.0.0.3") as sock:
        sock.sendall(start)
        sock.settimeout(0.15)  # from one drop to the next
        for _ in range(most):
            try:
                return ending(sock.recv(1 << 16))
            except TimeoutError:
                pass
            except OSError:
                return "closed"
            try:
                sock.sendall(next(drops))
            except OSError:
                return "closed"
    raise AssertionError(f"{start[:60]!r} may go on for ever")


def slow_senders(target: Target) -> None:
    """Each of them, many times at once, while others are served."""
    key = target.key.encode()
    keyed = b"POST %b HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n" % (HOT.encode(), key)
    kinds: dict[str, tuple[bytes, Callable[[], Iterator[bytes]], set[str]]] = {
        "a head byte by byte": (b"G", lambda: itertools.cycle([b"E"]), {"400", "408"}),
        "headers one by one": (keyed, lambda: itertools.cycle([b"x: a\r\n"]), {"408"}),
        "a body byte by byte": (keyed + b"content-length: 500\r\n\r\n", lambda: itertools.cycle([b" "]), {"408"}),
        "chunks one by one": (
            keyed + b"transfer-encoding: chunked\r\n\r\n",
            lambda: itertools.cycle([b"1\r\n \r\n"]),
            {"408"},
        ),
        "trailers": (
            keyed + b"transfer-encoding: chunked\r\n\r\n0\r\n",
            lambda: itertools.cycle([b"x: a\r\n"]),
            {"408"},
        ),
        "nothing": (keyed + b"content-length: 5\r\n\r\n", lambda: itertools.cycle([b""]), {"408"}),
        "line ends": (b"\r\n", lambda: itertools.cycle([b"\r\n"]), {"408", "closed"}),
    }
    jobs = [kind for kind in kinds.values() for _ in range(12)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        running = [pool.submit(_drip, target, start, drops(), 300) for start, drops, _ in jobs]
        for _ in range(5):
            target.works()
        for job, (start, _, wanted) in zip(running, jobs, strict=True):
            assert job.result(90) in wanted, (start, job.result())
            target.tally.add("slow senders", job.result())
    target.works()


def idle_connections(target: Target) -> None:
    with ExitStack() as stack:
        socks = [stack.enter_context(connect(target.port, "127.0.0.5")) for _ in range(100)]
        target.works()
        for sock in socks:
            assert sock.recv(1) == b""
            target.tally.add("idle connections", "closed")
    target.works()


def connection_floods(target: Target) -> None:
    """One address cannot take the place of others, and gets its own back."""
    most = 120
    with ExitStack() as stack:
        socks = [stack.enter_context(connect(target.port, "127.0.0.6")) for _ in range(2 * most)]
        target.works()
        refused = 0
        for sock in socks[most:]:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            _, received = pour(sock, b"", b"", 0)
            refused += ending(received) in ("503", "closed")
            target.tally.add("connections beyond those of one address", ending(received))
        assert refused == most
        for reply in replies(
            pour(socks[0], b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"", 0)[1]
        ):
            assert reply.status == 200
    for _ in range(1500):  # more than the table of files could hold if they were kept
        reset(connect(target.port, "127.0.0.7"))
        target.tally.add("connections that are reset at once", "closed")

    def gets_its_place_back() -> bool:
        data = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        return ending(pour(connect(target.port, "127.0.0.6"), data, b"", 0)[1]) == "200"

    assert eventually(gets_its_place_back)
    target.works()


def slow_readers(target: Target) -> None:
    """Who takes nothing slows down the engine, not the gateway."""
    taken: list[int] = []

    def script(x: Exchange) -> None:
        if not x.request.json().get("stream"):
            x.reply(x.dialect.completion())
            return
        x.begin()
        event = x.dialect.frame(x.dialect.chunk({"content": "x" * 8000}))
        try:
            taken.append(x.push(b"%x\r\n%b\r\n" % (len(event), event), 64 * MIB))
        except PeerGone:
            taken.append(0)
        x.close()

    target.engine.script = script
    with target.bounded(2 * GROWTH), ExitStack() as stack:
        for _ in range(10):
            sock = stack.enter_context(connect(target.port, "127.0.0.8"))
            sock.sendall(request("POST", HOT, chat(stream=True), key=target.key))
        assert eventually(lambda: len(taken) == 10)
        assert max(taken) < 32 * MIB, taken
        target.works()
    target.tally.add("readers that take nothing", "their engine waits", 10)
    assert target.at_rest()


ALL = (heads, bodies, large_bodies, slow_senders, idle_connections, connection_floods, slow_readers)
