"""The configuration file: what it becomes, and what a user is told when it is wrong."""

import copy
import importlib
import ipaddress
import json
import pickle
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema_rs
import pydantic
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.config import Config, ConfigError, LimitsConfig, Rate, load, schema
from gateway.config import yaml as config_yaml
from gateway.config.shape import Shape, shape_of
from gateway.config.yaml import parse_document
from gateway.units import BudgetRate

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("llamacpp", "ollama", "openai_compatible", "vllm")
DIGEST = "ab" * 32

Load = Callable[..., Config]
Refuse = Callable[..., list[str]]

FLEET = """\
tenants:
  - name: research
    keys:
      - {name: ci, sha256: "DIGEST"}
models:
  - name: smollm2
    replicas:
      - {backend: vllm, url: "http://10.0.0.5:8000"}
""".replace("DIGEST", DIGEST)


@pytest.fixture(name="read")
def _read(tmp_path: Path) -> Load:
    def read(text: str, environ: dict[str, str] | None = None, overrides: dict[str, object] | None = None) -> Config:
        (tmp_path / "gateway.yaml").write_text(text, "utf-8")
        return load(tmp_path / "gateway.yaml", kinds=KINDS, environ=environ or {}, overrides=overrides or {})

    return read


@pytest.fixture(name="refuse")
def _refuse(read: Load, tmp_path: Path) -> Refuse:
    """The problems of a text, each as printed but without the folder; every one is a single line."""

    def refuse(
        text: str, environ: dict[str, str] | None = None, overrides: dict[str, object] | None = None
    ) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            read(text, environ, overrides)
        lines = str(caught.value).split("\n")
        assert len(lines) == len(caught.value.problems) > 0
        return [line.replace(f"{tmp_path}/", "") for line in lines]

    return refuse


# What a file becomes


@pytest.mark.parametrize(("server", "url"), [
    ("{}", "http://127.0.0.1:8080"),
    ("{host: '::1', port: 9}", "http://[::1]:9"),
    ("{host: gateway.example, tls: {cert_file: gateway.yaml, key_file: gateway.yaml}}", "https://gateway.example:8080"),
])  # fmt: skip
def test_url_of_the_port(read: Load, server: str, url: str) -> None:
    assert read(f"server: {server}\n").server.url == url


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "server:\nmodels:\ntenants:\ndiscovery:\nlogging:\n"])
def test_nothing_is_the_defaults(read: Load, tmp_path: Path, text: str) -> None:
    config = read(text)
    server = config.server
    assert (server.host, server.port, server.workers, server.tls) == ("127.0.0.1", 8080, 1, None)
    assert (server.max_body, server.shutdown_grace, server.keepalive_interval) == (32 << 20, 30.0, 15.0)
    assert (config.models, config.tenants, config.discovery) == ((), (), ())
    assert (config.auth.required, config.limits.on_store_failure, config.logging.content) == (True, "local", "none")
    state = config.state
    assert (state.redis, state.spool, state.usage_retention) == (None, None, 400 * 86400.0)
    assert state.database is not None and state.database.get_secret_value() == f"sqlite:///{tmp_path}/sekisho.db"


def test_a_fleet(read: Load) -> None:
    config = read(FLEET)
    (model,) = config.models
    (replica,) = model.replicas
    assert (model.policy, model.queue.max_waiting, model.queue.max_wait) == ("least_load", 64, 30.0)
    assert (replica.backend, replica.url, replica.weight) == ("vllm", "http://10.0.0.5:8000", 1.0)
    times = replica.timeouts
    assert (times.connect, times.first_byte, times.idle, times.total) == (3.0, 300.0, 60.0, None)
    (key,) = config.tenants[0].keys
    assert (key.sha256, key.role, key.models, key.expires, key.allow_from) == (DIGEST, "user", ("*",), None, ())


def test_units_networks_and_dates(read: Load) -> None:
    config = read(
        """
server: {max_body: 10MB, shutdown_grace: 1m, keepalive_interval: 0s, trusted_proxies: [10.0.0.0/8, "::1"]}
tenants:
  - name: t
    limits: {requests: 600/min, token_budget: 20000000/day}
    keys: [{name: k, sha256: "DIGEST", expires: 2027-01-31}]
""".replace("DIGEST", DIGEST)
    )
    assert (config.server.max_body, config.server.shutdown_grace, config.server.keepalive_interval) == (
        10**7,
        60.0,
        0.0,
    )
    assert config.server.trusted_proxies == (ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("::1/128"))
    assert config.tenants[0].limits.requests == (Rate(600, 60),)
    assert config.tenants[0].limits.token_budget == (BudgetRate(20_000_000, "day"),)
    assert config.tenants[0].keys[0].expires == datetime(2027, 1, 31, tzinfo=UTC)


def test_what_is_loaded_cannot_be_changed(read: Load) -> None:
    config = read(FLEET)
    with pytest.raises(pydantic.ValidationError):
        config.server.port = 1  # type: ignore[misc]
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))


