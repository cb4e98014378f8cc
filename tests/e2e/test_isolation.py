"""What one tenant has, asks and is answered is nothing to another: prefix caches, replicas, names, errors."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.doubles.dialects import UPSTREAM_MODEL
from tests.doubles.engine import Engine, Exchange
from tests.doubles.kinds import KINDS
from tests.e2e.harness import Gateway, Lab, base_config, chat, digest, eventually, replica, together
from tests.e2e.test_access import BYPASSES
from tests.e2e.test_llamacpp_real import MODEL
from tests.e2e.test_llamacpp_real import pytestmark as needs_llamacpp
from tests.e2e.wire import Answer, request

TEXT = {"model": "m", "prompt": "x"}
SECOND = "sk-second" + "2" * 40  # another key of the laboratory's own tenant


class Pair:
    """Two tenants beside the laboratory's own, each with a key."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.acme, self.other = f"{lab.tenant}-acme", f"{lab.tenant}-other"
        self.keys = {name: f"sk-{name}-" + "p" * 40 for name in (self.acme, self.other)}
        self.tenants = [
            {"name": name, "keys": [{"name": "app", "sha256": digest(key)}]} for name, key in self.keys.items()
        ]

    def chat(self, tenant: str, model: str = "m", **more: Any) -> Answer:
        return self.lab.call(chat(model, **more), key=self.keys[tenant])

    def listed(self, tenant: str) -> list[dict[str, Any]]:
        answer = self.lab.call(None, "/v1/models", method="GET", key=self.keys[tenant])
        data: list[dict[str, Any]] = answer.json()["data"]
        return data


@pytest.fixture
def pair(lab: Lab) -> Pair:
    return Pair(lab)


# --- prefix caches
def salt(engine: Engine) -> Any:
    """Of the last request; None where it has none."""
    return engine.last().json().get("cache_salt")


@pytest.mark.parametrize("kind", ["vllm", "sglang", "tensorrt_llm"])
def test_every_prompt_carries_the_salt_of_its_tenant(lab: Lab, pair: Pair, kind: str) -> None:
    """Whoever sends it, with whatever key, whole or streamed, before and after a reload."""
    engine = KINDS[kind].engine()
    lab._engines.append(engine)
    config = lab.config({"m": [replica(engine, backend=kind)]}, tenants=pair.tenants)
    config["tenants"][1]["keys"].append({"name": "second", "sha256": digest(SECOND)})
    found: dict[str, set[str]] = {}
    for _ in range(2):
        lab.gateway.configure(config)
        for tenant, key in ((lab.tenant, lab.key), (lab.tenant, SECOND), *pair.keys.items()):
            for stream in (False, True):
                assert lab.call(chat(stream=stream), key=key).status == 200
                found.setdefault(tenant, set()).add(salt(engine))
    assert all(len(salts) == 1 for salts in found.values()) and len(set.union(*found.values())) == 3
    for word in set.union(*found.values()):
        assert len(word) == 32 and int(word, 16) >= 0
        assert word not in lab.gateway.log() + (lab.gateway.folder / "stdout").read_text() + lab.gateway.metrics_page()


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", TEXT),
    "embeddings": ("/v1/embeddings", {"model": "m", "input": "x"}),
    "rerank": ("/v1/rerank", {"model": "m", "query": "q", "documents": ["a", "b"]}),
    "tokenize": ("/v1/tokenize", TEXT),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(
    ("kind", "salted"),
    [("vllm", {"completions", "embeddings", "rerank"}), ("sglang", {"completions"}), ("tensorrt_llm", set())],
)
def test_a_salt_goes_only_where_the_engine_knows_it(lab: Lab, kind: str, salted: set[str], asked: str) -> None:
    """TensorRT-LLM would answer 400 to the field anywhere but in a chat."""
    engine = KINDS[kind].engine()
    lab._engines.append(engine)
    lab.serve({"m": [replica(engine, backend=kind)]})
    path, body = ASKED[asked]
    answer = lab.call(body, path)
    if answer.status == 400:
        assert answer.error()["code"] == "unsupported_value" and not engine.requests  # no such route at this engine
    else:
        assert answer.status == 200 and (salt(engine) is not None) is (asked in salted)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"vllm", "sglang", "tensorrt_llm"}))
