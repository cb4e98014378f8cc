"""Who gets in, to what, and what of it is ever told to others."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.doubles.dialects import UPSTREAM_MODEL
from tests.doubles.engine import Exchange
from tests.e2e.harness import ADMIN, Gateway, Lab, base_config, chat, digest, eventually, replica, together
from tests.e2e.wire import Wire, request

OPERATOR = "sk-operator" + "o" * 40


# --- the guard
CLOSED = (
    "/metrics", "/docs", "/openapi.json", "/v1/models", "/v1/models/m", "/admin/v1/replicas", "/admin/v1/reload",
    "/v1/chat/completions", "/nothing", "/", "/docs/oauth2-redirect", "/redoc", "/health/", "/metrics/", "//health",
    "/health/../metrics", "/%68ealth",
)  # fmt: skip


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "DELETE"])
def test_without_a_key_every_path_is_closed_known_or_not(lab: Lab, method: str, path: str) -> None:
    lab.one()
    answer = lab.call(None, path, method=method, key=None)
    assert answer.status in (401, 404) or (path == "/%68ealth" and answer.status in (200, 405))
    if method != "HEAD" and answer.status != 200:
        assert answer.error()["code"] in ("invalid_api_key", "not_found", "method_not_allowed")
    assert b"sekisho" not in answer.body


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_and_readiness_are_open_with_a_bare_status(lab: Lab, path: str) -> None:
    lab.one()
    lab.gateway.wait_for_replica()
    answer = lab.call(None, path, method="GET", key=None)
    assert answer.status == 200 and set(answer.json()) == {"status"} and answer.header("x-request-id")


def test_readiness_says_whether_anything_can_be_served(lab: Lab) -> None:
    engine = lab.engine()
    engine.healthy = False
    lab.serve({"m": [replica(engine)]})
    lab.gateway.wait_for_replica("down")
    answer = lab.call(None, "/ready", method="GET", key=None)
    assert (answer.status, set(answer.json())) == (503, {"status"}) and answer.header("retry-after")
    assert lab.call(None, "/health", method="GET", key=None).status == 200
    engine.healthy = True
    assert eventually(lambda: lab.call(None, "/ready", method="GET", key=None).status == 200)


def test_a_replica_that_is_loading_is_not_ready_and_gets_no_requests(lab: Lab) -> None:
    """It lists models and answers 503 `Loading model` to everything else; it recovers alone and nothing loads it."""
    loading = {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
    engine = lab.engine("llama_server")
    engine.probe = lambda x: x.reply(loading, 503)
    lab.serve({"m": {"queue": {"max_waiting": 0}, "replicas": [replica(engine)]}})
    lab.gateway.wait_for_replica("loading")
    answer = lab.chat()
    assert answer.status == 503 and answer.header("retry-after") and not engine.requests
    assert lab.call(None, "/ready", method="GET", key=None).status == 503
    engine.probe = None
    lab.gateway.wait_for_replica()
    assert lab.chat().status == 200


def test_probes_only_ask_and_never_generate(lab: Lab) -> None:
    engine = lab.one()
    lab.gateway.wait_for_replica()
    assert not engine.requests and {probe.target for probe in engine.probes} <= {"/health", "/metrics", "/v1/models"}
    assert {probe.method for probe in engine.probes} == {"GET"}


def roles(lab: Lab) -> None:
    operator = {"name": f"{lab.tenant}-ops", "models": [],
                "keys": [{"name": "operator", "sha256": digest(OPERATOR), "role": "operator"}]}  # fmt: skip
    lab.serve({"m": [replica(lab.engine())]}, tenants=[operator])


@pytest.mark.parametrize(
    ("path", "method", "statuses"),
    [("/metrics", "GET", (403, 403, 200)), ("/admin/v1/replicas", "GET", (403, 200, 200)),
     ("/admin/v1/reload", "POST", (403, 200, 200)), ("/admin/v1/nothing", "GET", (404, 404, 404)),
     ("/docs", "GET", (200, 200, 200)), ("/openapi.json", "GET", (200, 200, 200))],
)  # fmt: skip
def test_roles_open_operators_paths_step_by_step(
    lab: Lab, path: str, method: str, statuses: tuple[int, int, int]
) -> None:
    roles(lab)
    for key, status in zip((lab.key, OPERATOR, ADMIN), statuses, strict=True):
        answer = lab.call(None, path, method=method, key=key)
        assert answer.status == status, key[:6]
        if status >= 400:
            assert answer.error()["code"] in ("forbidden", "not_found")


def test_draining_a_replica_needs_an_operator_and_stops_new_requests(lab: Lab) -> None:
    roles(lab)
    (state,) = lab.gateway.replicas()
    path = f"/admin/v1/replicas/{state['id']}"
    assert lab.call(None, f"{path}/drain", key=lab.key).status == 403
    assert lab.call(None, f"{path}/drain", key=OPERATOR).json()["draining"] is True
    refused = lab.chat()
    assert refused.status == 503 and refused.header("retry-after")
    assert lab.call(None, f"{path}/undrain", key=OPERATOR).json()["draining"] is False
    assert lab.chat().status == 200
    assert lab.call(None, "/admin/v1/replicas/other/drain", key=OPERATOR).status == 404


def test_metrics_and_docs_open_only_as_configured(lab: Lab) -> None:
    engine = lab.engine()
    lab.serve({"m": [replica(engine)]}, metrics={"allow": ["127.0.0.0/8"]}, server={"public_docs": True})
    for path in ("/metrics", "/docs", "/openapi.json"):
        assert lab.call(None, path, method="GET", key=None).status == 200
    lab.serve({"m": [replica(engine)]}, metrics={"allow": ["10.0.0.0/8"]})
    for path in ("/metrics", "/docs", "/openapi.json"):
        assert lab.call(None, path, method="GET", key=None).status == 401


@pytest.mark.parametrize(
    ("forwarded", "trusted", "status"),
    [("10.0.0.9", [], 401), ("10.0.0.9", ["127.0.0.0/8"], 200), ("192.0.2.1", ["127.0.0.0/8"], 401),
     ("10.0.0.9, 192.0.2.1", ["127.0.0.0/8"], 401), ("192.0.2.1, 10.0.0.9", ["127.0.0.0/8"], 200),
     ("garbage", ["127.0.0.0/8"], 401)],
)  # fmt: skip
def test_a_forwarded_address_counts_only_from_a_trusted_proxy(
    lab: Lab, forwarded: str, trusted: list[str], status: int
) -> None:
    lab.serve({}, metrics={"allow": ["10.0.0.0/8"]}, server={"trusted_proxies": trusted})
    headers = [f"x-forwarded-for: {forwarded}"]
    assert lab.call(None, "/metrics", method="GET", key=None, headers=headers).status == status


def test_the_documentation_describes_the_inference_routes(lab: Lab) -> None:
    lab.one()
    schema = lab.call(None, "/openapi.json", method="GET").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models"} <= set(schema["paths"])
    page = lab.call(None, "/docs", method="GET")
    assert page.status == 200 and b"/v1/chat/completions" in page.body
    assert b"<script" not in page.body and b"src=" not in page.body  # works without reaching other hosts


# --- keys
BAD_KEYS = ("sk-" + "z" * 48, "sk-proj-abcdefghijklmnopqrstuvwx", "hf_abcdefghijklmnopqrst", "AIzaSyabcdefghijklmnop")


def test_every_wrong_key_gets_the_same_answer(lab: Lab) -> None:
    expired = {"name": "old", "sha256": digest("sk-expired" + "e" * 40), "expires": "2020-01-01"}
    lab.serve({"m": [replica(lab.engine())]}, tenants=[{"name": f"{lab.tenant}-old", "keys": [expired]}])
    wrong = (*BAD_KEYS, lab.key[:-1], lab.key + "x", "sk-expired" + "e" * 40)
    bodies = {lab.call(chat(), key=key).body for key in wrong}
    bodies |= {lab.call(chat(), key=None, headers=[f"authorization: {value}"]).body for value in
               ("", "Bearer", "Bearer ", f"Basic {lab.key}", lab.key, f"Bearer {lab.key} {lab.key}")}  # fmt: skip
    assert len(bodies) == 1 and json.loads(bodies.pop())["error"]["code"] == "invalid_api_key"


def test_either_header_carries_a_key(lab: Lab) -> None:
    lab.one()
    assert lab.call(chat(), key=None, headers=[f"x-api-key: {lab.key}"]).status == 200
    assert lab.call(chat(), key=None, headers=[f"authorization: bearer {lab.key}"]).status == 200
    assert lab.call(chat(), headers=["x-api-key: sk-wrong"]).status == 200  # Authorization counts first
    assert lab.call(chat(), key="sk-wrong", headers=[f"x-api-key: {lab.key}"]).status == 401


@pytest.mark.parametrize(
    "credential",
    ["", "authorization: Bearer sk-wrong", "authorization: Basic eDp5", "authorization:", "x-api-key: sk-wrong",
     "authorization: Bearer a.b.c", "authorization: Bearer " + "k" * 9000],
)  # fmt: skip
def test_where_no_key_is_required_everybody_is_anonymous_but_holders_of_a_key(lab: Lab, credential: str) -> None:
    lab.serve({"m": [replica(lab.engine())]}, auth={"required": False})
    answer = lab.call(chat(), key=None, headers=[credential] if credential else [])
    assert answer.status == 200
    line = lab.gateway.access_line(answer.header("x-request-id") or "")
    assert (line["tenant"], line["key"]) == ("anonymous", "none")
    line = lab.gateway.access_line(lab.chat().header("x-request-id") or "")
    assert (line["tenant"], line["key"]) == (lab.tenant, "test")
    assert lab.call(None, "/admin/v1/replicas", method="GET", key=None).status == 403


@pytest.mark.parametrize(
    ("allowed", "forwarded", "trusted", "status"),
    [
        (["127.0.0.0/8"], "", [], 200),
        (["127.0.0.0/8"], "192.0.2.1", [], 200),
        (["10.0.0.0/8"], "", [], 401),
        (["10.0.0.0/8"], "10.0.0.9", [], 401),
        (["10.0.0.0/8"], "10.0.0.9", ["127.0.0.0/8"], 200),
        (["10.0.0.0/8", "192.0.2.1"], "192.0.2.1", ["127.0.0.0/8"], 200),
        (["10.0.0.0/8"], "10.0.0.9, 192.0.2.1", ["127.0.0.0/8"], 401),
        (["10.0.0.0/8"], "garbage", ["127.0.0.0/8"], 401),
        (["127.0.0.0/8"], "", ["127.0.0.0/8"], 200),
    ],
)
def test_a_key_is_unknown_outside_of_its_networks(
    lab: Lab, allowed: list[str], forwarded: str, trusted: list[str], status: int
) -> None:
    bound = "sk-bound" + "b" * 40
    entry = {"name": "bound", "sha256": digest(bound), "allow_from": allowed}
    lab.serve({"m": [replica(lab.engine())]}, server={"trusted_proxies": trusted},
              tenants=[{"name": f"{lab.tenant}-b", "keys": [entry]}])  # fmt: skip
    headers = [f"x-forwarded-for: {forwarded}"] if forwarded else []
    answer = lab.call(chat(), key=bound, headers=headers)
    assert answer.status == lab.call(None, "/v1/models", method="GET", key=bound, headers=headers).status == status
    if status == 401:
        assert answer.body == lab.call(chat(), key="sk-wrong").body


def test_why_a_caller_was_refused_is_in_the_log_and_nowhere_else(lab: Lab) -> None:
    old, bound = "sk-old" + "o" * 40, "sk-bound" + "b" * 40
    entries = [{"name": "old", "sha256": digest(old), "expires": "2020-01-01"},
               {"name": "bound", "sha256": digest(bound), "allow_from": ["10.0.0.0/8"]}]  # fmt: skip
    lab.serve({"m": [replica(lab.engine())]}, tenants=[{"name": f"{lab.tenant}-r", "keys": entries}])
    answers = [lab.call(chat(), key=key) for key in (old, bound, "sk-wrong", None)]
    assert len({answer.body for answer in answers}) == 1
    lines = [lab.gateway.access_line(answer.header("x-request-id") or "") for answer in answers]
    assert [line["reason"] for line in lines] == [
        f"key old of {lab.tenant}-r has expired", f"key bound of {lab.tenant}-r may not be used from this address",
        "unknown key", "no credential",
    ]  # fmt: skip
    assert {line["error"] for line in lines} == {"invalid_api_key"}
    assert "reason" not in lab.gateway.access_line(lab.chat().header("x-request-id") or "")


def test_two_keys_in_one_request_mean_the_same_on_every_route(lab: Lab) -> None:
    lab.one()
    for first, second in ((lab.key, "sk-wrong"), ("sk-wrong", lab.key)):
        options: dict[str, Any] = {"key": second, "headers": [f"authorization: Bearer {first}"]}
        hot = lab.call(chat(), **options).status
        assert hot == lab.call(None, "/v1/models", method="GET", **options).status and hot in (200, 401)


def test_no_key_nor_its_hash_nor_a_text_of_users_is_ever_told(start: Callable[..., Gateway], lab: Lab) -> None:
    """At the debug level, with wrong keys, an engine's failure and a bug's answer, in bodies, logs and metrics."""
    secret, upstream = "sk-" + "Q7w9" * 12, "upstream-token-5f3a9c"
    engine = lab.engine(script=lambda x: x.reset())
    entry = {"name": "alpha", "keys": [{"name": "ci", "sha256": digest(secret)}]}
    config = base_config({"m": [replica(engine, api_key=upstream)]}, [entry])
    gateway = start(config, args=["--log-level", "debug"], wait_for="/ready")
    answers = []

    def ask(key: str, body: Any = None, **options: Any) -> None:
        with Wire(gateway.port) as wire:
            answers.append(wire.ask("POST", "/v1/chat/completions", body or chat(), key=key, **options).rest())

    for key in (*BAD_KEYS, secret[3:], secret[:-1] + "x"):
        ask(key)
    for script in (lambda x: x.reset(), lambda x: x.fail(f"no: {secret}", 500), lambda x: x.fail(secret, 400)):
        engine.script = script
        ask(secret, chat(user="user-text-8472"))
        ask(secret, chat(stream=True))
    ask(secret, b'{"model":"' + secret.encode() + b'"}')
    ask(secret, chat("canary-model-99"), headers=["cookie: canary-cookie-31"])
    ask(secret, b"\xff")
    page = gateway.metrics_page()
    gateway.terminate()
    gateway.wait()
    told = "".join(
        [page, gateway.log(), (gateway.folder / "stdout").read_text(),
         *(answer.body.decode() + str(answer.headers) for answer in answers if b"does not exist" not in answer.body)]
    )  # fmt: skip
    pieces = [key[i : i + 8] for key in (*BAD_KEYS, secret, upstream) for i in range(3, len(key) - 7)]
    pieces += [digest(key)[:16] for key in (*BAD_KEYS, secret)] + ["canary-cookie-31", "user-text-8472"]
    assert not [piece for piece in pieces if piece in told]
    assert "canary-model-99" not in page and "Say hello." not in told
    assert '"key":"ci"' in told  # the key's name is what a line is traced by


# --- models
BYPASSES: dict[str, Callable[[Lab], Any]] = {
    "by name": lambda lab: lab.chat("big"),
    "by alias": lambda lab: lab.chat("huge"),
    "in capitals": lambda lab: lab.chat("BIG"),
    "with a space": lambda lab: lab.chat("big "),
    "allowed name with a space": lambda lab: lab.chat("SMALL "),
    "in the query": lambda lab: lab.call(chat("small"), "/v1/chat/completions?model=big"),
    "first key": lambda lab: lab.call(b'{"model":"big","model":"small","messages":[{"role":"user"}]}'),
    "second key": lambda lab: lab.call(b'{"model":"small","model":"big","messages":[{"role":"user"}]}'),
    "escaped key": lambda lab: lab.call(b'{"model":"small","m\\u006fdel":"big","messages":[{"role":"user"}]}'),
    "escaped value": lambda lab: lab.call(b'{"model":"\\u0062ig","messages":[{"role":"user"}]}'),
    "in a header": lambda lab: lab.call(chat("small"), headers=["x-model: big", "openai-model: big"]),
    "in the path": lambda lab: lab.call(chat("small"), "/v1/big/chat/completions"),
    "deployment path": lambda lab: lab.call(chat("small"), "/openai/deployments/big/chat/completions"),
    "multipart": lambda lab: lab.call(b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nbig\r\n--x--'),
    "as a list": lambda lab: lab.call(chat("small") | {"model": ["big"]}),
    "nested": lambda lab: lab.call(chat("small", models=["big"], extra_body={"model": "big"})),
    "with a tag": lambda lab: lab.chat("big:latest"),
    "as a glob": lambda lab: lab.chat("b*"),
    "embeddings": lambda lab: lab.call({"model": "big", "input": "x"}, "/v1/embeddings"),
    "completions": lambda lab: lab.call({"model": "big", "prompt": "x"}, "/v1/completions"),
}


@pytest.mark.parametrize("way", BYPASSES)
def test_a_model_outside_the_allow_list_is_never_reached(lab: Lab, way: str) -> None:
    small, big = lab.engine(), lab.engine()
    models = {"small": {"replicas": [replica(small)], "fallbacks": ["big"]},
              "big": {"aliases": ["huge"], "replicas": [replica(big)]}}  # fmt: skip
    lab.serve(models, allowed=["small"])
    answer = BYPASSES[way](lab)
    assert not big.requests
    assert answer.status in (200, 400, 404) and (answer.status != 200 or small.last().json()["model"] == UPSTREAM_MODEL)
    if answer.status != 200:
        assert "huge" not in answer.error()["message"] or way == "by alias"


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_fallbacks_are_tried_only_where_the_caller_may_go(lab: Lab, stream: bool) -> None:
    fails = lab.engine(script=lambda x: x.fail("bug", 500))
    big, spare = lab.engine(), lab.engine()
    models = {"small": {"replicas": [replica(fails)], "fallbacks": ["big", "spare"]},
              "big": [replica(big)], "spare": [replica(spare)]}  # fmt: skip
    lab.serve(models, allowed=["small", "spare"])
    answer = lab.call(chat("small", stream=stream))
    assert answer.status == 200 and not big.requests and len(spare.requests) == 1
    assert b'"model":"small"' in answer.body and b"spare" not in answer.body
    line = lab.gateway.access_line(answer.header("x-request-id") or "")
    assert line["attempts"] == 2 and line["replica"].startswith("spare/")
    lab.serve(models, allowed=["small"])
    assert lab.call(chat("small", stream=stream)).status == 502 and not big.requests and len(spare.requests) == 1


def test_a_keys_own_list_narrows_its_tenants(lab: Lab) -> None:
    narrow = "sk-narrow" + "n" * 40
    tenant = {"name": f"{lab.tenant}-n", "models": ["a*"],
              "keys": [{"name": "n", "sha256": digest(narrow), "models": ["ab", "b"]}]}  # fmt: skip
    engine = lab.engine()
    lab.serve({name: [replica(engine)] for name in ("a", "ab", "b")}, tenants=[tenant])
    assert [lab.call(chat(name), key=narrow).status for name in ("a", "ab", "b")] == [404, 200, 404]
    assert [entry["id"] for entry in lab.call(None, "/v1/models", method="GET", key=narrow).json()["data"]] == ["ab"]


# --- what the engine is told
CANARIES = [
    "x-api-key: canary-1", "api-key: canary-2", "x-goog-api-key: canary-3", "cookie: canary-4",
    "proxy-authorization: Basic canary-5", "x-internal-secret: canary-6", "connection: keep-alive, x-foo",
    "x-foo: canary-7", "te: trailers", "x-forwarded-for: 192.0.2.77", "x-conversation-id: canary-8",
    "x-session-id: canary-9", "accept-encoding: br", "accept: text/canary", "user-agent: canary-10",
    "content-encoding: identity", "origin: http://canary-11", "forwarded: for=canary-12", "x-request-id: my-trace-1",
    "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate: vendor=1",
]  # fmt: skip


@pytest.mark.parametrize("credential", [None, "upstream-token"], ids=["no credential", "credential"])
def test_an_engine_sees_only_an_allow_list_of_headers(lab: Lab, credential: str | None) -> None:
    engine = lab.engine()
    lab.serve({"m": [replica(engine, **({"api_key": credential} if credential else {}))]})
    answer = lab.call(chat(), headers=CANARIES)
    seen = engine.last()
    assert answer.status == 200 and "canary" not in seen.raw_head.decode() and lab.key not in seen.raw_head.decode()
    assert {name for name, _ in seen.headers} <= {
        "host", "content-type", "content-length", "accept", "accept-encoding", "user-agent", "authorization",
        "x-request-id", "traceparent", "tracestate",
    }  # fmt: skip
    assert seen.values("authorization") == ([f"Bearer {credential}"] if credential else [])
    assert seen.values("host") == [f"127.0.0.1:{engine.port}"] and seen.values("accept-encoding") == ["identity"]
    assert seen.values("x-request-id") == ["my-trace-1"] and seen.values("tracestate") == ["vendor=1"]
    assert answer.header("x-request-id") == "my-trace-1"


@pytest.mark.parametrize(
    "header", ["sec-fetch-site: cross-site", "sec-fetch-site: same-site", "host: evil.example", "host: [abc"]
)
def test_nobody_is_anonymous_through_somebody_elses_page(lab: Lab, header: str) -> None:
    """A browser on this machine reaches the gateway for any page that it shows."""
    engine = lab.engine()
    lab.serve({"m": [replica(engine)]}, auth={"required": False})
    assert lab.call(chat(), key=None).status == 200
    assert lab.call(chat(), key=None, headers=["sec-fetch-site: same-origin"]).status == 200
    assert lab.call(chat(), key=None, headers=[header]).status == 401
    assert lab.call(chat(), headers=[header]).status == 200  # a key is not something that a page gets by itself


def test_an_engines_own_headers_stay_with_it(lab: Lab) -> None:
    private = {"set_cookie": "a=b", "server": "uvicorn", "x_secret": "s", "www_authenticate": "Basic",
               "connection": "keep-alive", "x_request_id": "engine-1"}  # fmt: skip
    lab.one(script=lambda x: x.reply(x.dialect.completion(), **private))
    answer = lab.chat()
    ours = {"x-request-id", "x-sekisho-attempts", "date", "content-type", "content-length"}
    assert {name for name, _ in answer.headers} <= ours
    assert answer.header("x-request-id") != "engine-1"


@pytest.mark.parametrize("value", ["x" * 129, "a b", "a\tb", "é", "<script>", ""])
def test_a_request_id_that_could_do_harm_is_replaced(lab: Lab, value: str) -> None:
    engine = lab.one()
    answer = lab.call(chat(), headers=[f"x-request-id: {value}"])
    given = answer.header("x-request-id") or ""
    assert re.fullmatch(r"req_[0-9a-f]+", given) and engine.last().values("x-request-id") == [given]


def test_request_ids_differ(lab: Lab) -> None:
    lab.one()
    ids = [lab.chat().header("x-request-id") for _ in range(20)]
    ids += [lab.call(None, "/v1/models", method="GET").header("x-request-id") for _ in range(5)]
    assert None not in ids and len(set(ids)) == 25


# --- paths
ODD_PATHS = (
    "/v1/..%2f..%2fmetrics", "/v1/%2e%2e/health", "/v1/%252e%252e%252fapi/delete", "/v1//v1/load",
    "/v1/models/..%2f..%2fslots", "/v1/chat/completions/../../unload", "/v1\\..\\unload", "/v1/chat/completions/",
    "/v1/chat/completions%2f..%2funload", "/v1/./chat/completions", "//v1/chat/completions", "/V1/chat/completions",
    "/v1/chat%2fcompletions", "/v1/chat/completions%00", "/v1/chat/completions;x=1", "/api/generate", "/slots", "/load",
    "/v1/models/%00", "/tokenize", "/v1/responses", "http://127.0.0.1/unload", "/v1/chat/completions%3f",
)  # fmt: skip


@pytest.mark.parametrize("path", ODD_PATHS)
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_only_the_listed_routes_exist_and_nothing_else_reaches_an_engine(lab: Lab, path: str, method: str) -> None:
    engine = lab.one()
    answer = lab.call(chat() if method == "POST" else None, path, method=method)
    assert answer.status in (400, 404, 405), answer.body
    assert answer.error()["code"] and not engine.requests
    assert {probe.target for probe in engine.probes} <= {"/health", "/metrics", "/v1/models"}


@pytest.mark.parametrize(
    "target", ["/v1/chat/completions?x=1", "/v1/chat/completions?", "http://gateway/v1/chat/completions"]
)
def test_a_query_or_the_absolute_form_changes_nothing(lab: Lab, target: str) -> None:
    engine = lab.one()
    assert lab.call(chat(), target).status == 200 and engine.last().target == "/v1/chat/completions"


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_path_prefix_of_an_engines_url_is_always_kept(lab: Lab, suffix: str) -> None:
    engine = lab.engine(prefix="/team/llm")
    lab.serve({"m": [replica(engine, url=engine.url + suffix)]})
    lab.gateway.wait_for_replica()
    assert lab.chat().status == 200
    assert lab.call({"model": "m", "input": "x"}, "/v1/embeddings").status == 200
    assert [entry.target for entry in engine.requests] == ["/team/llm/v1/chat/completions", "/team/llm/v1/embeddings"]
    assert all(probe.target.startswith("/team/llm/") for probe in engine.probes)


# --- limits as a caller sees them
def test_rate_limit_headers_and_the_refusal(lab: Lab) -> None:
    engine = lab.engine()
    lab.serve({"m": [replica(engine)]}, limits={"requests": "3/min", "tokens": "1000/min"})
    for left in (2, 1, 0):
        answer = lab.chat(max_tokens=10)
        assert answer.status == 200
        assert answer.header("x-ratelimit-limit-requests") == "3"
        assert answer.header("x-ratelimit-remaining-requests") == str(left)
        assert answer.header("x-ratelimit-limit-tokens") == "1000"
        assert 0 < int(answer.header("x-ratelimit-remaining-tokens") or 0) < 1000
        assert re.fullmatch(r"(\d+h)?(\d+m)?[\d.]+(s|ms)", answer.header("x-ratelimit-reset-requests") or "")
    refused = lab.chat()
    error = refused.error()
    assert (refused.status, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert "3 requests" in error["message"] and len(engine.requests) == 3
    assert 1 <= int(refused.header("retry-after") or 0) <= 61
    assert refused.header("x-ratelimit-remaining-requests") == "0"


def test_several_windows_apply_at_once_and_the_one_that_is_full_is_named(lab: Lab) -> None:
    lab.serve({"m": [replica(lab.engine())]}, limits={"requests": ["100/min", "2/hour", "50/day"]})
    answers = [lab.chat() for _ in range(2)]
    assert [answer.header("x-ratelimit-limit-requests") for answer in answers] == ["2", "2"]
    refused = lab.chat()
    assert refused.status == 429 and "2 requests per hour" in refused.error()["message"]
    assert 60 < int(refused.header("retry-after") or 0) <= 3661


@pytest.mark.parametrize(("budget", "longest"), [("100/day", 86_400), (["100/month", "5000/day"], 31 * 86_400)])
def test_a_spent_budget_is_a_quota_until_the_next_day_or_month(lab: Lab, budget: Any, longest: int) -> None:
    usage = {"prompt_tokens": 40, "completion_tokens": 60, "total_tokens": 100}
    engine = lab.engine(script=lambda x: x.stream(usage=usage))
    lab.serve({"m": [replica(engine)]}, limits={"token_budget": budget})
    assert lab.stream(max_tokens=1).status == 200
    assert eventually(lambda: lab.tokens("completion") == 60)
    refused = lab.stream(max_tokens=1)
    error = refused.error()
    assert (refused.status, error["type"], error["code"]) == (429, "insufficient_quota", "insufficient_quota")
    assert "100 tokens per" in error["message"] and "100 used" in error["message"]
    assert 1 <= int(refused.header("retry-after") or 0) <= longest
    assert refused.header("x-ratelimit-remaining-tokens") == "0" and len(engine.requests) == 1


def test_the_limits_of_a_model_are_shared_by_its_callers_who_learn_nothing_of_each_other(lab: Lab) -> None:
    other = {"name": f"{lab.tenant}-b", "keys": [{"name": "b", "sha256": digest("sk-other" + "o" * 40)}]}
    engine = lab.engine()
    lab.serve({"m": {"replicas": [replica(engine)], "limits": {"requests": "3/hour", "tokens": "100000/min"}},
               "free": [replica(engine)]}, tenants=[other])  # fmt: skip
    statuses = [lab.call(chat(), key=key).status for key in (lab.key, "sk-other" + "o" * 40, lab.key)]
    assert statuses == [200] * 3
    refused = lab.chat()
    assert refused.status == 429 and refused.error()["code"] == "rate_limit_exceeded"
    assert "this model" in refused.error()["message"] and "used" not in refused.error()["message"]
    assert refused.header("retry-after") and refused.header("x-ratelimit-limit-requests") is None
    assert lab.chat("free").status == 200 and len(engine.requests) == 4


def test_what_a_model_refuses_costs_its_caller_no_tokens(lab: Lab) -> None:
    engine = lab.engine()
    lab.serve({"m": {"replicas": [replica(engine)], "limits": {"tokens": "50/min"}}, "n": [replica(engine)]},
              limits={"tokens": "500/min", "concurrency": 1})  # fmt: skip
    assert [lab.chat(max_tokens=400).status for _ in range(5)] == [429] * 5
    assert lab.chat("n", max_tokens=400).status == 200


def test_streams_carry_the_same_headers(lab: Lab) -> None:
    lab.serve({"m": [replica(lab.engine())]}, limits={"requests": "5/min"})
    answer = lab.stream()
    assert answer.header("x-ratelimit-remaining-requests") == "4" and answer.header("x-ratelimit-limit-tokens") is None


def test_stream_tokens_count_against_the_limit(lab: Lab) -> None:
    """A hundred tokens each, whether the engine reports them or not."""
    usage = {"prompt_tokens": 50, "completion_tokens": 100, "total_tokens": 150}
    lab.serve({"m": [replica(lab.engine(script=lambda x: x.stream(usage=usage)))]}, limits={"tokens": "500/min"})
    statuses = [lab.stream(max_tokens=1).status for _ in range(6)]
    assert statuses == [200] * 4 + [429] * 2
    line = lab.stream(max_tokens=1)
    assert line.status == 429 and "tokens" in line.error()["message"] and line.header("retry-after")


def test_an_estimate_counts_where_no_usage_is_reported(lab: Lab) -> None:
    engine = lab.engine(script=lambda x: x.raw_stream(x.dialect.stream(["word "] * 150)))
    lab.serve({"m": [replica(engine)]}, limits={"tokens": "500/min"})
    statuses = [lab.stream(max_tokens=1).status for _ in range(6)]
    assert statuses[:3] == [200] * 3 and statuses[-1] == 429


def test_simultaneous_requests_cannot_spend_the_same_tokens(lab: Lab) -> None:
    engine = lab.engine(script=lambda x: (x.pause(0.3), x.reply(x.dialect.completion()))[1])
    lab.serve({"m": [replica(engine)]}, limits={"tokens": "350/min"})
    statuses = [answer.status for answer in together([lambda: lab.chat(max_tokens=100)] * 20)]
    assert statuses.count(200) == 3 and statuses.count(429) == 17
    assert eventually(lambda: lab.chat(max_tokens=100).status == 200)  # reserved is not spent


def test_failed_requests_give_their_tokens_back(lab: Lab) -> None:
    engine = lab.engine(script=lambda x: x.fail("bad value", 400))
    lab.serve({"m": [replica(engine)]}, limits={"tokens": "300/min"})
    assert [lab.chat(max_tokens=200).status for _ in range(10)] == [400] * 10
    engine.script = lambda x: x.reply(x.dialect.completion())
    assert lab.chat(max_tokens=200).status == 200


def test_a_request_that_can_never_fit_says_so(lab: Lab) -> None:
    lab.serve({"m": [replica(lab.engine())]}, limits={"tokens": "100/min"})
    answer = lab.chat(max_tokens=1000)
    assert answer.status == 429 and answer.error()["code"] == "request_too_large_for_limit"


def test_an_engines_hint_when_to_come_back_is_passed_on(lab: Lab) -> None:
    engine = lab.one(script=lambda x: x.fail("busy", 429, retry_after="7"))
    answer = lab.chat()
    assert (answer.status, answer.header("retry-after")) == (429, "7")
    again = lab.chat()  # the only replica has asked for a pause
    assert again.status == 503 and 1 <= int(again.header("retry-after") or 0) <= 7 and len(engine.requests) == 1


def test_models_nobody_has_and_keys_nobody_knows_make_no_new_series(lab: Lab) -> None:
    lab.one()
    lab.chat("warm-up"), lab.call(chat(), key="sk-warm-up")
    before = len(lab.gateway.metrics_page().splitlines())
    for number in range(40):
        lab.chat(f"random-{number}", user=f"user-{number}")
        lab.call(chat(), key=f"sk-{number}")
        lab.call(None, f"/path-{number}", method="GET")
    assert eventually(lambda: lab.answered(404) >= 41)
    page = lab.gateway.metrics_page()
    assert len(page.splitlines()) <= before + 2 and "random-" not in page and "path-" not in page


def test_a_key_expires_by_the_clock(lab: Lab) -> None:
    import datetime

    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2)
    short = "sk-short" + "s" * 40
    entry = {"name": "s", "sha256": digest(short), "expires": soon.isoformat()}
    lab.serve({"m": [replica(lab.engine())]}, tenants=[{"name": f"{lab.tenant}-s", "keys": [entry]}])
    first = lab.call(chat(), key=short).status
    assert first == 200 or time.time() > soon.timestamp() - 0.5
    assert eventually(lambda: lab.call(chat(), key=short).status == 401)


# --- who answered, and who should
@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_the_route_is_shown_only_when_the_operator_says_so(lab: Lab, shown: bool, stream: bool) -> None:
    lab.serve({"m": [replica(lab.engine())]}, server={"expose_route": shown})
    answer = lab.call(chat(stream=stream))
    assert answer.status == 200
    assert (answer.header("x-sekisho-policy") == "least_load") is shown
    name = answer.header("x-sekisho-replica")
    assert (name is not None and name.startswith("m/vllm-") and "127.0.0.1" not in name) if shown else name is None


def test_the_preferred_format_answers_until_it_cannot(lab: Lab) -> None:
    first, second = lab.engine(), lab.engine()
    replicas = [replica(first, format="safetensors"), replica(second, format="awq", max_inflight=1)]
    lab.serve({"m": {"format_preference": ["awq", "safetensors"], "replicas": replicas}})
    for _ in range(6):
        assert lab.chat().status == 200
    assert (len(first.requests), len(second.requests)) == (0, 6)
    release = threading.Event()

    def late(x: Exchange) -> None:
        x.wait(release)
        x.reply(x.dialect.completion("late"))

    second.once(late)
    with lab.gateway.wire() as busy:
        busy.send(request("POST", "/v1/chat/completions", chat(), key=lab.key))
        assert eventually(lambda: second.running == 1)
        assert lab.chat().status == 200 and len(first.requests) == 1
        release.set()
        assert busy.answer().rest().status == 200
