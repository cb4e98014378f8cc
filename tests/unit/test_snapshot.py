"""From configuration to the values that requests use."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backends
from backends.base import Operation
from gateway.auth import authenticate
from gateway.config import load
from gateway.people import People
from gateway.records import Changes, KeyRecord, TenantRecord
from gateway.snapshot import DEFAULT_COMPLETION, Snapshot, compile_config
from gateway.types import EmbeddedModel, Endpoint, Limit, Replica, Timeouts
from tests.unit._model_files import LLAMA, gguf

KEY = "sk-" + "a" * 48
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()
OTHER = "cd" * 32
ENGINE_KEY = "engine-secret"

FLEET = f"""\
tenants:
  - name: research
    models: [small, "llama-*"]
    limits: {{requests: [10/s, 600/min], tokens: 200000/min, token_budget: [20000000/day, 900000000/month],
      concurrency: 32}}
    weight: 2
    priority: 3
    keys:
      - {{name: ci, sha256: "{DIGEST}", models: [small], limits: {{concurrency: 4}}, expires: 2099-01-01,
         allow_from: [10.0.0.0/8]}}
      - {{name: open, sha256: "{OTHER}", role: admin}}
models:
  - name: small
    aliases: [chat]
    fallbacks: [other]
    limits: {{requests: 50/s, token_budget: 1000/day, concurrency: 7}}
    replicas:
      - {{backend: vllm, url: "http://10.0.0.5:8000/base/v1", model: org/Small, api_key: {ENGINE_KEY}, max_inflight: 64,
         weight: 2, context_length: 4096, capabilities: [tools, vision],
         timeouts: {{connect: 1s, first_byte: 2s, idle: 3s}}}}
      - {{backend: llama_server, url: "https://engine.example", context_length: 8192, capabilities: [json, tools]}}
  - name: other
    policy: round_robin
    max_tokens_default: 77
    context_length: 1000
    capabilities: [embeddings]
    replicas:
      - {{backend: openai_compatible, url: "unix:/run/engine.sock", labels: {{tenant: research, zone: a}}}}