def test_json_is_read(read: Load) -> None:
    assert read(json.dumps(yaml.safe_load(FLEET))) == read(FLEET)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("http://10.0.0.5:8000/", "http://10.0.0.5:8000"),
        ("http://10.0.0.5:8000/v1", "http://10.0.0.5:8000"),
        ("https://host/team/a/v1/", "https://host/team/a"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("unix:/run/engine.sock", "unix:/run/engine.sock"),
        ("unix:///run/engine.sock", "unix:/run/engine.sock"),
    ],
)
def test_engine_urls(read: Load, written: str, meant: str) -> None:
    assert read(FLEET.replace("http://10.0.0.5:8000", written)).models[0].replicas[0].url == meant


def test_relative_paths_start_at_the_file(read: Load, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.GGUF").touch()
    (tmp_path / "crt").touch()
    config = read("""
state: {database: sqlite:///data/x.db}
server: {tls: {cert_file: crt, key_file: crt, min_version: 1.3}}
models: [{name: a, replicas: [{path: models/a.GGUF}]}]
discovery: [{scan: models}]
""")
    (replica,) = config.models[0].replicas
    assert (replica.path, replica.backend) == (tmp_path / "models" / "a.GGUF", "llamacpp")
    assert config.discovery[0].scan == tmp_path / "models"
    assert config.server.tls is not None
    assert (config.server.tls.cert_file, config.server.tls.min_version) == (tmp_path / "crt", "1.3")
    assert config.state.database is not None
    assert config.state.database.get_secret_value() == f"sqlite:///{tmp_path}/data/x.db"


LIMITS = "tenants: [{name: t, limits: {requests: %s}}]"


@pytest.mark.parametrize(
    ("written", "rates"),
    [
        ("600/min", (Rate(600, 60),)),
        ("[10/s, 600/min]", (Rate(10, 1), Rate(600, 60))),
        ("[10/s]", (Rate(10, 1),)),
        ("'${R}'", (Rate(8, 3600),)),
        ("['${R}', 1/s]", (Rate(8, 3600), Rate(1, 1))),
        ("null", ()),
        ("[]", ()),
        ("", ()),
    ],
)
def test_one_window_or_several(read: Load, written: str, rates: tuple[Rate, ...]) -> None:
    assert read(LIMITS % written, {"R": "8/hour"}).tenants[0].limits.requests == rates


@pytest.mark.parametrize("written", ["600/min", "[600/min]", "null", "[]", "'${R}'"])
def test_windows_are_overridden_whole_or_one_by_one(read: Load, written: str) -> None:
    name = "SEKISHO__TENANTS__0__LIMITS__REQUESTS"

    def limits(**environ: str) -> tuple[Rate, ...]:
        return read(LIMITS % written, {"R": "600/min", **environ}).tenants[0].limits.requests

    assert limits(**{name: "10/s"}) == limits(**{f"{name}__0": "10/s"}) == (Rate(10, 1),)
    assert limits(**{name: "10/s", f"{name}__1": "5/hour"}) == (Rate(10, 1), Rate(5, 3600))
    assert limits(**{name: ""}) == limits(**{name: "null"}) == ()
    if limits():
        assert limits(**{f"{name}__1": "10/s"}) == (Rate(600, 60), Rate(10, 1))


def test_models_have_limits_like_tenants(read: Load) -> None:
    limits = "limits: {requests: [5/s, 50/min], token_budget: 9/month, concurrency: 3}"
    environ = {"SEKISHO__MODELS__0__LIMITS__TOKENS": "7/min", "SEKISHO__MODELS__0__LIMITS__CONCURRENCY": "4"}
    model = read(FLEET.replace("name: smollm2", f"name: smollm2\n    {limits}"), environ).models[0]
    assert (model.limits.requests, model.limits.tokens) == ((Rate(5, 1), Rate(50, 60)), (Rate(7, 60),))
    assert (model.limits.token_budget, model.limits.concurrency) == ((BudgetRate(9, "month"),), 4)
    assert read(FLEET.replace("name: smollm2", "name: smollm2\n    limits:")).models[0].limits == LimitsConfig()


def test_a_database_and_a_retention_may_be_none(read: Load, tmp_path: Path) -> None:
    state = read("state: {database: null, usage_retention: null, spool: waiting}").state
    assert (state.database, state.usage_retention, state.spool) == (None, None, tmp_path / "waiting")
    overridden = read("state: {database: 'sqlite:///x.db'}", {"SEKISHO__STATE__DATABASE": "null"}).state
    assert overridden.database is None


def test_the_keys_of_an_issuer_come_from_its_address_or_from_a_file(read: Load, tmp_path: Path) -> None:
    """`jwks_file` is a file to be watched, and not the content of an option called `jwks`."""
    (tmp_path / "keys.json").write_text('{"keys": []}')
    issuer = "auth: {jwt: [{issuer: a, audience: b, jwks_file: keys.json}]}"
    (by_file,) = read(issuer).auth.jwt
    assert (by_file.jwks_file, by_file.jwks_url) == (tmp_path / "keys.json", None)
    assert by_file.algorithms == ("RS256", "ES256")
    name = "SEKISHO__AUTH__JWT__0__JWKS"
    (by_url,) = read(issuer, {f"{name}_FILE": "null", f"{name}_URL": "https://id.example/k"}).auth.jwt
    assert (by_url.jwks_file, by_url.jwks_url) == (None, "https://id.example/k")
    (overridden,) = read(issuer.replace("keys.json", "nowhere"), {f"{name}_FILE": "keys.json"}).auth.jwt
    assert overridden.jwks_file == tmp_path / "keys.json"


def test_networks_of_keys_and_certificates(read: Load, tmp_path: Path) -> None:
    (tmp_path / "crt").touch()
    config = read(
        FLEET.replace("{name: ci,", '{name: ci, allow_from: [10.0.0.0/8, "::1"],')
        + """
server: {tls: {cert_file: crt, key_file: crt, client_ca_file: crt}}
auth:
  certificates:
    - {san: "spiffe://cluster/app", tenant: research}
    - {subject: robot, tenant: elsewhere, role: operator, models: [small]}
"""
    )
    assert [str(one) for one in config.tenants[0].keys[0].allow_from] == ["10.0.0.0/8", "::1/128"]
    first, second = config.auth.certificates
    assert (first.san, first.subject, first.role, first.models) == ("spiffe://cluster/app", None, "user", ("*",))
    assert (second.subject, second.tenant, second.role) == ("robot", "elsewhere", "operator")


def test_merge_keys_and_anchors(read: Load) -> None:
    config = read("""
models:
  - name: a
    queue: &patient {max_wait: 5m, max_waiting: 3}
    replicas: &engines [{backend: vllm, url: "http://x:1"}]
  - name: b
    queue: {<<: *patient, max_waiting: 9}
    replicas: *engines
""")
    assert (config.models[1].queue.max_wait, config.models[1].queue.max_waiting) == (300.0, 9)
    assert config.models[0].replicas == config.models[1].replicas


# Environment, files, overrides


def test_variables_are_filled_in(read: Load) -> None:
    config = read(
        FLEET.replace('url: "http://10.0.0.5:8000"', 'url: "http://${HOST}:8000", model: "$${x}", api_key: "${KEY}"')
        + 'server: {port: "${PORT}"}\n',
        {"HOST": "gpu-1", "KEY": "sec${ret}", "PORT": "9000"},
    )
    (replica,) = config.models[0].replicas
    assert (replica.url, replica.model, config.server.port) == ("http://gpu-1:8000", "${x}", 9000)
    assert replica.api_key is not None and replica.api_key.get_secret_value() == "sec${ret}"  # filled once, not again
    assert "sec" not in repr(config)


def test_an_unset_variable_is_named(refuse: Refuse) -> None:
    (line,) = refuse("server:\n  host: ${NOT_THERE}\n")
    assert line.startswith("gateway.yaml:2: server.host: the environment variable NOT_THERE is not set")
    assert "variable's name" in refuse("server: {host: '${A-b}'}")[0]
    assert "variable's name" in refuse("server: {host: '${A'}")[0]


def test_values_from_files(read: Load, refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"  {DIGEST}\n")
    (tmp_path / "redis").write_text("redis://:pw@host:6379/0\n")
    text = FLEET.replace(f'sha256: "{DIGEST}"', "sha256_file: key") + "state: {redis_file: redis, redis: null}\n"
    config = read(text)
    assert config.tenants[0].keys[0].sha256 == DIGEST
    assert config.state.redis is not None and config.state.redis.get_secret_value() == "redis://:pw@host:6379/0"
    assert "state.redis_file: `redis` is given too" in refuse("state: {redis_file: redis, redis: 'redis://h'}")[0]
    assert "cannot be read" in refuse("state: {redis_file: nowhere}")[0]
    assert "larger than 64 KiB" in refuse("state: {redis_file: /dev/zero}")[0]
    assert "unknown key" in refuse("server: {port_file: key}")[0]  # only text is read from files


def test_the_environment_overrides(read: Load) -> None:
    config = read(
        FLEET,
        {
            "SEKISHO__SERVER__PORT": "9090",
            "sekisho__server__public_docs": "true",
            "SEKISHO__MODELS__0__QUEUE__MAX_WAIT": "5s",
            "SEKISHO__METRICS__ALLOW__0": "10.0.0.0/8",
            "SEKISHO__METRICS__ALLOW__1": "127.0.0.1",
            "SEKISHO__MODELS__0__REPLICAS__0__LABELS__ZONE": "a",
            "SEKISHO__STATE__REDIS": "redis://${not-a-variable}",
            "SEKISHO__LOGGING__LEVEL": "debug",
            "SEKISHO_CONFIG": "ignored",
            "PATH": "/bin",
        },
    )
    assert (config.server.port, config.server.public_docs, config.models[0].queue.max_wait) == (9090, True, 5.0)
    assert [str(network) for network in config.metrics.allow] == ["10.0.0.0/8", "127.0.0.1/32"]
    assert dict(config.models[0].replicas[0].labels) == {"zone": "a"}
    assert config.state.redis is not None and "${not" in config.state.redis.get_secret_value()


def test_overrides_replace_what_they_exclude(read: Load, tmp_path: Path) -> None:
    (tmp_path / "redis").write_text("redis://from-file")
    by_file = read("state: {redis: 'redis://h'}", {"SEKISHO__STATE__REDIS_FILE": "redis"}).state.redis
    by_value = read("state: {redis_file: nowhere}", {"SEKISHO__STATE__REDIS": "redis://env"}).state.redis
    assert by_file is not None and by_file.get_secret_value() == "redis://from-file"
    assert by_value is not None and by_value.get_secret_value() == "redis://env"
    assert read("state: {redis: '${UNSET}'}", {"SEKISHO__STATE__REDIS": "null"}).state.redis is None


def test_options_win_over_the_environment(read: Load) -> None:
    config = read("server: {port: 1}", {"SEKISHO__SERVER__PORT": "2"}, {"server.port": 3, "logging.level": "error"})
    assert (config.server.port, config.logging.level) == (3, "error")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("SEKISHO__SERVER__PROT", "did you mean `port`?"),
        ("SEKISHO__SERVER", "a section, not a single value"),
        ("SEKISHO__METRICS__ALLOW", "a list, not a single value"),
        ("SEKISHO__MODELS__3__NAME", "has no item 3"),
        ("SEKISHO__MODELS__X__NAME", "has no item X"),
        ("SEKISHO__SERVER__PORT__X", "is a single value"),
        ("SEKISHO__", "names no field"),
        ("SEKISHO__SERVER__PORT", "not a whole number"),
        ("SEKISHO__LOGGING__LEVEL", "not one of the choices"),
        ("SEKISHO__TENANTS__0__LIMITS__REQUESTS", "tenants[0].limits.requests: not a rate"),
        ("SEKISHO__TENANTS__0__LIMITS__TOKEN_BUDGET", "tenants[0].limits.token_budget: not a budget"),
        ("SEKISHO__TENANTS__0__LIMITS__TOKENS__0", "tenants[0].limits.tokens[0]: not a rate"),
        ("SEKISHO__MODELS__0__LIMITS__TOKENS__1", "has no item 1"),
        ("SEKISHO__TENANTS__0__KEYS__0__ALLOW_FROM", "a list, not a single value"),
    ],
)
def test_wrong_overrides_name_the_variable(refuse: Refuse, name: str, said: str) -> None:
    (line,) = refuse(FLEET, {name: "hush-hush"})
    assert line.startswith(f"{name}: ") and said in line
    assert "hush-hush" not in line


