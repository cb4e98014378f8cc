"""Requests that two readers could divide differently: framing that is ambiguous, broken or hidden.

Every attempt is judged by the same rules: what the engine gets are the requests of the client's framing and nothing
else, as many as were answered well; no answer appears that no request was sent for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.attacks.target import Target
from tests.fuzz.raw import converse_all, replies
from tests.fuzz.test_requests import HOT, chunked, head, hidden, outer, said, vectors

TOGETHER = 40  # connections at once
OFFERS = ["h2c", "websocket", "HTTP/2.0", "TLS/1.0", "x" * 200]

CODINGS = [
    "Transfer-Encoding: xchunked", "Transfer-Encoding : chunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: x",
    "Transfer-Encoding: x\r\nTransfer-Encoding: chunked", "Transfer-Encoding:[tab]chunked",
    "X: x\nTransfer-Encoding: chunked",
    "Transfer-Encoding\r\n : chunked", "Transfer-Encoding: chunk\x00ed", "Transfer-Encoding: chunked, gzip",
    "Transfer-Encoding: 'chunked'", "Transfer_Encoding: chunked", "Transfer-Encoding: chunked;q=1",
    "Transfer-Encoding: ,chunked", "Transfer-Encoding: chunked,", "TRANSFER-ENCODING: cHuNkEd",
    "Transfer-Encoding: \x0cchunked", "Transfer-Encoding: chunked\x0b", "\x00Transfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r", "Transfer-Encoding: compress, chunked", "Transfer-Encoding: deflate\r\n\tchunked",
    "Transfer-Encoding: chunked\xa0", "Transfer\x1f-Encoding: chunked", "Transfer-Encoding\x85: chunked",
    "Connection: Transfer-Encoding\r\nTransfer-Encoding: chunked",
]  # fmt: skip
LENGTHS = [
    "+{}", "-{}", " {} {}", "{}.0", "{}e0", "0x{:x}", "{}_0", "{:_>8}", "{},{}", "{}, 0", "0, {}", "'{}'", "{}\x00",
    "{};1",
    "\x0b{}", "{}\x0b", "{}\r\nContent-Length: 0", "0\r\nContent-Length: {}", "{}\r\ncontent-length: {}", "", "٤٢",
    "{}\xa0",
    "18446744073709551616", "18446744073709551{}", "4294967296",
]  # fmt: skip
CHUNKS = [
    "10000000000000000\r\n", "ffffffffffffffff\r\n", "-1\r\n", "+5\r\nhello\r\n", "0x5\r\nhello\r\n",
    "5 \r\nhello\r\n",
    " 5\r\nhello\r\n", "5\rhello\r\n", "5\nhello\r\n", "5\r\nhello\n", "5\r\nhelloo\r\n", "5\r\nhell\r\n",
    "5;\nx\r\nhello\r\n",
    '5;a="\r\n0\r\n\r\n', "5;a=\x00\r\nhello\r\n", "\r\n5\r\nhello\r\n", "g\r\n", "0;\r\n\n",
    "00000000000000000\r\nx\r\n",
    "5\r\r\nhello\r\n", "5_0\r\n", "\x005\r\nhello\r\n", "5\r\nhello\r\n0\n",
]  # fmt: skip
LINES = [
    "X: a\r\n Y: b", "X: a\r\n\tTransfer-Encoding: chunked", "X : a", "X\t: a", " X: a", "X", ": a", "X: a\x00b",
    "X: a\x07b",
    "X: a\x7f", "X\x00: a", "X: a\nY: b", "X: a\rY: b", "X: a\r\r", "(X): a", "X@: a", '"X": a', "X: a\r\n\r",
    "X\xff: a",
]  # fmt: skip
TARGETS = [
    ("GET", "http://elsewhere.test/v1/models"), ("POST", "http://u:p@elsewhere.test:1/v1/chat/completions"),
    ("GET", "elsewhere.test:80"), ("CONNECT", "elsewhere.test:80"), ("CONNECT", "/v1/chat/completions"), ("GET", "*"),
    ("OPTIONS", "*"), ("GET", "//elsewhere.test/v1/models"), ("GET", "/v1/models HTTP/1.1\r\nx: y"), ("PRI", "*"),
    ("GET", "/v1/mo dels"), ("GET", "/v1/models\x00"), ("GET", "/v1/models\t"), ("GET", ""), ("GET", "\\v1\\models"),
    ("GET", "file:///etc/passwd"), ("GET", "javascript:1"), ("GET", "http://[::1"), ("GET", "?"), ("G\x00T",
    "/health"),
]  # fmt: skip


def framings(key: str) -> dict[str, bytes]:
    """Name -> one request by any reading, with another in its body."""
    good, inside = json.dumps(said("outer")).encode(), hidden(key)
    ended = b"0\r\n\r\n" + inside
    found = dict(vectors(key))
    for line in CODINGS:
        coded = line.replace("[tab]", "\t").encode("latin-1")
        length = b"content-length: %d"
        found[f"CL.TE {line!r}"] = outer(key, [length % len(ended), coded], ended)
        found[f"TE.CL {line!r}"] = outer(key, [coded, length % 3], chunked(inside))
        found[f"TE alone {line!r}"] = outer(key, [coded], chunked(good))
    for form in LENGTHS:
        line = form.format(len(good), len(good)) if "{:" not in form else form.format(len(good))
        found[f"CL {form!r}"] = outer(key, [b"Content-Length: " + line.encode()], good + inside)
        found[f"CL {form!r}, then TE"] = outer(
            key, [b"Content-Length: " + line.encode(), b"transfer-encoding: chunked"], ended
        )
    for form in CHUNKS:
        found[f"chunk {form!r}"] = outer(key, [b"transfer-encoding: chunked"], form.encode() + ended)
    for form in LINES:
        found[f"line {form!r}"] = outer(key, [form.encode("latin-1"), b"content-length: %d" % len(ended)], ended)
    for offer in OFFERS:
        lines = [b"connection: upgrade", b"upgrade: " + offer.encode(), b"content-length: %d" % len(ended)]
        found[f"upgrade {offer[:20]}"] = outer(key, [*lines, b"transfer-encoding: chunked"], ended)
    for end in (b"\n", b"\r", b"\n\r", b"\r\r\n"):
        lines = [b"host: x", b"authorization: Bearer " + key.encode(), b"content-length: 4"]
        found[f"lines end with {end!r}"] = head(b"POST", HOT.encode(), b"HTTP/1.1", lines, end) + inside
    return found


def judge(target: Target, kind: str, payloads: dict[str, bytes], *, behind: int = 0) -> None:
    """Sends each on a connection of its own. `behind`: good requests in front of each, whose answers may be cut off.

    Raises: AssertionError.
    """
    names = list(payloads)
    for start in range(0, len(names), TOGETHER):
        batch = names[start : start + TOGETHER]
        before = len(target.engine.requests)
        answered = converse_all(target.port, [payloads[name] for name in batch])
        good = 0
        for name, received in zip(batch, answered, strict=True):
            found = [reply for reply in replies(received) if reply.status >= 200]
            assert len(found) <= 1 + behind, (kind, name, received)
            assert all(reply.status < 500 for reply in found), (kind, name, found)
            chats = [reply for reply in found if reply.status == 200 and b"chat.completion" in reply.body]
            good += len(chats)
            target.tally.add(kind, "+".join(str(reply.status) for reply in found) or "closed")
        seen = target.prompts()[before:]
        assert "hidden" not in seen and good <= len(seen) <= good + behind * len(batch), (kind, batch, seen, good)
        target.works()


def requests_inside_requests(target: Target) -> None:
    judge(target, "a request inside a request", framings(target.key))


def odd_targets(target: Target) -> None:
    lines = [b"host: x", b"authorization: Bearer " + target.key.encode()]
    payloads = {
        f"{method} {path}": head(method.encode(), path.encode(), b"HTTP/1.1", [*lines, b"connection: close"])
        for method, path in TARGETS
    }
    judge(target, "targets in other forms", payloads)


def odd_versions(target: Target) -> None:
    key = target.key
    body = json.dumps(said("outer")).encode()
    lines = [b"host: x", b"authorization: Bearer " + key.encode(), b"content-length: %d" % len(body)]
    payloads = {
        version: head(b"POST", HOT.encode(), version.encode(), lines)
        + body
        + hidden(key).replace(b"HTTP/1.1", b"HTTP/9")
        for version in (
            "HTTP/0.9",
            "HTTP/1.2",
            "HTTP/2.0",
            "HTTP/2",
            "HTTP/1.1 ",
            "http/1.1",
            "HTTP/1.10",
            "HTTP/1.1\x00",
        )
    }
    payloads["HTTP/0.9 without headers"] = b"GET /v1/models\r\n"
    payloads["HTTP/2 preface"] = (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + hidden(key)
    )
    payloads["TLS"] = b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + hidden(key)
    judge(target, "other versions and protocols", payloads)


def hosts(target: Target) -> None:
    """The name of the host decides nothing; a request without one is refused, as HTTP demands."""
    body = json.dumps(said("outer")).encode()
    more = [b"authorization: Bearer " + target.key.encode(), b"content-length: %d" % len(body), b"connection: close"]
    cases = {
        "none": [], "empty": [b"host: "], "twice": [b"host: a", b"host: b"], "with a path": [b"host: a/v1/models"],
        "with a user": [b"host: u:p@a"], "not ASCII": [b"host: \xff"], "an address": [b"host: 169.254.169.254"],
        "other letters": [b"HOST: a"], "unclosed bracket": [b"host: [::1"], "huge": [b"host: " + b"a" * 9000],
    }  # fmt: skip
    payloads = {name: head(b"POST", HOT.encode(), b"HTTP/1.1", [*lines, *more]) + body for name, lines in cases.items()}
    judge(target, "hosts", payloads)


def expectations(target: Target) -> None:
    body = json.dumps(said("outer")).encode()
    more = [b"host: x", b"authorization: Bearer " + target.key.encode(), b"connection: close"]
    length = b"content-length: %d" % len(body)
    payloads = {
        value: head(b"POST", HOT.encode(), b"HTTP/1.1", [*more, b"expect: " + value.encode(), length]) + body
        for value in ("100-continue", "100-CONTINUE", "100-continue, 100-continue", "200-ok", "", "\x00", "x" * 5000)
    }
    payloads["and a second request in place of the body"] = head(
        b"POST", HOT.encode(), b"HTTP/1.1", [*more, b"expect: 100-continue", b"content-length: 4"]
    ) + hidden(target.key)
    judge(target, "expectations", payloads)


def pipelines(target: Target) -> None:
    """A good request, then one that is cut off or broken: what comes behind it is not read any more."""
    good = outer(target.key, [b"content-length: %d" % len(body := json.dumps(said("outer")).encode())], body)
    broken: Iterator[tuple[str, bytes]] = iter(
        (name, data) for name, data in framings(target.key).items() if name.startswith(("chunk ", "CL "))
    )
    judge(target, "a broken request behind a good one", {name: good + data for name, data in broken}, behind=1)


ALL = (requests_inside_requests, odd_targets, odd_versions, hosts, expectations, pipelines)
