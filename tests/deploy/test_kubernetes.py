"""deploy/k8s, rendered by Kustomize, and a ConfigMap as the kubelet changes it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy import kubernetes
from tests.deploy.conftest import ROOT
from tests.deploy.kubernetes import Manifest
from tests.e2e.harness import Gateway, base_config, eventually

K8S = ROOT / "deploy/k8s"
OVERLAYS = ("base", "overlays/dev", "overlays/production", "overlays/gpu")


def rendered(folder: str) -> list[Manifest]:
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize"]
    elif shutil.which("kustomize"):
        command = ["kustomize", "build"]
    else:
        pytest.skip("neither kubectl nor kustomize is installed")
    done = subprocess.run([*command, str(K8S / folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower(), done.stderr
    return kubernetes.parsed(done.stdout)


def test_yaml_is_clean() -> None:
    pytest.importorskip("yamllint", reason="pip install yamllint")
    plain = [path for path in (ROOT / "deploy").rglob("*.y*ml") if "templates" not in path.parts]
    assert len(plain) > 20
    # Scenarios of rules are one series or one alert to a line, however long.
    scenarios = [path for path in plain if path.parent == ROOT / "deploy" / "prometheus" / "tests"]
    assert kubernetes.lint_yaml(ROOT / "docker-compose.yml", *(path for path in plain if path not in scenarios)) == ""
    assert kubernetes.lint_yaml(*scenarios, width=400) == ""


@pytest.mark.parametrize("folder", OVERLAYS)
def test_rendered(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    manifests = rendered(folder)
    kubernetes.fits_schemas(manifests)
    kubernetes.are_restricted(manifests)
    kubernetes.hold_no_secret(manifests)
    kubernetes.fit_the_gateway(manifests, "sekisho", tmp_path)
    kubernetes.lead_to_the_gateway(manifests, "sekisho")
    assert {one["metadata"].get("namespace", "sekisho") for one in manifests} == {"sekisho"}


def test_a_wrong_field_is_found() -> None:
    """The check above is worth something."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    manifests = rendered("base")
    kubernetes.of(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(validate.ValidationError):
        kubernetes.fits_schemas(manifests)


def test_production() -> None:
    manifests = rendered("overlays/production")
    kubernetes.lets_streams_through(kubernetes.of(manifests, "Ingress"))
    assert "replicas" not in kubernetes.of(manifests, "Deployment")["spec"]  # the autoscaler's
    monitor, service = kubernetes.of(manifests, "ServiceMonitor"), kubernetes.of(manifests, "Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == (service["spec"]["ports"][0]["name"], "/metrics")
    ports = {rule["ports"][0]["port"] for rule in kubernetes.of(manifests, "NetworkPolicy")["spec"]["egress"]}
    assert ports == {53, 8000, 5432, 6379}


def test_engines_beside_it() -> None:
    manifests = rendered("overlays/gpu")
    config = yaml.safe_load(kubernetes.of(manifests, "ConfigMap")["data"]["gateway.yaml"])
    (model,) = config["models"]
    engine = kubernetes.of(manifests, "StatefulSet", "vllm")["spec"]
    service = kubernetes.of(manifests, "Service", "vllm")["spec"]
    scaler = kubernetes.of(manifests, "HorizontalPodAutoscaler", "vllm")["spec"]
    assert service["clusterIP"] == "None" and engine["serviceName"] == "vllm"
    (port,) = service["ports"]
    assert [replica["url"] for replica in model["replicas"]] == [
        f"http://vllm-{index}.vllm:{port['port']}" for index in range(scaler["maxReplicas"])
    ]
    args = engine["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--served-model-name") + 1] == model["name"]
    labels = engine["template"]["metadata"]["labels"]
    assert "sekisho" not in labels.values()  # or the gateway's Service and rules would mean the engines too
    allowed = [
        peer["podSelector"]["matchLabels"]
        for rule in kubernetes.of(manifests, "NetworkPolicy", "sekisho")["spec"]["egress"] for peer in rule["to"]
        if rule["ports"][0]["port"] == port["port"]
    ]  # fmt: skip
    assert allowed and all(wanted.items() <= labels.items() for wanted in allowed)


def test_autoscalers_ask_for_metrics_that_exist(metric_names: set[str]) -> None:
    asked = kubernetes.asked_metrics(rendered("overlays/gpu"))
    assert asked == {"sekisho_inflight_requests", "sekisho_queue_depth"} and asked <= metric_names
    (rule,) = yaml.safe_load((K8S / "prometheus-adapter/values.yaml").read_text())["rules"]["custom"]
    found = re.search(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    assert found is not None and set(found[1].split("|")) == asked
    assert set(rule["resources"]["overrides"]) == {"namespace", "pod", "service"}


def test_a_changed_configmap_is_followed(tmp_path: Path) -> None:
    """The kubelet writes a new folder and swaps the link `..data`, through which gateway.yaml leads."""
    replica = {"backend": "vllm", "url": "http://127.0.0.1:9"}
    gateway = Gateway(tmp_path, base_config({"before": [replica]}, []))
    try:
        def publish(number: int, model: str) -> None:
            folder = tmp_path / f"..{number}"
            folder.mkdir()
            gateway.config_file = folder / "gateway.yaml"
            gateway.write(base_config({model: [replica]}, []))
            (tmp_path / "..data_tmp").symlink_to(folder.name)
            os.replace(tmp_path / "..data_tmp", tmp_path / "..data")

        def served() -> list[str]:
            return [entry["model"] for entry in gateway.replicas()]

        publish(1, "first")
        (tmp_path / "link").symlink_to("..data/gateway.yaml")
        os.replace(tmp_path / "link", tmp_path / "gateway.yaml")
        assert eventually(lambda: served() == ["first"]), gateway.log()
        publish(2, "second")
        assert eventually(lambda: served() == ["second"]), gateway.log()
    finally:
        gateway.stop()