# What is wrong, and where


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("server:\n  max_bdy: 1MiB\n", "gateway.yaml:2: server.max_bdy: unknown key, did you mean `max_body`?"),
        ("state:\n  redis_fil: x\n", "gateway.yaml:2: state.redis_fil: unknown key, did you mean `redis_file`?"),
        ("qqq: 1\n", "gateway.yaml:1: qqq: unknown key, remove it"),
        (
            "server:\n  port: 70000\n",
            "gateway.yaml:2: server.port: out of range, write a value less than or equal to 65535",
        ),
        ("server: {port: 0}\n", "gateway.yaml:1: server.port: out of range, write a value greater than or equal to 1"),
        ("server: {port: x}\n", "gateway.yaml:1: server.port: not a whole number, write digits only"),
        ("server: {workers: yes}\n", "gateway.yaml:1: server.workers: not a number, write digits only"),
        ("server: {port: null}\n", "gateway.yaml:1: server.port: not a whole number, write digits only"),
        (
            "server: {idle_timeout: 0s}\n",
            "gateway.yaml:1: server.idle_timeout: out of range, write a value greater than 0",
        ),
        (
            "server: {public_docs: maybe}\n",
            "gateway.yaml:1: server.public_docs: neither true nor false, write one of them",
        ),
        ("server: [1]\n", "gateway.yaml:1: server: not a section, write its keys on indented lines, or {key: value}"),
        ("tenants: {a: b}\n", "gateway.yaml:1: tenants: not a list, write [a, b] or lines that begin with -"),
        ("tenants:\n  - name: 3\n", "gateway.yaml:2: tenants[0].name: not text, put it in quotes"),
        (
            "tenants:\n  -\n",
            "gateway.yaml:2: tenants[0]: not a section, write its keys on indented lines, or {key: value}",
        ),
        (
            "models:\n  - aliases: []\n    replicas: []\n",
            "gateway.yaml:2: models[0].name: missing, this key is required",
        ),
        (
            "models: [{name: a, replicas: []}]\n",
            "gateway.yaml:1: models[0].replicas: an empty list, at least one item is needed",
        ),
        ("logging: {content: ful}\n", "gateway.yaml:1: logging.content: not one of the choices, did you mean `full`?"),
        (
            "metrics:\n  allow:\n    - 1.2.3\n",
            "gateway.yaml:3: metrics.allow[0]: not a network, write an address or a CIDR",
        ),
        (
            "metrics: {allow: [10.0.0.5/8]}\n",
            "gateway.yaml:1: metrics.allow[0]: an address inside a network, not a network, write 10.0.0.0/8",
        ),
        ("tenants: [{name: a, models: ['a[b']}]\n", "gateway.yaml:1: tenants[0].models[0]: not a glob"),
        (
            "tenants: [{name: a, limits: {requests: 5}}]\n",
            "gateway.yaml:1: tenants[0].limits.requests: not a rate, write",
        ),
        (
            "tenants:\n  - name: a\n    limits:\n      requests:\n        - 5/s\n        - 5\n",
            "gateway.yaml:6: tenants[0].limits.requests[1]: not a rate, write",
        ),
        (
            "tenants:\n  - name: a\n    limits:\n      requests: [60/min, 1/s, 5/60s]\n",
            "gateway.yaml:4: tenants[0].limits.requests: two limits for the same window, keep the smaller one",
        ),
        (
            "tenants: [{name: a, limits: {token_budget: 5/hour}}]\n",
            "gateway.yaml:1: tenants[0].limits.token_budget: not a budget, write a whole count and a period",
        ),
        (
            "tenants: [{name: a, limits: {token_budget: [5/day, 7/d]}}]\n",
            "gateway.yaml:1: tenants[0].limits.token_budget: two limits for the same window",
        ),
        (
            "models: [{name: a, limits: {requests: {s: 5}}, replicas: [{backend: vllm, url: 'http://x'}]}]\n",
            "gateway.yaml:1: models[0].limits.requests: not a rate, write",
        ),
        (
            "tenants: [{name: a, keys: [{name: k, sha256: a, allow_from: [10.0.0.5/8]}]}]\n",
            "gateway.yaml:1: tenants[0].keys[0].allow_from[0]: an address inside a network",
        ),
        ("state: {usage_retention: 0s}\n", "gateway.yaml:1: state.usage_retention: out of range"),
        (
            "tenants: [{name: a, weight: 0}]\n",
            "gateway.yaml:1: tenants[0].weight: out of range, write a value greater than 0",
        ),
        ("server: {cors_origins: ['https://a/b']}\n", "gateway.yaml:1: server.cors_origins[0]: an origin has no path"),
        ("server: {host: 'http://x'}\n", "gateway.yaml:1: server.host: not a host"),
        ("media: {allow_hosts: ['*.example']}\n", "gateway.yaml:1: media.allow_hosts[0]: not a host name"),
        ("state: {database: mysql://x}\n", "gateway.yaml:1: state.database: not a database URL"),
        ("state: {redis: http://x}\n", "gateway.yaml:1: state.redis: not a usable URL, write redis://host:6379/0"),
        ("- a\n", "gateway.yaml:1: not a mapping, write sections such as `server:`"),
        (
            "auth: {jwt: [{issuer: a, audience: b, jwks_url: 'http://id.example'}]}\n",
            "gateway.yaml:1: auth.jwt[0].jwks_url: not an https:// address",
        ),
        (
            "auth: {jwt: [{issuer: a, audience: b, jwks_url: 'https://id.example', algorithms: [none]}]}\n",
            "gateway.yaml:1: auth.jwt[0].algorithms[0]: not one of the choices",
        ),
        (
            "auth: {jwt: [{issuer: a, audience: b, jwks_url: 'https://id.example', algorithms: [HS256]}]}\n",
            "gateway.yaml:1: auth.jwt[0].algorithms[0]: not one of the choices",
        ),
        (
            "auth: {jwt: [{issuer: a, audience: b}]}\n",
            "gateway.yaml:1: auth.jwt[0]: exactly one of `jwks_url` and `jwks_file`",
        ),
        (
            "auth: {jwt: [{issuer: a, audience: b, jwks_fil: keys}]}\n",
            "gateway.yaml:1: auth.jwt[0].jwks_fil: unknown key, did you mean `jwks_file`?",
        ),
        (
            "auth: {certificates: [{tenant: a}]}\n",
            "gateway.yaml:1: auth.certificates[0]: exactly one of `san` and `subject`",
        ),
        ("discovery: [{backend: vllm}]\n", "gateway.yaml:1: discovery[0]: exactly one of `url` and `scan`"),
    ],
)
def test_wrong_values(refuse: Refuse, text: str, line: str) -> None:
    found = refuse(text)
    assert any(one.startswith(line) for one in found), found


