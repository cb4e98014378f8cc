"""What the checks of deployment files share: the repository's folders, and what the product itself says of names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.observed import Observed
from tests.e2e.harness import Gateway, base_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One with a model whose engine is away: all that names of metrics take."""
    replica = {"backend": "vllm", "url": "http://127.0.0.1:9"}
    started = Gateway(tmp_path_factory.mktemp("deploy"), base_config({"m": [replica]}, []))
    yield started
    started.stop()


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    with Observed(tmp_path_factory.mktemp("observed")) as observed:
        yield observed


@pytest.fixture(scope="session")
def metric_names(gateway: Gateway) -> set[str]:
    """Names of samples, as queries write them."""
    families = text_string_to_metric_families(gateway.metrics_page())
    return {name for family in families for name in (family.name, *(sample.name for sample in family.samples))}


def check_config(path: Path, folder: Path, **environ: str) -> str:
    """What `sekisho check` says of a configuration whose absolute paths are made to begin in `folder`. Secrets that it
    names are put there."""
    text = path.read_text() if path.is_file() else ""
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in re.findall(r"(\w+)_file: *(/[^\s,}]+)", text):
        secret = folder / file.lstrip("/")
        secret.parent.mkdir(parents=True, exist_ok=True)
        secret.write_text({"database": "postgresql://u:p@db:5432/sekisho", "redis": "redis://r:6379/0"}[name])
        secret.chmod(0o600)
    for scanned in re.findall(r"scan: *(/[^\s,}]+)", text):
        (folder / scanned.lstrip("/")).mkdir(parents=True, exist_ok=True)
    text = re.sub(r"(?<=: )/(?=\w)", f"{folder}/", text)
    copy = folder / "gateway.yaml"
    copy.write_text(text)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SEKISHO")}
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "check", "--config", str(copy)],
        cwd=ROOT, env=clean | environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
