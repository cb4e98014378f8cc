"""Headers pass only by list, both ways: canaries from the client never reach an engine, nor an engine's a client."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.doubles.engine import Exchange
from tests.e2e.harness import Lab, chat, replica
from tests.e2e.wire import Answer

CANARY = "canary-7Gq2"
CLIENT = [
    f"x-api-key: {CANARY}", f"api-key: {CANARY}", f"x-goog-api-key: {CANARY}", f"cookie: a={CANARY}",
    f"from: {CANARY}@x.test",
    f"proxy-authorization: Basic {CANARY}", f"x-internal-secret: {CANARY}", f"referer: https://{CANARY}.test/",
    f"x-foo: {CANARY}",
    "connection: keep-alive, x-foo, te", "te: trailers", "trailer: x-foo", "expect: 100-continue",
    f"user-agent: {CANARY}",
    "upgrade-insecure-requests: 1", f"x-forwarded-for: {CANARY}", f"forwarded: for={CANARY}", f"x-real-ip: {CANARY}",
    f"accept-language: {CANARY}", f"accept: text/{CANARY}", "accept-encoding: gzip, br",
    f"openai-organization: {CANARY}",
    f"x-sekisho-tenant: {CANARY}", f"x-session-id: {CANARY}", f"cf-connecting-ip: {CANARY}", f"range: bytes={CANARY}",
    f"if-none-match: {CANARY}", f"origin: https://{CANARY}.test", f"x-http-method-override: {CANARY}",
    f"x-original-url: /{CANARY}",
]  # fmt: skip
ENGINE = {
    "set_cookie": f"a={CANARY}", "server": CANARY, "x_powered_by": CANARY, "www_authenticate": f"Basic realm={CANARY}",
    "proxy_authenticate": CANARY, "authorization": CANARY, "x_api_key": CANARY, "location": f"/{CANARY}", "via": CANARY,
    "alt_svc": CANARY, "strict_transport_security": CANARY, "access_control_allow_origin": f"https://{CANARY}",
    "trailer": CANARY,
    "content_location": CANARY, "link": CANARY, "etag": CANARY, "x_request_id": CANARY,
    "x_ratelimit_limit_requests": CANARY,
    "x_sekisho_replica": CANARY, "refresh": CANARY, "content_disposition": CANARY, "keep_alive": CANARY, "date": CANARY,
    "x_process_time": CANARY, "openai_processing_ms": CANARY, "cache_control": CANARY, "vary": CANARY, "age": "7",
}  # fmt: skip
TO_ENGINE = {"host", "content-type", "accept", "accept-encoding", "user-agent", "x-request-id", "content-length"}
TO_CLIENT = {"x-request-id", "date", "content-type", "content-length", "transfer-encoding", "x-sekisho-attempts"}
OF_STREAMS = {"cache-control", "x-accel-buffering"}
OF_ERRORS = {"retry-after", "www-authenticate"}
SPEECH = {"model": "m", "input": "x", "voice": "v"}


def lines(more: dict[str, str] | None = None) -> str:
    return "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in (ENGINE | (more or {})).items())


def streaming(x: Exchange) -> None:
    body = x.dialect.stream(["a", "b"])
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{lines()}transfer-encoding: chunked\r\n\r\n"
    x.send(head.encode() + b"%x\r\n%b\r\n0\r\nx-trailer: %b\r\n\r\n" % (len(body), body, CANARY.encode()))


KINDS: dict[str, tuple[Callable[[Exchange], None], str, dict[str, object], set[int]]] = {
    "document": (lambda x: x.reply(x.dialect.completion(), **ENGINE), "/v1/chat/completions", chat(), {200}),
    "stream": (streaming, "/v1/chat/completions", chat(stream=True), {200}),
    "embeddings": (
        lambda x: x.reply({"object": "list", "data": [{"index": 0, "embedding": [0.5]}], "model": "x"}, **ENGINE),
        "/v1/embeddings", {"model": "m", "input": "x"}, {200},
    ),
    "sound": (
        lambda x: x.reply(b"RIFF" * 50, **(ENGINE | {"content_type": "audio/wav"})),
        "/v1/audio/speech", SPEECH, {200},
    ),
    "refusal": (lambda x: x.reply(x.dialect.error("bad", 400), 400, **ENGINE), "/v1/chat/completions", chat(), {400}),
    "engine full": (
        lambda x: x.reply(b"{}", 429, **(ENGINE | {"retry_after": "7"})), "/v1/chat/completions", chat(), {429},
    ),
    "engine's credentials": (lambda x: x.reply(b"{}", 401, **ENGINE), "/v1/chat/completions", chat(), {502}),
    "failure": (lambda x: x.reply(b"{}", 500, **ENGINE), "/v1/chat/completions", chat(stream=True), {502}),
    "redirect": (lambda x: x.reply(b"", 307, **ENGINE), "/v1/chat/completions", chat(), {502}),
}  # fmt: skip


def check_client(answer: Answer) -> None:
    names = [name for name, _ in answer.headers]
    assert len(set(names)) == len(names), names
    extra = OF_STREAMS if (answer.header("content-type") or "").startswith("text/event-stream") else set()
    assert set(names) <= TO_CLIENT | extra | (OF_ERRORS if answer.status >= 400 else set()), names
    assert not any(CANARY in value for _, value in answer.headers) and CANARY.encode() not in answer.body


@pytest.mark.parametrize("kind", KINDS)
def test_no_header_passes_that_is_not_listed(lab: Lab, kind: str) -> None:
    script, path, body, statuses = KINDS[kind]
    engine = lab.one("openai_compatible" if kind == "sound" else "vllm", script)
    headers = [line for line in CLIENT if not line.startswith("x-api-key")]
    answer = lab.call(body, path, headers=headers)
    assert answer.status in statuses, answer.body
    check_client(answer)
    for entry in engine.requests:
        names = [name for name, _ in entry.headers]
        assert sorted(names) == sorted(TO_ENGINE), names  # each once
        assert CANARY.encode() not in entry.raw_head and CANARY.encode() not in entry.body
        assert entry.values("host") == [f"127.0.0.1:{engine.port}"] and entry.values("accept-encoding") == ["identity"]


@pytest.mark.parametrize("credential", [None, "engine-key-1"])
def test_an_engine_sees_its_own_credential_or_none(lab: Lab, credential: str | None) -> None:
    engine = lab.engine()
    lab.serve({"m": [replica(engine, **({"api_key": credential} if credential else {}))]})
    assert lab.call(chat(), headers=CLIENT[1:]).status == 200
    assert lab.call(chat(), key=None, headers=[f"x-api-key: {lab.key}"]).status == 200
    for entry in (*engine.requests, *engine.probes):
        assert entry.values("authorization") == ([f"Bearer {credential}"] if credential else [])
        assert not entry.values("x-api-key") and lab.key.encode() not in entry.raw_head


def test_trace_context_and_request_id_pass(lab: Lab) -> None:
    engine = lab.one()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = lab.call(chat(), headers=[f"traceparent: {parent}", "tracestate: a=b", "x-request-id: my-id-1"])
    assert answer.header("x-request-id") == "my-id-1" and engine.last().values("x-request-id") == ["my-id-1"]
    assert engine.last().values("traceparent")[0].split("-")[1] == parent.split("-")[1]
    assert engine.last().values("tracestate") == ["a=b"]


@pytest.mark.parametrize("given", ["a\tb", "a b", "x" * 129, "é", '"<script>"', ""])
def test_a_request_id_that_could_do_harm_is_replaced(lab: Lab, given: str) -> None:
    engine = lab.one()
    answer = lab.call(chat(), headers=[f"x-request-id: {given}"])
    shown = answer.header("x-request-id")
    assert shown and shown.startswith("req_") and engine.last().values("x-request-id") == [shown]