@pytest.mark.parametrize(
    ("replica", "said"),
    [
        ("{backend: vllm}", "exactly one of `url` and `path`"),
        ("{backend: vllm, url: 'http://x', path: a.gguf}", "exactly one of `url` and `path`"),
        ("{backend: vllm, url: 'http://x', parallel: 2}", "`parallel` has no effect with `url`"),
        ("{path: a.gguf, api_key: x}", "`api_key` has no effect with `path`"),
        ("{backend: vllm, url: 'http://x', ca_file: a}", "certificates for an engine without TLS"),
        ("{backend: vllm, url: 'https://x', client_key_file: a}", "`client_key_file` without its certificate"),
        ("{backend: vllm, url: 'http://user:pw@x'}", "credentials in the URL"),
        ("{backend: vllm, url: 'http://x/?a=1'}", "a query or fragment"),
        ("{backend: vllm, url: 'http://x/#a'}", "a query or fragment"),
        ("{backend: vllm, url: 'ftp://x'}", "not a usable URL"),
        ("{backend: vllm, url: 'http://x:99999'}", "not a usable URL"),
        ("{backend: vllm, url: 'http://'}", "not a usable URL"),
        ("{backend: vllm, url: 'unix:run.sock'}", "not a socket path"),
        ("{backend: vllm, url: 'http://x', weight: -1}", "out of range"),
        ("{backend: vllm, url: 'http://x', weight: .nan}", "out of range"),
        ("{backend: vllm, url: 'http://x', max_inflight: 0}", "out of range"),
        ("{backend: vllm, url: 'http://x', timeouts: {connect: 0s}}", "out of range"),
        ("{backend: vllm, url: 'http://x', labels: {a: 1}}", "not text"),
        ("{path: a.gguf, parallel: 0}", "out of range"),
        ("{path: a.gguf, sha256: abc}", "not a SHA-256"),
        ("{path: nowhere.gguf}", "no such file: "),
        ("{url: 'http://x'}", "no `backend`"),
        ("{backend: vlm, url: 'http://x'}", "unknown backend `vlm`, did you mean `vllm`?"),
        ("{backend: openai-compatible, url: 'http://x'}", "did you mean `openai_compatible`?"),
        ("{backend: zzz, url: 'http://x'}", "write one of llamacpp, ollama, openai_compatible, vllm"),
    ],
)
def test_wrong_replicas(refuse: Refuse, replica: str, said: str) -> None:
    (line,) = refuse(f"models:\n  - name: a\n    replicas:\n      - {replica}\n")
    assert line.startswith("gateway.yaml:4: models[0].replicas[0]") and said in line


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda text: text + text[text.index("  - name: smollm2") :],
            "gateway.yaml:9: models[1].name: model name or alias `smollm2` is used twice",
        ),
        (
            lambda text: text.replace("name: smollm2", "name: smollm2\n    aliases: [a, a]"),
            "gateway.yaml:7: models[0].aliases[1]: model name or alias `a` is used twice",
        ),
        (
            lambda text: text.replace("name: smollm2", "name: smollm2\n    fallbacks: [smolm2]"),
            "gateway.yaml:7: models[0].fallbacks[0]: unknown model `smolm2`, name a model of this file",
        ),
        (
            lambda text: text.replace("name: smollm2", "name: smollm2\n    fallbacks: [smollm2]"),
            "gateway.yaml:7: models[0].fallbacks[0]: a model that falls back to itself",
        ),
        (
            lambda text: text + '      - {backend: vllm, url: "http://10.0.0.5:8000/"}\n',
            "gateway.yaml:9: models[0].replicas[1]: the same engine as replicas[0]",
        ),
        (
            lambda text: text.replace("models:", "  - {name: research}\nmodels:"),
            "gateway.yaml:5: tenants[1].name: tenant name `research` is used twice",
        ),
        (
            lambda text: text.replace("models:", f"      - {{name: ci, sha256: '{'0' * 64}'}}\nmodels:"),
            "gateway.yaml:5: tenants[0].keys[1].name: key name `ci` is used twice",
        ),
        (
            lambda text: text.replace(
                "models:", f"  - {{name: b, keys: [{{name: b, sha256: {DIGEST.upper()}}}]}}\nmodels:"
            ),
            "gateway.yaml:5: tenants[1].keys[0].sha256: the same key twice",
        ),
        (
            lambda text: text + "server: {workers: 2}\n",
            "gateway.yaml:9: server.workers: several workers without a shared store",
        ),
        (
            lambda text: text + "server: {host: 0.0.0.0}\nauth: {required: false}\n",
            "gateway.yaml:10: auth.required: false while `server.host` can be reached",
        ),
        (
            lambda text: text + "auth: {certificates: [{san: a, tenant: a}]}\n",
            "gateway.yaml:9: auth.certificates: client certificates that nobody asks for",
        ),
        (
            lambda text: text + "auth: {certificates: [{san: a, tenant: a}, {san: a, tenant: b}]}\n",
            "gateway.yaml:9: auth.certificates[1]: the same name twice",
        ),
        (
            lambda text: text + "auth: {jwt: [{issuer: a, audience: b, jwks_file: nowhere}]}\n",
            "gateway.yaml:9: auth.jwt[0].jwks_file: no such file",
        ),
        (
            lambda text: text + "auth:\n  jwt:\n" + "    - {issuer: a, audience: b, jwks_url: 'https://x'}\n" * 2,
            "gateway.yaml:12: auth.jwt[1]: the same issuer and audience twice",
        ),
        (lambda text: text + "discovery: [{scan: nowhere}]\n", "gateway.yaml:9: discovery[0].scan: no such folder"),
        (
            lambda text: text + "discovery: [{backend: olama, url: 'http://x'}]\n",
            "gateway.yaml:9: discovery[0].backend: unknown",
        ),
        (
            lambda text: text + "server: {tls: {cert_file: a, key_file: '.'}}\n",
            "gateway.yaml:9: server.tls.cert_file: no such file",
        ),
        (
            lambda text: text + "server: {tls: {cert_file: a, key_file: '.'}}\n",
            "gateway.yaml:9: server.tls.key_file: not a file",
        ),
    ],
)
def test_cross_checks(refuse: Refuse, change: Callable[[str], str], line: str) -> None:
    found = refuse(change(FLEET))
    assert any(one.startswith(line) for one in found), found


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_auth_may_be_off_on_loopback(read: Load, host: str) -> None:
    assert not read(f"auth: {{required: false}}\nserver: {{host: '{host}'}}\n").auth.required


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "127.0.0.1.nip.io"])
def test_auth_may_not_be_off_elsewhere(refuse: Refuse, host: str) -> None:
    (line,) = refuse("auth: {required: false}\n", overrides={"server.host": host})  # as `serve --host` does
    assert "auth.required" in line


