"""The Helm chart, linted and rendered by Helm itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import kubernetes
from tests.deploy.conftest import ROOT
from tests.deploy.kubernetes import Manifest

helm = pytest.importorskip("helm_python", reason="pip install helm-python-sdk")
CHART = ROOT / "deploy/helm/sekisho"
NAME = "demo-sekisho"
SECRETS = "/etc/sekisho-secrets"
SHARED = {"database": None, "database_file": f"{SECRETS}/database-url", "redis_file": f"{SECRETS}/redis-url"}
EVERYTHING: dict[str, Any] = {
    "config": {
        "server": {"trusted_proxies": ["10.0.0.0/8"]},
        "state": SHARED | {"spool": "/data/spool"},
        "discovery": [{"backend": "vllm", "url": "http://vllm:8000", "api_key": "${VLLM_KEY}"}, {"scan": "/models"}],
    },
    "secrets": [{"name": "sekisho", "mountPath": "/etc/sekisho-secrets"}],
    "env": [{"name": "VLLM_KEY", "secret": "vllm", "key": "api-key"}],
    "models": {"existingClaim": "models"},
    "image": {"repository": "registry.example.com/sekisho", "digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "registry"}],
    "ingress": {"enabled": True, "host": "llm.example.com"},
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"egress": [{"ports": [{"port": 5432, "protocol": "TCP"}]}]},
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "x"},
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "k", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
}


def files(values: dict[str, Any]) -> dict[str, str]:
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        made: dict[str, str] = chart.render(values, name="demo", namespace="prod")
    return made


def rendered(values: dict[str, Any]) -> list[Manifest]:
    return [
        manifest for name, text in sorted(files(values).items()) if name.endswith(".yaml")
        for manifest in kubernetes.parsed(text)
    ]  # fmt: skip


def test_lint() -> None:
    found = helm.lint(str(CHART))
    assert found["total_charts_linted"] == 1 and not found["errors"]
    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_rendered(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    monkeypatch.setenv("VLLM_KEY", "x")
    manifests = rendered(values)
    kubernetes.fits_schemas(manifests)
    kubernetes.are_restricted(manifests)
    kubernetes.hold_no_secret(manifests)
    kubernetes.fit_the_gateway(manifests, NAME, tmp_path)
    kubernetes.lead_to_the_gateway(manifests, NAME)


def test_everything(metric_names: set[str]) -> None:
    manifests = rendered(EVERYTHING)
    kinds = {one["kind"] for one in manifests}
    assert kinds == {
        "ConfigMap", "Deployment", "HorizontalPodAutoscaler", "Ingress", "NetworkPolicy", "Pod", "PodDisruptionBudget",
        "Service", "ServiceAccount", "ServiceMonitor",
    }  # fmt: skip
    kubernetes.lets_streams_through(kubernetes.of(manifests, "Ingress"))
    assert kubernetes.asked_metrics(manifests) == {"sekisho_inflight_requests"} <= metric_names
    deployment = kubernetes.of(manifests, "Deployment")["spec"]
    assert "replicas" not in deployment and deployment["strategy"]["type"] == "RollingUpdate"
    (container,) = deployment["template"]["spec"]["containers"]
    assert container["image"] == "registry.example.com/sekisho@sha256:" + "0" * 64
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {
        "/etc/sekisho", "/data", "/models", "/etc/sekisho-secrets",
    }  # fmt: skip


def test_the_charts_own_test_asks_the_health_path() -> None:
    (container,) = kubernetes.of(rendered({}), "Pod")["spec"]["containers"]
    assert container["env"] == [{"name": "SEKISHO_HEALTH_URL", "value": f"http://{NAME}:80/health"}]
    assert container["command"][-1].removeprefix("/opt/sekisho/") == "health.py"


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, "There is no model yet"),
        ({"config": {"discovery": [{"scan": "/models"}]}}, "port-forward service/demo-sekisho"),
        (EVERYTHING, "https://llm.example.com/v1"),
    ],
)
def test_notes(values: dict[str, Any], wanted: str) -> None:
    (text,) = (text for name, text in files(values).items() if name.endswith("NOTES.txt"))
    assert wanted in text and "sekisho keys create --tenant me --name first --create-tenant" in text
    assert ("no model yet" in text) is (values == {})


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"replica": 2}, "replica"),
        ({"image": {"repository": ""}}, "repository"),
        ({"terminationGracePeriodSeconds": 10}, "terminationGracePeriodSeconds"),
        ({"env": [{"name": "X", "value": "a secret in the open"}]}, "value"),
        ({"replicas": 2}, "database"),
        ({"replicas": 2, "config": {"state": SHARED | {"redis_file": ""}}}, "Redis"),
    ],
)
def test_mistakes(values: dict[str, Any], wanted: str) -> None:
    with pytest.raises(helm.HelmError, match=wanted):
        files(values)


def test_the_version_is_the_products() -> None:
    from importlib.metadata import version

    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version("sekisho")