def test_other_engines_get_no_salt(lab: Lab, kind: str) -> None:
    engine = KINDS[kind].engine()
    lab._engines.append(engine)
    lab.serve({"m": [replica(engine, backend=kind)]})
    assert lab.chat().status == 200 and salt(engine) is None


@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize("kind", ["vllm", "sglang", "tensorrt_llm"])
def test_a_client_cannot_choose_its_salt(lab: Lab, pair: Pair, kind: str, stream: str) -> None:
    """Not even the true one of another tenant, in any spelling or type."""
    engine = KINDS[kind].engine()
    lab._engines.append(engine)
    lab.serve({"m": [replica(engine, backend=kind)]}, tenants=pair.tenants)
    assert pair.chat(pair.other).status == 200
    theirs = salt(engine)
    assert lab.chat().status == 200
    mine = salt(engine)
    assert mine != theirs
    for member in (f'"cache_salt":"{theirs}"', f'"cache\\u005fsalt":"{theirs}"', '"cache_salt":""',
                   '"cache_salt":null', f'"cache_salt":["{theirs}"]'):  # fmt: skip
        raw = f'{{"model":"m",{member},"stream":{stream},"messages":[{{"role":"user","content":"x"}}]}}'
        assert lab.call(raw.encode()).status == 200
        sent = engine.last().body
        assert salt(engine) == mine and theirs.encode() not in sent and sent.count(b"salt") == 1
    twice = f'{{"model":"m","cache_salt":"a","cache_salt":"{theirs}","messages":[{{}}]}}'
    before = len(engine.requests)
    assert lab.call(twice.encode()).status == 400 and len(engine.requests) == before


def test_a_fallback_gets_the_tenants_salt_too(lab: Lab) -> None:
    fails, spare = lab.engine(script=lambda x: x.fail("bug", 500)), lab.engine()
    spares = [replica(spare, backend="sglang")]
    lab.serve({"m": {"replicas": [replica(fails)], "fallbacks": ["n"]}, "n": spares})
    assert lab.chat().status == 200
    assert salt(spare) == salt(fails) is not None


def test_callers_without_a_key_share_what_has_no_salt(lab: Lab) -> None:
    engine = lab.engine()
    lab.serve({"m": [replica(engine)]}, auth={"required": False})
    assert lab.call(chat(), key=None).status == 200 and salt(engine) is None
    assert lab.chat().status == 200 and salt(engine) is not None


def test_a_name_for_media_in_an_engines_cache_is_refused(lab: Lab) -> None:
    """vLLM would show the picture that any other caller has sent under that name."""
    engine = lab.one()
    named = [{"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": "theirs"}]}]
    answer = lab.chat(messages=named)
    assert (answer.status, answer.error()["code"]) == (400, "unsupported_value") and not engine.requests


# --- dedicated replicas
class Fleet:
    """Model `m` with one replica for everybody and one for each of a pair of tenants; model `own` of the other alone;
    model `any` for everybody, with both as fallbacks."""

    def __init__(self, pair: Pair, **options: Any) -> None:
        lab = pair.lab
        self.shared, self.acme, self.other = lab.engine(), lab.engine(), lab.engine("llama_server")
        self.first, self.own = lab.engine(), lab.engine()
        for_acme, for_other = {"tenant": pair.acme}, {"tenant": pair.other}
        self.models: dict[str, Any] = {
            "m": {"queue": {"max_waiting": 0}, "replicas": [
                  replica(self.shared), replica(self.acme, labels=for_acme, **options),
                  replica(self.other, labels=for_other, format="gguf", quantization="Q4_K_M", context_length=99_999,
                          capabilities=["vision"])]},
            "own": {"aliases": ["mine"], "replicas": [replica(self.own, labels=for_other)]},
            "any": {"replicas": [replica(self.first)], "fallbacks": ["own", "m"]},
        }  # fmt: skip
        lab.serve(self.models, tenants=pair.tenants)
        assert eventually(lambda: all(entry["health"] == "up" for entry in lab.gateway.replicas()))

    def counts(self) -> tuple[int, int, int, int]:
        """Requests at the shared replica, at the one of acme, of the other, and at the other's own model."""
        return tuple(len(e.requests) for e in (self.shared, self.acme, self.other, self.own))  # type: ignore[return-value]