"""

Compile = Callable[..., Snapshot]


@pytest.fixture(name="build")
def _build(tmp_path: Path) -> Compile:
    def build(text: str = FLEET, people: People | None = None) -> Snapshot:
        (tmp_path / "gateway.yaml").write_text(text, "utf-8")
        config = load(tmp_path / "gateway.yaml", kinds=backends.kinds(), environ={})
        return compile_config(config, backends.load, tmp_path / "sockets", "gateway.yaml", people)

    return build


def first(snapshot: Snapshot, model: str = "small") -> Replica:
    return snapshot.models[model].replicas[0]


# --- models
def test_names_lead_to_models(build: Compile) -> None:
    snapshot = build()
    assert list(snapshot.models) == ["small", "other"]
    assert set(snapshot.names) == {"small", "chat", "other"}
    assert snapshot.names["chat"] is snapshot.names["small"] is snapshot.models["small"]
    assert [replica.model for replica in snapshot.replicas()] == ["small", "small", "other"]


def test_a_model_gathers_what_its_replicas_can(build: Compile) -> None:
    small, other = build().models.values()
    assert (small.policy, other.policy) == ("least_load", "round_robin")
    assert (small.max_tokens_default, other.max_tokens_default) == (DEFAULT_COMPLETION, 77)
    assert (small.context_length, other.context_length) == (8192, 1000)
    assert small.capabilities == ("tools", "vision", "json")  # in the order of the file, the same in every process
    assert other.capabilities == ("embeddings",)
    assert small.fallbacks == ("other",)


def test_the_limits_of_a_model_are_its_own(build: Compile) -> None:
    small, other = build().models.values()
    assert small.limits is not None and other.limits is None
    assert small.limits.requests == (("model:small:requests/1", Limit(50, 1, "requests", "model")),)
    assert small.limits.tokens == (("model:small:budget/day", Limit(1000, 86400, "tokens", "model", "day")),)
    assert small.limits.concurrency == (("model:small", 7),)


def test_a_label_keeps_a_replica_for_its_tenant(build: Compile) -> None:
    assert [replica.tenant for replica in build().replicas()] == [None, None, "research"]


def test_a_replica(build: Compile) -> None:
    replica = first(build())
    assert replica.endpoint == Endpoint("10.0.0.5", 8000)
    assert (replica.prefix, replica.upstream_model, replica.api_key) == ("/base", "org/Small", ENGINE_KEY)
    assert (replica.max_inflight, replica.weight, replica.context_length) == (64, 2.0, 4096)
    assert replica.timeouts == Timeouts(1.0, 2.0, 3.0, None)
    assert (replica.format, replica.backend.kind, replica.embedded) == ("safetensors", "vllm", None)


@pytest.mark.parametrize(
    ("url", "endpoint", "prefix"),
    [
        ("http://h", Endpoint("h", 80), ""),
        ("http://h:8000/", Endpoint("h", 8000), ""),
        ("http://h/v1", Endpoint("h", 80), ""),
        ("http://h/v1/", Endpoint("h", 80), ""),
        ("http://h/a/b", Endpoint("h", 80), "/a/b"),
        ("https://h", Endpoint("h", 443, tls=True), ""),
        ("https://h:8443/x/v1", Endpoint("h", 8443, tls=True), "/x"),
        ("http://[::1]:8000", Endpoint("::1", 8000), ""),
        ("unix:/run/engine.sock", Endpoint("localhost", 80, unix="/run/engine.sock"), ""),
    ],
)
def test_urls(build: Compile, url: str, endpoint: Endpoint, prefix: str) -> None:
    replica = first(build(f'models: [{{name: m, replicas: [{{backend: vllm, url: "{url}"}}]}}]'), "m")
    assert (replica.endpoint, replica.prefix) == (endpoint, prefix)


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [(Endpoint("h", 80), "h"), (Endpoint("h", 443), "h:443"), (Endpoint("h", 443, True), "h"),
     (Endpoint("h", 80, True), "h:80"),
     (Endpoint("::1", 8000), "[::1]:8000"), (Endpoint("::1", 80), "[::1]")],
)  # fmt: skip
def test_the_host_header(endpoint: Endpoint, host: str) -> None:
    assert endpoint.authority == host


def test_request_heads_are_ready_to_send(build: Compile) -> None:
    replica = first(build())
    assert set(replica.heads) == set(replica.backend.paths)
    assert b"content-type" not in replica.heads[Operation.TRANSCRIPTIONS]
    lines = replica.heads[Operation.CHAT].decode().split("\r\n")
    assert lines[0] == "POST /base/v1/chat/completions HTTP/1.1"
    assert lines[-1] == ""  # more headers follow
    assert set(lines[1:-1]) == {
        "host: 10.0.0.5:8000", "content-type: application/json", "accept: application/json, text/event-stream",
        "accept-encoding: identity", "user-agent: sekisho", f"authorization: Bearer {ENGINE_KEY}",
    }  # fmt: skip
    assert b"authorization" not in first(build(), "other").heads[Operation.CHAT]


def test_replica_ids_are_stable_and_say_nothing(build: Compile) -> None:
    before = [replica.id for replica in build().replicas()]
    after = build(FLEET.replace("weight: 2,", "weight: 9,").replace("aliases: [chat]", "aliases: []"))
    assert [replica.id for replica in after.replicas()] == before
    assert len(set(before)) == 3
    for replica_id in before:
        assert "10.0.0.5" not in replica_id
        assert "engine" not in replica_id.partition("-")[2]
    assert first(build(FLEET.replace("10.0.0.5", "10.0.0.6"))).id != before[0]


def test_secrets_do_not_print(build: Compile) -> None:
    snapshot = build()
    assert ENGINE_KEY not in repr(first(snapshot)).replace(repr(first(snapshot).heads), "")
    assert DIGEST not in repr(snapshot.keys[bytes.fromhex(DIGEST)])


def test_an_embedded_engine(build: Compile, tmp_path: Path) -> None:
    (tmp_path / "Tiny.Q4.gguf").write_bytes(gguf(LLAMA))
    text = (
        "models: [{name: m, queue: {max_waiting: 7, max_wait: 9s}, replicas:"
        " [{path: Tiny.Q4.gguf, parallel: 3, context_length: 512, threads: 2}]}]"
    )
    snapshot = build(text)
    replica = first(snapshot, "m")
    path = str(tmp_path / "Tiny.Q4.gguf")
    assert replica.embedded == EmbeddedModel(path, None, 512, 3, -1, 2, 7, 9.0)
    assert replica.max_inflight == 3  # whoever comes on top waits in the gateway
    model = snapshot.models["m"]
    assert (model.max_waiting, model.max_wait) == (7, 9.0)
    assert replica.endpoint.unix is not None
    assert replica.endpoint.unix.startswith(str(tmp_path / "sockets"))
    assert replica.upstream_model == "Tiny.Q4"
    assert first(build(text), "m") == replica
    changed = first(build(text.replace("parallel: 3", "parallel: 4")), "m")
    assert changed.id != replica.id  # another engine process: nothing of the old one's health is true of it


# --- callers
def test_keys_lead_to_principals(build: Compile) -> None:
    snapshot = build()
    ci = authenticate({b"x-api-key": KEY.encode()}, snapshot.keys, None, 0.0)
    assert (ci.tenant.name, ci.tenant.weight, ci.tenant.priority, ci.key, ci.role) == ("research", 2.0, 3, "ci", "user")
    assert (ci.models, ci.key_models) == (("small", "llama-*"), ("small",))
    assert ci.expires == 4070908800.0
    assert [str(network) for network in ci.networks] == ["10.0.0.0/8"]
    admin = snapshot.keys[bytes.fromhex(OTHER)]
    assert (admin.role, admin.key_models, admin.expires, admin.networks) == ("admin", None, None, ())


def test_limits_of_a_key_are_the_tenants_and_its_own(build: Compile) -> None:
    ci, admin = build().keys.values()
    assert ci.limits.requests == (
        ("tenant:research:requests/1", Limit(10, 1, "requests", "tenant")),
        ("tenant:research:requests/60", Limit(600, 60, "requests", "tenant")),
    )
    assert ci.limits.tokens == (
        ("tenant:research:tokens/60", Limit(200_000, 60, "tokens", "tenant")),
        ("tenant:research:budget/day", Limit(20_000_000, 86400, "tokens", "tenant", "day")),
        ("tenant:research:budget/month", Limit(900_000_000, 86400, "tokens", "tenant", "month")),
    )
    assert ci.limits.concurrency == (("tenant:research", 32), ("key:research/ci", 4))
    assert admin.limits.concurrency == (("tenant:research", 32),)


def test_counters_of_different_owners_never_meet(build: Compile) -> None:
    text = "tenants:\n" + "".join(
        f"  - name: {tenant}\n    limits: {{requests: 1/min, tokens: 1/min, token_budget: 1/day, concurrency: 1}}\n"
        "    keys:\n"
        + "".join(
            f"      - {{name: {key}, sha256: '{hashlib.sha256((tenant + key).encode()).hexdigest()}',"
            " limits: {requests: 1/min, tokens: 1/min, token_budget: 1/day, concurrency: 1}}\n"
            for key in ("a", "b")
        )
        for tenant in ("a", "b")
    )
    principals = list(build(text).keys.values())
    names = [name for p in principals for name, _ in (*p.limits.requests, *p.limits.tokens)]
    places = [name for p in principals for name, _ in p.limits.concurrency]
    assert len(set(names)) == 6 * 3  # two tenants and four keys
    assert len(set(places)) == 6


# --- others than those of the file
def stored(**more: Any) -> Changes:
    key = KeyRecord("key_1", "lab", "laptop", b"\x01" * 32, **more)
    return Changes(1, [TenantRecord("lab", models=("small",))], [key])


def test_people_of_the_database_come_beside_those_of_the_file(build: Compile) -> None:
    before = build()
    after = before.with_people(before.people.with_changes(stored()))
    assert set(after.keys) == {*before.keys, b"\x01" * 32}
    assert after.keys is after.people.keys
    assert (after.models, after.names, after.config) == (before.models, before.names, before.config)
    assert b"\x01" * 32 not in before.keys  # requests that run keep what they began with
    assert set(after.with_people(after.people.with_changes(stored(revoked_at=1.0))).keys) == set(before.keys)


def test_a_reload_keeps_the_people_of_the_database(build: Compile) -> None:
    people = People().with_changes(stored())
    snapshot = build(people=people)
    assert set(snapshot.keys) == {bytes.fromhex(DIGEST), bytes.fromhex(OTHER), b"\x01" * 32}
    assert snapshot.keys[b"\x01" * 32].key == "key_1"
    changed = build(FLEET.replace("name: research", "name: lab"), people=snapshot.people)
    assert changed.keys[b"\x01" * 32].models == ("small", "llama-*")


CERTIFICATES = """\
server: {tls: {cert_file: crt, key_file: crt, client_ca_file: crt}}
auth:
  certificates:
    - {san: "spiffe://cluster/app", tenant: research, role: operator, models: [small]}
    - {subject: robot, tenant: lab}