def test_discovered_models_may_be_fallbacks(read: Load, refuse: Refuse) -> None:
    found = "discovery: [{backend: ollama, url: 'http://x', name_prefix: 'o/'}]\n"
    config = read(FLEET.replace("name: smollm2", "name: smollm2\n    fallbacks: [o/llama3]") + found)
    assert config.models[0].fallbacks == ("o/llama3",)
    assert (
        "unknown model" in refuse(FLEET.replace("name: smollm2", "name: smollm2\n    fallbacks: [llama3]") + found)[0]
    )


def test_everything_wrong_is_reported_at_once_in_order(refuse: Refuse) -> None:
    found = refuse("logging: {format: xml}\nserver:\n  port: x\n  hots: y\n")
    assert [line.split(":")[1] for line in found] == ["1", "3", "4"]


def test_secrets_are_never_repeated(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cr3t value")
    for text in (
        "state: {database: 'postgres://u:s3cr3t@h/x', redis: 'mysql://:s3cr3t@h'}",
        "state: {redis_file: secret}",
        "tenants: [{name: a, keys: [{name: a, sha256: sk-s3cr3t}]}]",
        "models: [{name: a, replicas: [{backend: vllm, url: 'http://u:s3cr3t@h', api_key: 's3cr3t s3cr3t'}]}]",
        "models: [{name: a, replicas: [{backend: '${S}', url: 'http://h'}]}]",
        "models: [{name: '${S}', aliases: ['${S}'], replicas: [{backend: vllm, url: 'http://h'}]}]",
        "server: {port: '${S}', host: 'a b ${S}', max_body: '${S}', tls: '${S}', cors_origins: ['${S}']}",
        "logging: {level: '${S}'}\nmetrics: {allow: ['${S}']}",
        "state: {redis: 's3cr3t\n",
    ):
        assert "s3cr3t" not in "\n".join(refuse(text, {"S": "s3cr3t"}))


# YAML itself


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, said in (("nowhere.yaml", "no such file"), (".", "cannot be read")):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path / name, kinds=KINDS, environ={})
        assert f": {said}" in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"server:\n  host: \xff\n", ":2: not UTF-8"),
        (b"server:\n  host: \x01\n", ":2: not YAML: a control character"),
        (b"a: [1\nb: 2\n", ":2: not valid YAML: "),
        (b"a: *nowhere\n", ":1: not valid YAML: "),
        (b"a: 1\n---\nb: 2\n", ":2: not valid YAML: "),
        (b"server:\n  port: 1\n  port: 2\n", ":3: server.port: duplicate key, it is already on line 2"),
        (b"a: !!python/object/apply:os.system [ls]\n", ":1: a tag that is not plain YAML"),
        (b"a: !x 1\n", ":1: not valid YAML: "),
        (b"a: !!binary aGk=\n", ":1: a tag that is not plain YAML"),
        (b"a: 2027-13-45\n", ":1: looks like a number or a date"),
        (b"a: " + b"9" * 10_000, ":1: looks like a number or a date"),
        (b"a: &x [*x]\n", ":1: an alias inside its own anchor"),
        (b"? [a]\n: b\n", ":1: a key that is not text"),
        (b"a: " + b"[" * 20_000, "nested too deeply"),
        (b" " * (4 << 20) + b"#", "larger than 4 MiB"),
        (
            b"a: &a [x,x,x,x,x,x,x,x,x]\n"
            + b"".join(
                b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(ord("b"), ord("k"))
            ),
            "200000 values once",
        ),
    ],
)
def test_yaml_that_is_refused(tmp_path: Path, raw: bytes, said: str) -> None:
    (tmp_path / "g.yaml").write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "g.yaml", kinds=KINDS, environ={})
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_of_too_many_values_is_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_yaml, "MAX_NODES", 1000)
    assert len(parse_document("a: [" + "1," * 900 + "]", "x").lines) == 901
    with pytest.raises(ConfigError, match="x:1: more than 1000 values, split the fleet"):
        parse_document("a: [" + "1," * 1100 + "]", "x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text("ab:# '\"é\n", max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("xyz-é ", min_size=1, max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), JSON, max_size=3), st.booleans())
def test_values_are_those_of_safe_load(value: dict[str, Any], flow: bool) -> None:
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True)
    assert parse_document(text, "x").data == value


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text("ab:- {}[]&*!#|>'\"\n\t${}é", max_size=40))
def test_no_text_escapes_as_another_error(read: Load, text: str) -> None:
    try:
        read(text)
    except ConfigError as error:
        assert error.problems


