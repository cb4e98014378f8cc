"""Manifests for Kubernetes, however they were made: what holds for all of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from gateway.config import Config
from tests.deploy.conftest import ROOT, check_config

Manifest = dict[str, Any]
RESERVE_S = 5 + 30  # seconds: the pause before the stop signal, and what the gateway does after its grace


def parsed(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]


def of(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    (found,) = (
        one for one in manifests if one["kind"] == kind and (name is None or one["metadata"]["name"] == name)
    )  # fmt: skip
    return found


def fits_schemas(manifests: list[Manifest]) -> None:
    """Every field of what Kubernetes itself defines is one of its own, and of the right type."""
    import kubernetes_validate

    version = kubernetes_validate.latest_version()
    for manifest in manifests:
        if manifest["apiVersion"].split("/")[0] != "monitoring.coreos.com":
            kubernetes_validate.validate(manifest, version, strict=True)


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, dict[str, Any]]]:
    for manifest in manifests:
        if manifest["kind"] == "Pod":
            yield manifest["metadata"]["name"], manifest["spec"]
        elif "template" in manifest.get("spec", {}):
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]


def are_restricted(manifests: list[Manifest]) -> None:
    """The pods may do what Kubernetes' "restricted" standard leaves, and write to their volumes only."""
    for name, pod in pods(manifests):
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] > 0, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False and pod["enableServiceLinks"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod), name
        for container in pod["containers"]:
            own = container["securityContext"]
            assert own == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }, name  # fmt: skip
            assert container["resources"]["requests"]["memory"] and container["resources"]["limits"]["memory"], name


def hold_no_secret(manifests: list[Manifest]) -> None:
    assert not [one for one in manifests if one["kind"] == "Secret"]
    for _, pod in pods(manifests):
        for container in pod["containers"]:
            assert all("value" not in entry or "KEY" not in entry["name"] for entry in container.get("env", []))


def fit_the_gateway(manifests: list[Manifest], deployment: str, folder: Path) -> None:
    """Ports, paths, times and mounted files of the gateway's Deployment are those of the product."""
    pod = of(manifests, "Deployment", deployment)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    (name,) = (volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume)
    text = of(manifests, "ConfigMap", name)["data"]["gateway.yaml"]
    config = yaml.safe_load(text)
    assert mounts["config"]["mountPath"] == "/etc/sekisho" and "subPath" not in mounts["config"]
    assert container["ports"] == [{"name": "http", "containerPort": config["server"]["port"]}]
    assert config["server"]["host"] == "0.0.0.0"
    paths = {probe: container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    grace = Config.model_validate({"server": config["server"]}).server.shutdown_grace
    assert pod["terminationGracePeriodSeconds"] >= grace + RESERVE_S
    where = config["state"].get("database_file") or config["state"]["database"].removeprefix("sqlite:///")
    assert any(where.startswith(f"{mount['mountPath']}/") for mount in mounts.values()), where
    written = folder / "made.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    written.write_text(text)
    check_config(written, folder / "root")


def selects(selector: Mapping[str, str], manifests: list[Manifest], deployment: str) -> bool:
    labels = of(manifests, "Deployment", deployment)["spec"]["template"]["metadata"]["labels"]
    return selector.items() <= labels.items()


def lead_to_the_gateway(manifests: list[Manifest], deployment: str) -> None:
    service = of(manifests, "Service", deployment)
    assert selects(service["spec"]["selector"], manifests, deployment)
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    budget = of(manifests, "PodDisruptionBudget", deployment)["spec"]
    assert selects(budget["selector"]["matchLabels"], manifests, deployment)
    policy = of(manifests, "NetworkPolicy", deployment)["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert selects(policy["podSelector"]["matchLabels"], manifests, deployment)
    peers = [peer for rule in policy["ingress"] for peer in rule["from"]]
    peers += [peer for rule in policy["egress"] for peer in rule.get("to", [])]
    named = [peer["podSelector"]["matchLabels"] for peer in peers if "podSelector" in peer]
    assert {"app.kubernetes.io/name": "prometheus"} in named
    assert not [labels for labels in named if "sekisho" in labels.values()], "the gateway itself is nobody's peer"
    for constraint in of(manifests, "Deployment", deployment)["spec"]["template"]["spec"]["topologySpreadConstraints"]:
        assert selects(constraint["labelSelector"]["matchLabels"], manifests, deployment)


def lets_streams_through(ingress: Manifest) -> None:
    notes = {name.partition("/")[2]: value for name, value in ingress["metadata"]["annotations"].items()}
    assert notes["proxy-buffering"] == "off" and notes["proxy-next-upstream"] == "off"
    server = Config().server
    assert int(notes["proxy-read-timeout"]) > 10 * server.keepalive_interval
    assert int(notes["proxy-body-size"].removesuffix("m")) << 20 == server.max_body
    (rule,) = ingress["spec"]["rules"]
    assert [path["path"] for path in rule["http"]["paths"]] == ["/v1"]  # no administration, no metrics


def asked_metrics(manifests: list[Manifest]) -> set[str]:
    """Names of custom metrics that autoscalers ask for."""
    return {
        source[kind.lower()]["metric"]["name"]
        for one in manifests if one["kind"] == "HorizontalPodAutoscaler"
        for source in one["spec"]["metrics"]
        for kind in [source["type"]] if kind in ("Pods", "Object")
    }  # fmt: skip


def lint_yaml(*paths: Path, width: int = 140) -> str:
    rules = (
        f"{{extends: default, rules: {{line-length: {{max: {width}}}, document-start: disable, octal-values: disable,"
        " comments: {min-spaces-from-content: 1}, braces: {max-spaces-inside: 1}, truthy: {check-keys: false}}}"
    )
    done = subprocess.run(
        [sys.executable, "-m", "yamllint", "--strict", "-d", rules, *map(str, paths)],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout + done.stderr