def test_a_dedicated_replica_serves_its_tenant_and_nobody_else(lab: Lab, pair: Pair) -> None:
    fleet = Fleet(pair)
    jobs = [lambda: lab.chat(), lambda: pair.chat(pair.acme), lambda: pair.chat(pair.other)] * 6
    assert {answer.status for answer in together(jobs)} == {200}
    assert fleet.counts() == (6, 6, 6, 0)


def test_a_tenant_whose_own_replica_is_away_gets_no_other(lab: Lab, pair: Pair) -> None:
    fleet = Fleet(pair)
    fleet.acme.script = lambda x: x.fail("bug", 500)
    assert pair.chat(pair.acme).status == 502
    fleet.acme.stop()
    assert eventually(lambda: pair.chat(pair.acme).status == 503)
    assert lab.chat().status == 200 and fleet.counts()[0] == 1  # the laboratory's own request
    fleet.shared.stop()
    assert eventually(lambda: lab.chat().status == 503)
    assert pair.chat(pair.other).status == 200 and fleet.counts()[2:] == (1, 0)


def test_a_dedicated_replica_that_is_full_does_not_overflow_to_others(lab: Lab, pair: Pair) -> None:
    fleet, release = Fleet(pair, max_inflight=1), threading.Event()

    def late(x: Exchange) -> None:
        x.wait(release)
        x.reply(x.dialect.completion())

    fleet.acme.once(late)
    with lab.gateway.wire() as busy:
        busy.send(request("POST", "/v1/chat/completions", chat(), key=pair.keys[pair.acme]))
        assert eventually(lambda: fleet.acme.running == 1)
        full = pair.chat(pair.acme)
        assert (full.status, full.error()["code"]) == (503, "model_busy") and fleet.counts() == (0, 1, 0, 0)
        release.set()
        assert busy.answer().rest().status == 200


def test_fallbacks_lead_to_the_callers_own_replicas(lab: Lab, pair: Pair) -> None:
    fleet = Fleet(pair)
    fleet.first.script = lambda x: x.fail("bug", 500)
    answers = [pair.chat(pair.acme, "any"), lab.chat("any"), pair.chat(pair.other, "any")]
    assert [answer.status for answer in answers] == [200] * 3
    assert fleet.counts() == (1, 1, 0, 1)


def test_a_label_counts_from_the_next_reload_on(lab: Lab, pair: Pair) -> None:
    fleet = Fleet(pair)
    assert lab.chat("own").status == 404
    fleet.models["own"]["replicas"][0].pop("labels")
    lab.serve(fleet.models, tenants=pair.tenants)
    assert lab.chat("own").status == 200
    fleet.models["own"]["replicas"][0]["labels"] = {"tenant": pair.acme}
    lab.serve(fleet.models, tenants=pair.tenants)
    answers = [lab.chat("own"), pair.chat(pair.acme, "own"), pair.chat(pair.other, "own")]
    assert [answer.status for answer in answers] == [404, 200, 404]


def test_lists_and_variants_show_the_callers_own(lab: Lab, pair: Pair) -> None:
    Fleet(pair)
    listed = {tenant: {entry["id"]: entry for entry in pair.listed(tenant)} for tenant in pair.keys}
    assert [*listed[pair.acme]] == ["m", "any"] and [*listed[pair.other]] == ["m", "own", "mine", "any"]
    theirs, mine = listed[pair.other]["m"], listed[pair.acme]["m"]
    assert (theirs["quantization"], theirs["context_length"]) == ("Q4_K_M", 99_999)
    assert "Q4_K_M" not in str(mine) and "99999" not in str(mine) and "vision" not in str(mine)
    assert pair.chat(pair.other, "m@gguf").status == 200 and pair.chat(pair.acme, "m@vllm").status == 200
    for tenant, hidden in ((pair.acme, "gguf"), (pair.acme, "q4_k_m"), (pair.other, "vllm")):
        refused, unknown = pair.chat(tenant, f"m@{hidden}"), pair.chat(tenant, "m@none")
        assert refused.status == unknown.status == 404
        assert refused.body.replace(hidden.encode(), b"none") == unknown.body