# Schema and example


@pytest.fixture(name="fits", scope="module")
def _fits() -> Callable[[str], bool]:
    """Whether the JSON Schema accepts a YAML text, as an editor would say."""
    validator = jsonschema_rs.validator_for(schema())
    return lambda text: validator.is_valid(json.loads(json.dumps(yaml.safe_load(text), default=str)))


def test_the_example_fits_the_schema(fits: Callable[[str], bool]) -> None:
    assert fits((ROOT / "config" / "gateway.example.yaml").read_text("utf-8"))


@pytest.mark.parametrize("written", ["600/min", "[10/s, 600/min]", "null", "[]", "'${R}'", "['${R}', 1/s]", "100/30s"])
def test_the_schema_takes_one_window_or_several(fits: Callable[[str], bool], written: str) -> None:
    assert fits(LIMITS % written)
    assert fits(f"models: [{{name: a, limits: {{requests: {written}}}, replicas: [{{url: x}}]}}]")


@pytest.mark.parametrize("written", ["600", "600/fortnight", "[600]", "{s: 5}", "1/month"])
def test_the_schema_takes_no_other_windows(fits: Callable[[str], bool], written: str) -> None:
    assert not fits(LIMITS % written)


def test_the_schema_tells_budgets_from_rates(fits: Callable[[str], bool]) -> None:
    budget = "tenants: [{name: t, limits: {token_budget: %s}}]"
    assert all(fits(budget % written) for written in ("1/day", "[1/day, 2/month]", "null", "'${R}'"))
    assert not any(fits(budget % written) for written in ("1/hour", "1/2day", "[1/s]", "5"))


