"""The unit for systemd, read by systemd's own checks where it is installed, and held against the product."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.config import Config
from gateway.units import parse_duration
from tests.deploy.conftest import ROOT, check_config

FOLDER = ROOT / "deploy/systemd"
MOST_EXPOSURE = 2.0  # of 10, by `systemd-analyze security`


class _Unit(configparser.RawConfigParser):
    def optionxform(self, optionstr: str) -> str:
        return optionstr


def section(name: str = "Service") -> dict[str, str]:
    unit = _Unit(strict=False, comment_prefixes=("#",))
    unit.read(FOLDER / "sekisho.service")
    return dict(unit[name])


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    return subprocess.run(["systemd-analyze", *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_systemd_reads_it(tmp_path: Path) -> None:
    program = tmp_path / "sekisho"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "sekisho.service"
    unit.write_text((FOLDER / "sekisho.service").read_text().replace("/opt/sekisho/bin/sekisho", str(program)))
    drop_in = tmp_path / "sekisho.service.d"
    drop_in.mkdir()
    for extra in (None, "gpu.conf"):
        if extra:
            shutil.copy(FOLDER / extra, drop_in)
        done = analyze("verify", "--man=no", unit)
        assert done.returncode == 0 and "sekisho" not in done.stderr, done.stderr
    unit.write_text(unit.read_text() + "\n[Service]\nWatchdogSeconds=3\n")
    assert "WatchdogSeconds" in analyze("verify", "--man=no", unit).stderr


def test_what_it_may_not() -> None:
    done = analyze("security", "--offline=true", "--no-pager", FOLDER / "sekisho.service")
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd cannot judge a file")
    found = re.search(r"Overall exposure level for sekisho.service: ([\d.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) <= MOST_EXPOSURE


def test_it_fits_the_gateway(tmp_path: Path) -> None:
    service = section()
    assert service["Type"] == "notify" and service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert service["ExecStart"].endswith("/sekisho serve --config /etc/sekisho/gateway.yaml")
    assert service["RestartPreventExitStatus"] == "2"
    assert parse_duration(int(service["TimeoutStopSec"])) >= Config().server.shutdown_grace + 30
    assert int(service["LimitNOFILE"]) > 2 * Config().server.max_connections
    config = (FOLDER / "gateway.yaml").read_text()
    state = f"/var/lib/{service['StateDirectory']}"
    assert f"sqlite:///{state}/" in config and f"spool: {state}/" in config
    assert f"TMPDIR=/run/{service['RuntimeDirectory']} " in service["Environment"]
    check_config(FOLDER / "gateway.yaml", tmp_path)


def test_the_user_is_made_by_sysusers() -> None:
    if shutil.which("systemd-sysusers") is None:
        pytest.skip("systemd is not installed")
    done = subprocess.run(
        ["systemd-sysusers", "--dry-run", FOLDER / "sekisho.sysusers.conf"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert section()["User"] in (FOLDER / "sekisho.sysusers.conf").read_text()