def test_a_variant_that_is_away_is_explained_by_the_callers_own(lab: Lab, pair: Pair) -> None:
    fleet = Fleet(pair)
    for engine in (fleet.shared, fleet.acme, fleet.other):
        engine.stop()
    words = {lab.key: ("vllm", "gguf"), pair.keys[pair.other]: ("gguf", "vllm")}
    for key, (ours, theirs) in words.items():

        def ask(model: str, key: str = key) -> str:
            answer = lab.call(chat(model), key=key)
            return str(answer.error()["message"]) if answer.status == 503 else ""

        told = eventually(lambda ask=ask, ours=ours: ask(f"m@{ours}"))  # type: ignore[misc]
        assert f"has the variants: {ours}" in told.replace("safetensors, ", "") and theirs not in told
        assert "variants" not in eventually(lambda ask=ask: ask("m"))  # type: ignore[misc]


# --- what cannot be seen
def hidden_by_list(lab: Lab, small: Engine, big: Engine) -> dict[str, Any]:
    return lab.config(world(small, {"aliases": ["huge"], "replicas": [replica(big)]}), allowed=["small"])


def hidden_by_dedication(lab: Lab, small: Engine, big: Engine) -> dict[str, Any]:
    pair = Pair(lab)
    entry = {"aliases": ["huge"], "replicas": [replica(big, labels={"tenant": pair.other})]}
    return lab.config(world(small, entry), tenants=pair.tenants)


def hidden_by_both(lab: Lab, small: Engine, big: Engine) -> dict[str, Any]:
    return hidden_by_dedication(lab, small, big) | {"tenants": hidden_by_list(lab, small, big)["tenants"]}


def absent(lab: Lab, small: Engine, big: Engine) -> dict[str, Any]:
    return lab.config(world(small, None))


def world(small: Engine, big: Mapping[str, Any] | None) -> dict[str, Any]:
    """`small`, and `big` as its fallback; without it the same for whoever may not see it."""
    entry: dict[str, Any] = {"replicas": [replica(small)], "aliases": ["tiny"]}
    return {"small": entry} if big is None else {"small": entry | {"fallbacks": ["big"]}, "big": dict(big)}


def form(lab: Lab, *models: str) -> Answer:
    parts = [f'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n' for model in models]
    file = '--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--x--\r\n'
    raw = "".join([*parts, file]).encode()
    head = [
        "POST /v1/audio/transcriptions?model=big HTTP/1.1", "host: gateway.test", f"authorization: Bearer {lab.key}",
        "content-type: multipart/form-data; boundary=x", f"content-length: {len(raw)}", "x-model: big",
    ]  # fmt: skip
    with lab.gateway.wire() as wire:
        wire.send("\r\n".join(head).encode() + b"\r\n\r\n" + raw)
        return wire.answer().rest()


WAYS: dict[str, Callable[[Lab], Answer]] = BYPASSES | {
    "variant": lambda lab: lab.chat("big@vllm"),
    "variant of the alias": lambda lab: lab.chat("huge@safetensors"),
    "as a variant": lambda lab: lab.chat("small@big"),
    "stream": lambda lab: lab.stream("big"),
    "form field": lambda lab: form(lab, "big"),
    "two form fields": lambda lab: form(lab, "small", "big"),
    "rerank": lambda lab: lab.call({"model": "big", "query": "x", "documents": ["y"]}, "/v1/rerank"),
    "tokenize": lambda lab: lab.call({"model": "huge", "prompt": "x"}, "/v1/tokenize"),
    "speech": lambda lab: lab.call({"model": "big", "input": "x", "voice": "v"}, "/v1/audio/speech"),
    "list": lambda lab: lab.call(None, "/v1/models", method="GET"),
    "card": lambda lab: lab.call(None, "/v1/models/big", method="GET"),
    "card of the alias": lambda lab: lab.call(None, "/v1/models/huge", method="GET"),
    "card of a variant": lambda lab: lab.call(None, "/v1/models/big%40vllm", method="GET"),
    "bad body": lambda lab: lab.call({"model": "big", "messages": []}),
    "bad media": lambda lab: lab.chat(
        "big", messages=[{"role": "user", "content": [{"image_url": {"url": "http://a/b"}}]}]
    ),
    "allowed": lambda lab: lab.stream("tiny"),
    "fallback": lambda lab: lab.chat("small", user="fail"),
    "fallback in a stream": lambda lab: lab.stream("small", user="fail"),
}


def answers_or_fails(x: Exchange) -> None:
    body = x.request.json()
    if body.get("user") == "fail":
        x.fail("bug", 500)
    elif body.get("stream"):
        x.stream(["a"])
    else:
        x.reply(x.dialect.completion())