def test_the_schema_takes_no_database_and_no_retention(fits: Callable[[str], bool]) -> None:
    assert fits("state: {database: null, spool: null, usage_retention: null}")
    assert fits("state: {database_file: secret, usage_retention: 30d}")


def _sections(model: type[pydantic.BaseModel], seen: set[type[pydantic.BaseModel]]) -> set[type[pydantic.BaseModel]]:
    if model not in seen:
        seen.add(model)
        for info in model.model_fields.values():
            shape = shape_of(info.annotation)
            inner = shape.model or (shape_of(shape.item).model if shape.kind == "list" else None)
            if inner is not None:
                _sections(inner, seen)
    return seen


def test_every_field_says_what_it_does() -> None:
    for section in _sections(Config, set()):
        for name, info in section.model_fields.items():
            said = info.description or ""
            assert "efault" in said or "Required" in said or "(default)" in said, f"{section.__name__}.{name}"


def test_every_section_is_public() -> None:
    public = importlib.import_module("gateway.config")
    for section in _sections(Config, set()):
        assert getattr(public, section.__name__) is section
        assert section.model_config["frozen"] and section.model_config["extra"] == "forbid"


def test_the_schema_file_is_current() -> None:
    stored = json.loads((ROOT / "config" / "schema.json").read_text("utf-8"))
    assert stored == json.loads(json.dumps(schema())), "run `make schema`"