"""


def test_certificates_stand_for_members_of_tenants_that_exist(build: Compile, tmp_path: Path) -> None:
    (tmp_path / "crt").touch()
    snapshot = build(FLEET + CERTIFICATES)
    assert set(snapshot.holders) == {"san:spiffe://cluster/app"}
    holder = snapshot.holders["san:spiffe://cluster/app"]
    assert (holder.tenant.name, holder.role, holder.key_models) == ("research", "operator", ("small",))
    assert holder.key == "cert:spiffe://cluster/app"
    assert holder.limits is snapshot.people.tenants["research"].limits
    later = snapshot.with_people(snapshot.people.with_changes(stored()))
    assert set(later.holders) == {"san:spiffe://cluster/app", "subject:robot"}
    assert later.holders["subject:robot"].models == ("small",)


def test_without_required_auth_everybody_is_one_anonymous_user(build: Compile) -> None:
    assert build().anonymous is None
    anonymous = build(FLEET + "auth: {required: false}\n").anonymous
    assert anonymous is not None
    assert (anonymous.role, anonymous.models, bool(anonymous.limits)) == ("user", ("*",), False)


# --- the whole
def test_a_snapshot_cannot_be_changed(build: Compile) -> None:
    snapshot: Any = build()
    with pytest.raises(AttributeError):
        snapshot.max_event = 1
    for mapping in (snapshot.models, snapshot.names, snapshot.keys, snapshot.holders):
        with pytest.raises(TypeError):
            mapping["x"] = None


def test_networks_hosts_and_sizes(build: Compile) -> None:
    snapshot = build(
        FLEET + "server: {trusted_proxies: [10.0.0.0/8], max_event: 5MiB}\n"
        'metrics: {allow: [127.0.0.0/8, "::1/128"]}\nmedia: {allow_hosts: [images.example]}\n'
    )
    assert [str(net) for net in snapshot.metrics_networks] == ["127.0.0.0/8", "::1/128"]
    assert [str(net) for net in snapshot.trusted_proxies] == ["10.0.0.0/8"]
    assert snapshot.media.hosts == {"images.example"}
    assert snapshot.max_event == 5 << 20


@pytest.mark.parametrize(
    "text",
    [
        "state: {redis: redis://h}\n",
        "state: {database: null}\n",
        'server: {cors_origins: ["https://a.example"]}\n',
        "auth: {jwt: [{issuer: x, audience: y, jwks_url: https://id.example/k}]}\n",
        "server: {tls: {cert_file: crt, key_file: crt, client_ca_file: crt}}\n",
    ],
)
def test_a_setting_that_has_one_is_not(build: Compile, tmp_path: Path, text: str) -> None:
    (tmp_path / "crt").touch()
    assert build(FLEET + text).models