@pytest.mark.parametrize("hide", [hidden_by_list, hidden_by_dedication, hidden_by_both])
def test_what_a_caller_sees_does_not_depend_on_models_it_may_not_use(lab: Lab, hide: Callable[..., Any]) -> None:
    """Status, headers and body to the last byte, in every way to ask: as if the model were not configured at all."""
    small, big = lab.engine(script=answers_or_fails), lab.engine()
    told: dict[Callable[..., Any], dict[str, Any]] = {}
    for setup in (hide, absent):
        lab.gateway.configure(setup(lab, small, big) | {"server": {"expose_route": True}})
        told[setup] = {}
        for way, ask in WAYS.items():
            answer = ask(lab)
            headers = [pair for pair in answer.headers if pair[0] not in ("date", "x-request-id")]
            told[setup][way] = (answer.status, headers, without_time(answer.body))
    assert not big.requests
    for way in WAYS:
        assert told[hide][way] == told[absent][way], way
    statuses = {way: told[hide][way][0] for way in WAYS}
    assert (statuses["by name"], statuses["two form fields"], statuses["fallback"], statuses["allowed"]) == (
        404, 400, 502, 200,
    )  # fmt: skip
    assert {entry.json()["model"] for entry in small.requests} == {UPSTREAM_MODEL}


def without_time(body: bytes) -> bytes:
    """A model's `created` is when its configuration was loaded."""
    return re.sub(rb'"created":\d+', b"", body)


def test_the_names_of_hidden_and_unknown_models_are_all_that_differs(lab: Lab, pair: Pair) -> None:
    Fleet(pair)
    for hidden in ("own", "mine"):
        for model, other in ((hidden, "nope"), (f"{hidden}@vllm", "nope@vllm"), (f"{hidden}:latest", "nope:latest")):
            known, unknown = pair.chat(pair.acme, model), pair.chat(pair.acme, other)
            assert known.status == unknown.status == 404
            assert known.body.replace(model.encode(), other.encode()) == unknown.body


