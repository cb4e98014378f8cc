"""Ways around the routes, and what errors, logs and metrics give away."""

from __future__ import annotations

import hashlib
import json

from tests.attacks.target import Target
from tests.doubles.engine import Exchange
from tests.e2e.harness import ADMIN, chat
from tests.e2e.wire import Answer, request

PREFIXES = [
    "/v1/",
    "/v1/models/",
    "/v1/chat/completions/",
    "//",
    "/v1//",
    "/%2f",
    "/v1;x/",
    "/V1/",
    "/v1/./",
    "/\\",
    "/v1%5c",
]
CLIMBS = [
    "..%2f..%2fmetrics",
    "%2e%2e/health",
    "%252e%252e%252fapi/delete",
    "../../unload",
    "..%5c..%5cslots",
    "..\\..\\slots",
    "..;/metrics",
    "%2e%2e%2f%2e%2e%2fadmin",
    ".%00./metrics",
    "..%c0%af..%c0%afmetrics",
    "%uff0e%uff0e/metrics",
    "....//metrics",
    "..%0d%0ax:y",
    "/v1/load",
    "http://127.0.0.1/metrics",
    "@127.0.0.1/metrics",
    "..?/metrics",
    "..#/metrics",
]
HIDDEN = [
    "/slots",
    "/props",
    "/tokenize",
    "/api/tags",
    "/api/generate",
    "/api/delete",
    "/load",
    "/unload",
    "/v1/load_lora_adapter",
    "/reset_prefix_cache",
    "/sleep",
    "/collective_rpc",
    "/server_info",
    "/flush_cache",
    "/shutdown",
    "/v1/internal/model/load",
    "/v1/chat/completions/",
    "/v1/chat/completions%20",
    "/v1/chat%2fcompletions",
    "/v1/%63hat/completions",
    "/chat/completions",
    "/v1/chat/completions;a=b",
    "/v1/chat/completions%3f",
    "/v1/Chat/Completions",
    "/v1/chat/completions/.",
    "/debug",
    "/.env",
]

GUARDED = ["/v1/chat/completions", "/v1/models", "/admin/v1/keys", "/metrics", "/nothing"]


def paths(target: Target) -> None:
    """Only the listed routes exist: everything else is refused here, and no engine hears of it."""
    engine = target.engine
    targets = [prefix + climb for prefix in PREFIXES for climb in CLIMBS] + HIDDEN
    requests, before = len(engine.requests), {entry.target for entry in engine.probes}
    for path in targets:
        for method in ("GET", "POST"):
            with target.gateway.wire() as wire:
                body = json.dumps(chat()).encode() if method == "POST" else None
                wire.send(request(method, "", body, key=target.key).replace(b"  ", b" %b " % path.encode("latin-1"), 1))
                answer = wire.answer(method).rest()
            assert answer.status in (400, 404, 405), (method, path, answer.status, answer.body)
            answer.error()
            target.tally.add("paths", str(answer.status))
        with target.gateway.wire() as wire:
            wire.send(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode("latin-1"))
            answer = wire.answer().rest()
        assert answer.status in (400, 401), (path, answer.status)
        target.tally.add("paths, without a key", str(answer.status))
    assert len(engine.requests) == requests
    assert {entry.target for entry in engine.probes} - before <= {"/health", "/v1/models", "/metrics"}
    target.works()


def _refused_keys(key: str) -> list[str]:
    """Values of an Authorization header that nobody has."""
    foreign = "sk-proj-" + "Zq7Wx2Vc9Bn4Mk6J" * 3
    return [
        f"Bearer {key[:-1]}x",
        f"Bearer {key[3:]}",
        f"Bearer sk-{'Q9w8E7r6' * 6}",
        f"Bearer {foreign}",
        f"Basic {foreign}",
        key,
        f"Bearer {key} {key}",
        f"Bearer  {key}x",
        f"bearer {key}\x00",
        "Bearer " + "eyJhbGciOiJub25lIn0.eyJzdWIiOiJYMXgyWDN4NCJ9.U1g3",
    ]


def keys_in_answers_and_logs(target: Target) -> None:
    """No eight characters of a key, nor of its hash, in any answer, log or metric; logs say all they can."""
    gateway = target.gateway

    def echo(x: Exchange) -> None:
        sent = "; ".join(f"{name}: {value}" for name, value in x.request.headers)
        x.fail(f"boom: {sent}", 500)

    good, answers = f"Bearer {target.key}", []
    shown: list[str] = [target.key, ADMIN]
    for value in _refused_keys(target.key):
        shown.append(value.rpartition(" ")[2].strip("\x00"))
        for name in ("authorization", "x-api-key"):
            answers += [_ask(target, path, [f"{name}: {value}"]) for path in GUARDED]
    target.engine.once(echo, echo)
    answers += [
        _ask(target, "/v1/chat/completions", [f"authorization: {good}"]),
        _ask(target, "/v1/chat/completions", [f"authorization: {good}"], b"{"),
        _ask(
            target,
            "/v1/chat/completions?api_key=" + target.key,
            [f"authorization: {good}"],
            json.dumps(chat(target.key)).encode(),
        ),
        _ask(target, "/v1/models/" + target.key, [f"authorization: {good}"]),
        _ask(target, "/v1/chat/completions", [f"authorization: {good}", "x-request-id: " + "r" * 20]),
    ]
    assert any(answer.status >= 500 for answer in answers) and any(answer.status == 401 for answer in answers)
    texts = {json.dumps(answer.error(), sort_keys=True) for answer in answers if answer.status == 401}
    assert len(texts) == 1, texts
    bodies = b"\n".join(answer.body for answer in answers if answer.status != 404).decode("latin-1")
    heads = "\n".join(f"{name}: {value}" for answer in answers for name, value in answer.headers)
    written = "\n".join([gateway.log(), (gateway.folder / "stdout").read_text(), gateway.metrics_page(), bodies, heads])
    for key in shown:
        for secret in (key, hashlib.sha256(key.encode()).hexdigest()):
            pieces = {secret[place : place + 8] for place in range(len(secret) - 7)} - {"k" * 8, "A" * 8}
            found = {piece for piece in pieces if piece in written and piece not in ("sk-admin",)}
            assert not found, (secret, found)
    for answer in answers:
        target.tally.add("keys in answers, logs and metrics", str(answer.status))
    target.works()


def _ask(target: Target, path: str, headers: list[str], body: bytes | None = None) -> Answer:
    hot = path.startswith("/v1/chat")
    with target.gateway.wire() as wire:
        data = json.dumps(chat()).encode() if hot and body is None else body
        return wire.ask("POST" if hot else "GET", path, data, headers=headers).rest()


ALL = (paths, keys_in_answers_and_logs)