@pytest.fixture(name="example")
def _example(tmp_path: Path) -> Path:
    """The example file in a folder where the files it names exist."""
    for name in (
        "tls/gateway.crt",
        "tls/gateway.key",
        "tls/clients-ca.crt",
        "tls/engines-ca.crt",
        "tls/client.crt",
        "tls/client.key",
        "models/SmolLM2.gguf",
        "secrets/ops.sha256",
        "secrets/ci-jwks.json",
        "secrets/vllm.key",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("cd" * 32)
    target = tmp_path / "gateway.example.yaml"
    target.write_bytes((ROOT / "config" / "gateway.example.yaml").read_bytes())
    return target


EXAMPLE_ENVIRONMENT = {"REDIS_URL": "redis://:secret@cache:6379/0", "VLLM_KEY": "secret"}


def test_the_example_is_valid(example: Path) -> None:
    config = load(example, kinds=KINDS, environ=EXAMPLE_ENVIRONMENT)
    assert [model.name for model in config.models] == ["smollm2", "llama-3-8b"]
    assert "secret@" not in repr(config)


def test_the_example_shows_every_option(example: Path) -> None:
    shown = set(_options_shown(yaml.safe_load(example.read_text("utf-8")), shape_of(Config)))
    options = {(section.__name__, name) for section in _sections(Config, set()) for name in section.model_fields}
    access = {("DiscoveryConfig", name) for name in ("api_key", "ca_file", "client_cert_file", "client_key_file")}
    assert options - shown == access  # shown on replicas, and the comment on discovery says so


def test_the_example_states_the_defaults(example: Path) -> None:
    config, defaults = load(example, kinds=KINDS, environ=EXAMPLE_ENVIRONMENT), Config()
    state = config.state.model_copy(update={"redis": None, "database": defaults.state.database})
    assert state == defaults.state
    assert config.server.model_copy(update={"tls": None}) == defaults.server
    assert (config.metrics, config.media, config.limits, config.logging) == (
        defaults.metrics,
        defaults.media,
        defaults.limits,
        defaults.logging,
    )


def _options_shown(value: Any, shape: Shape) -> Iterator[tuple[str, str]]:
    """(section, option) for every key in the data."""
    if isinstance(value, list):
        for item in value:
            yield from _options_shown(item, shape_of(shape.item))
    elif isinstance(value, dict) and shape.model is not None:
        for key, item in value.items():
            yield shape.model.__name__, key
            if below := shape.child(key):
                yield from _options_shown(item, below)