# --- who asks
CLAIMS = (
    "x-sekisho-tenant: {}", "x-tenant: {}", "x-tenant-id: {}", "openai-organization: {}", "openai-project: {}",
    "x-forwarded-user: {}", "x-forwarded-client-cert: Subject=CN={}", "x-user: {}", "remote-user: {}", "from: {}",
    "x-session-id: {}", "x-sekisho-key: {}", "cookie: tenant={}", "forwarded: for={}", "x-client-cn: {}",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai_compatible"])
def test_who_asks_is_decided_by_the_key_alone(lab: Lab, pair: Pair, kind: str) -> None:
    """Nothing in head or body makes a caller somebody else: for the engine, the limits, the log or the bill."""
    mine, theirs = lab.engine(kind), lab.engine(kind)
    labelled = replica(theirs, labels={"tenant": pair.other}, backend=kind)
    lab.serve({"m": [replica(mine, backend=kind), labelled]}, tenants=pair.tenants, limits={"requests": "9/min"})
    assert lab.chat().status == 200
    before = salt(mine)
    headers = [claim.format(pair.other) for claim in CLAIMS]
    body = chat(user=pair.other, metadata={"tenant": pair.other, "user_id": pair.other}, tenant=pair.other,
                organization=pair.other, safety_identifier=pair.other, stream=True)  # fmt: skip
    answer = lab.call(body, headers=headers)
    seen = mine.last()
    assert answer.status == 200 and not theirs.requests and salt(mine) == before
    assert pair.other not in seen.raw_head.decode() and lab.tenant not in seen.raw_head.decode()
    assert not [name for name, _ in seen.headers if "tenant" in name or "organization" in name]
    assert seen.json()["user"] == pair.other  # data of the client's, which it stays
    assert answer.header("x-ratelimit-remaining-requests") == "7"
    line = lab.gateway.access_line(answer.header("x-request-id") or "")
    assert (line["tenant"], line["key"]) == (lab.tenant, "test")
    assert eventually(lambda: lab.answered(200) == 2)
    assert lab.gateway.metric("sekisho_requests_total", tenant=pair.other) == 0


def test_a_tenants_limits_are_not_spent_in_anothers_name(lab: Lab, pair: Pair) -> None:
    tenants = [dict(entry) | {"limits": {"requests": "2/min"}} for entry in pair.tenants]
    lab.serve({"m": [replica(lab.engine())]}, tenants=tenants)
    for _ in range(4):
        answer = lab.call(chat(user=pair.acme), headers=[f"x-sekisho-tenant: {pair.acme}"])
        assert answer.status == 200 and answer.header("x-ratelimit-limit-requests") is None
    assert [pair.chat(pair.acme).status for _ in range(3)] == [200, 200, 429]
    assert pair.chat(pair.other).status == 200


# --- the embedded engine, for real
SECRET = "The password is swordfish. Remember it well and repeat it whenever somebody asks. "
QUESTIONS = ("What is the password?", "Repeat what I said before.")


class Embedded:
    """A gateway with the small model inside, and two tenants."""

    def __init__(self, start: Callable[..., Gateway], parallel: int) -> None:
        self.keys = {name: f"sk-{name}-" + "e" * 40 for name in ("acme", "other")}
        tenants = [{"name": name, "keys": [{"name": "k", "sha256": digest(key)}]} for name, key in self.keys.items()]
        replicas = [{"path": str(MODEL), "context_length": 512, "parallel": parallel, "threads": 2}]
        self.gateway = start(base_config({"m": replicas}, tenants), wait_for="/ready")

    def ask(self, tenant: str, text: str, **more: Any) -> tuple[str, dict[str, Any]]:
        body = chat(messages=[{"role": "user", "content": text}], max_tokens=12) | {"temperature": 0} | more
        with self.gateway.wire() as wire:
            answer = wire.ask("POST", "/v1/chat/completions", body, key=self.keys[tenant]).rest().json()
        return answer["choices"][0]["message"]["content"], answer["usage"]

    def vector(self, tenant: str, text: str) -> list[float]:
        with self.gateway.wire() as wire:
            answer = wire.ask("POST", "/v1/embeddings", {"model": "m", "input": text}, key=self.keys[tenant]).rest()
        found: list[float] = answer.json()["data"][0]["embedding"]
        return found


def marked(test: Callable[..., None]) -> Callable[..., None]:
    """Needs the model and llama.cpp."""
    for mark in needs_llamacpp:
        test = mark(test)
    return test


@marked
def test_a_sequence_leaves_nothing_to_the_next_tenant_in_its_place(start: Callable[..., Gateway]) -> None:
    """One sequence, so that everybody comes after somebody else in the same cells of the KV cache."""
    engine = Embedded(start, parallel=1)
    alone = [engine.ask("other", text) for text in QUESTIONS]
    vector = engine.vector("other", "a cat")
    for text, expected in zip(QUESTIONS, alone, strict=True):
        engine.ask("acme", SECRET + text, seed=7, temperature=1.5)
        engine.ask("acme", SECRET)
        again = engine.ask("other", text)
        assert again == expected and "swordfish" not in again[0]
        assert (again[1].get("prompt_tokens_details") or {}).get("cached_tokens", 0) == 0
        engine.vector("acme", SECRET)
        assert engine.vector("other", "a cat") == vector


@marked
def test_a_seed_is_the_requests_own(start: Callable[..., Gateway]) -> None:
    """Another tenant's draws, with the same seed or none, move nobody's sampler."""
    engine = Embedded(start, parallel=1)
    story = {"seed": 7, "temperature": 1.2}
    alone = engine.ask("acme", "Tell me a story.", **story)
    for more in ({"seed": 7, "temperature": 1.2}, {"temperature": 1.9}, {"logit_bias": {"100": 50}}):
        engine.ask("other", "Tell me another.", **more)
        assert engine.ask("acme", "Tell me a story.", **story) == alone


@marked
def test_tenants_that_are_decoded_together_get_the_answers_they_get_alone(start: Callable[..., Gateway]) -> None:
    """The model is sure of these answers: a batch's rounding does not turn them."""
    engine = Embedded(start, parallel=4)
    capitals = {"acme": ("Japan", "Egypt", "Cuba"), "other": ("Peru", "Kenya", "Japan")}
    jobs = [(tenant, f"What is the capital of {country}?") for tenant in capitals for country in capitals[tenant]]
    alone = [engine.ask(*job) for job in jobs]
    assert "Tokyo" in alone[0][0] and alone[0] == alone[5]
    for _ in range(2):
        assert together([lambda job=job: engine.ask(*job) for job in jobs]) == alone  # type: ignore[misc]
