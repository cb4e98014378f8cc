"""docker-compose.yml and the files that it mounts."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from backends import kinds
from gateway.config import Config
from gateway.units import parse_duration
from tests.deploy.conftest import ROOT, check_config
from tests.deploy.test_image import of
from tests.e2e.harness import free_port

COMPOSE = ROOT / "docker-compose.yml"
FOLDER = ROOT / "deploy/compose"
ENGINES = {"vllm", "ollama"}
_VARIABLE = re.compile(r"\$\{(\w+)(:[-?])?([^}]*)\}")


def filled(text: str, values: dict[str, str]) -> str:
    """As compose fills in variables. Raises: KeyError for one that has to be set."""

    def value(found: re.Match[str]) -> str:
        name, how, rest = found.groups()
        if values.get(name):
            return values[name]
        if how == ":-":
            return rest
        raise KeyError(f"{name}: {rest}")

    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return _VARIABLE.sub(value, "\n".join(lines)).replace("$$", "$")


PASSWORDS = {"POSTGRES_PASSWORD": "pg", "REDIS_PASSWORD": "rd", "GRAFANA_PASSWORD": "gf"}
TEXT = filled(COMPOSE.read_text(), PASSWORDS)
DOCUMENT: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = DOCUMENT["services"]


def test_it_is_a_compose_file() -> None:
    compose_spec = pytest.importorskip("compose_spec", reason="pip install compose-spec")
    merged = yaml.safe_dump(DOCUMENT | {"services": SERVICES})
    parsed = compose_spec.PyCompose.from_yaml(merged)
    parsed.validate()
    assert set(parsed.service_names()) == set(SERVICES)
    with pytest.raises(ValueError):
        compose_spec.PyCompose.from_yaml(merged.replace("read_only:", "readonly:"))


def test_podman_reads_it_too() -> None:
    if shutil.which("podman") is None or shutil.which("podman-compose") is None:
        pytest.skip("podman and podman-compose are not installed")
    read = ["podman-compose", "-f", str(COMPOSE), "--profile", "gpu", "--profile", "ollama", "config"]
    environ = PASSWORDS | {"PATH": os.environ["PATH"]}
    done = subprocess.run(read, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == set(SERVICES)


@pytest.mark.parametrize("name", sorted(PASSWORDS))
def test_no_start_without_a_password(name: str) -> None:
    with pytest.raises(KeyError, match=f"{name}: set {name} in .env"):
        filled(COMPOSE.read_text(), PASSWORDS | {name: ""})


def test_the_example_of_variables() -> None:
    """Every variable in it is one, and those that have to be set are there without a value."""
    used = {name for name, *_ in _VARIABLE.findall(COMPOSE.read_text())}
    lines = (FOLDER / "env.example").read_text().splitlines()
    found = [re.fullmatch(r"(?:# )?([A-Z_]+)=(.*)", line) for line in lines]
    named = {match[1]: match[2] for match in found if match is not None}
    assert set(named) <= used
    assert {name for name, value in named.items() if not value} >= set(PASSWORDS)
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_what_every_service_may_not(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert service.get("read_only", False) is (name not in ENGINES)
    assert service["mem_limit"] and service["pids_limit"]
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    assert not {"privileged", "network_mode", "pid", "ipc", "cap_add", "devices"} & set(service)
    assert re.search(r":v?\d[\w.-]*$", service["image"]), "an image is pinned by its version"
    assert "healthcheck" in service or (name == "gateway" and of("HEALTHCHECK", 1))


def test_what_can_be_reached_from_outside() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"gateway": ["127.0.0.1:8080:8080"], "grafana": ["127.0.0.1:3000:3000"]}
    networks = DOCUMENT["networks"]
    closed = {name for name, network in networks.items() if network.get("internal")}
    assert closed == {"engines", "stores", "monitoring"}
    for name, service in SERVICES.items():
        open_ones = set(service["networks"]) - closed
        assert open_ones == ({"front"} if name in published else {"downloads"} if name in ENGINES else set())


def test_engines_and_stores_do_not_meet() -> None:
    for name in SERVICES.keys() - {"gateway"}:
        assert len(set(SERVICES[name]["networks"]) & {"engines", "stores", "monitoring"}) == 1


def test_profiles() -> None:
    assert {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service} == {
        "vllm": ["gpu"], "ollama": ["ollama"],
    }  # fmt: skip
    assert ENGINES <= set(kinds())


def test_time_to_stop() -> None:
    needed = Config().server.shutdown_grace + 30
    assert parse_duration(SERVICES["gateway"]["stop_grace_period"]) >= needed


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_what_is_mounted_is_there(name: str) -> None:
    for volume in SERVICES[name].get("volumes", []):
        source = volume.split(":")[0]
        if source.startswith("./"):
            assert source == "./models" or (ROOT / source).exists(), source
        else:
            assert source in DOCUMENT["volumes"]


def test_the_gateways_configuration(tmp_path: Path) -> None:
    given = {key: value for key, value in SERVICES["gateway"]["environment"].items() if not key.startswith("SEKISHO")}
    told = check_config(FOLDER / "gateway/gateway.yaml", tmp_path, **given)
    assert "vllm vllm:8000" in told and "ollama ollama:11434" in told
    config = yaml.safe_load((FOLDER / "gateway/gateway.yaml").read_text())
    port = config["server"]["port"]
    assert SERVICES["gateway"]["ports"] == [f"127.0.0.1:8080:{port}"]
    hosts = {"postgres": "@postgres:5432/sekisho", "redis": "@redis:6379/0"}
    assert config["state"]["database"].endswith(hosts["postgres"]) and config["state"]["redis"].endswith(hosts["redis"])
    assert SERVICES["postgres"]["environment"]["POSTGRES_DB"] == "sekisho"


def test_prometheus_may_read_the_metrics() -> None:
    config = yaml.safe_load((FOLDER / "gateway/gateway.yaml").read_text())
    (network,) = DOCUMENT["networks"]["monitoring"]["ipam"]["config"]
    assert config["metrics"]["allow"] == [network["subnet"]]
    assert ipaddress.ip_network(network["subnet"]).is_private
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert [job["static_configs"][0]["targets"] for job in scraped] == [[f"gateway:{config['server']['port']}"]]


def test_grafana_asks_prometheus() -> None:
    (source,) = yaml.safe_load((FOLDER / "grafana/datasources/prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((FOLDER / "grafana/dashboards/sekisho.yaml").read_text())["providers"]
    mounts = dict(volume.split(":")[1::-1] for volume in SERVICES["grafana"]["volumes"])
    assert source["url"] == "http://prometheus:9090" and "prometheus" in SERVICES
    assert mounts[provider["options"]["path"]] == "./deploy/grafana"


def test_redis_as_it_is_started(tmp_path: Path) -> None:
    """The command of the service, on this machine's Redis: a password, on disk, nothing evicted, stopped by SIGTERM."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    import redis

    port = free_port()
    command = SERVICES["redis"]["command"][2]
    command = command.replace("/tmp/redis.conf", str(tmp_path / "redis.conf")).replace("dir /data", f"dir {tmp_path}")
    command = command.replace('"appendonly yes"', f'"appendonly yes" "port {port}" "bind 127.0.0.1"')
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "REDIS_PASSWORD": "s3cret"}
    with subprocess.Popen(["sh", "-c", command], env=environ, stdout=subprocess.DEVNULL) as server:
        client = redis.Redis(port=port, password="s3cret")
        try:
            for _ in range(200):
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    time.sleep(0.05)
            assert client.config_get("appendonly") == {"appendonly": "yes"}
            assert client.config_get("save") == {"save": ""}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert (tmp_path / "redis.conf").stat().st_mode & 0o077 == 0
            assert b"s3cret" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
            with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
                stranger.ping()
        finally:
            client.close()
            server.terminate()
        assert server.wait(20) == 0
