"""What the soak runs: the gateway with its workers, three engines, and the configuration that is changed under it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
from cryptography import x509

from tests.doubles.authority import DAY, Authority
from tests.e2e.harness import ROOT, digest, free_port

ENGINES = 3
SMALL_LIMIT = 60  # requests a minute of the tenant `small`
STEADY_TENANTS = ("alpha", "beta", "gamma")
# Far above what is used: they cost what limits cost, and refuse nobody.
WIDE: dict[str, dict[str, Any]] = {
    "alpha": {},
    "beta": {"requests": "1000000/min", "tokens": "1000000000/min", "token_budget": "100000000000/day"},
    "gamma": {"requests": ["100000/s", "1000000/min"], "concurrency": 20000},
    "small": {"requests": f"{SMALL_LIMIT}/min"},
}


def new_key() -> str:
    return f"sk-{secrets.token_urlsafe(36)}"


@dataclass
class Wanted:
    """The configuration as it should be."""

    port: int
    state: dict[str, Any]
    engine_ports: list[int]
    admin_key: str
    keys: dict[str, list[str]]  # tenant -> keys
    extra: bool = False  # a model that comes and goes
    third: bool = True  # the third replica of the model `m`

    def document(self) -> dict[str, Any]:
        ports = self.engine_ports if self.third else self.engine_ports[:2]
        models: list[dict[str, Any]] = [
            {"name": "m", "aliases": ["chat"], "replicas": [_replica(port) for port in ports]}
        ]
        if self.extra:
            models.append({"name": "extra", "replicas": [_replica(port) for port in self.engine_ports[:2]]})
        operators = {"name": "operators", "models": [], "keys": [_key("root", self.admin_key, role="admin")]}
        tenants = [
            {
                "name": name,
                "limits": WIDE[name],
                "keys": [_key(f"key-{digest(key)[:8]}", key, limits=_of_key(name)) for key in keys],
            }
            for name, keys in self.keys.items()
        ]
        return {
            "server": {
                "port": self.port,
                "expose_route": True,
                "tls": {"cert_file": "gateway.crt", "key_file": "gateway.key"},
            },
            "state": self.state,
            "models": models,
            "tenants": [operators, *tenants],
        }


def _replica(port: int) -> dict[str, Any]:
    return {"backend": "vllm", "url": f"http://127.0.0.1:{port}", "model": "m"}


def _key(name: str, key: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "sha256": digest(key)} | more


def _of_key(tenant: str) -> dict[str, Any]:
    return {"concurrency": 10000, "requests": "500000/min"} if tenant == "gamma" else {}


class Engine:
    """One engine's process, always at the same port."""

    def __init__(self, number: int, log: Path) -> None:
        self.number, self.port, self._log = number, free_port(), log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "tests.load.soak.engine", str(self.port), str(self.number)]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Stage:
    """Everything that is started, in a folder of its own. Only what is in here is ever ended."""

    folder: Path
    workers: int
    state: dict[str, Any]
    engines: list[Engine] = field(init=False)

    def __post_init__(self) -> None:
        self.folder.chmod(0o700)
        self.engines = [Engine(number, self.folder / f"engine-{number}.log") for number in range(1, ENGINES + 1)]
        self.authority = Authority(self.folder, "soak")
        self.serial = self.renew_certificate()
        keys = {name: [new_key()] for name in (*STEADY_TENANTS, "small")}
        self.wanted = Wanted(free_port(), self.state, [one.port for one in self.engines], new_key(), keys)
        self.config_file = self.folder / "gateway.yaml"
        self.write()
        self._out, self._err = (self.folder / "stdout").open("wb"), (self.folder / "stderr").open("wb")
        self.gateway = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", "--config", str(self.config_file), "--workers",
             str(self.workers)],
            cwd=ROOT, stdout=self._out, stderr=self._err,
            env={name: value for name, value in os.environ.items() if not name.startswith("SEKISHO")},
        )  # fmt: skip

    def write(self, text: str | None = None) -> None:
        """The configuration as it is wanted, or something else in its place."""
        temporary = self.config_file.with_suffix(".new")
        temporary.write_text(text if text is not None else json.dumps(self.wanted.document(), indent=1))
        temporary.chmod(0o600)
        temporary.replace(self.config_file)

    def renew_certificate(self) -> int:
        """Puts a new certificate and key in the place of the old ones. Returns its serial number."""
        made = self.authority.issue("gateway", x509.IPAddress(ip_address("127.0.0.1")), valid=30 * DAY)
        serial = x509.load_pem_x509_certificate(made.cert_file.read_bytes()).serial_number
        made.key_file.chmod(0o600)
        made.cert_file.replace(self.folder / "gateway.crt")
        made.key_file.replace(self.folder / "gateway.key")
        self.serial = serial
        return serial

    def hang_up(self) -> None:
        self.gateway.send_signal(signal.SIGHUP)

    def members(self) -> dict[int, psutil.Process]:
        """Number of each worker -> its process."""
        found: dict[int, psutil.Process] = {}
        for child in psutil.Process(self.gateway.pid).children():
            try:
                command = child.cmdline()
            except psutil.NoSuchProcess:
                continue
            if "gateway.workers.member" in command:
                found[int(command[command.index("gateway.workers.member") + 3])] = child
        return found

    def log(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    def stop_gateway(self, patience: float = 60.0) -> int:
        """Returns its exit code."""
        if self.gateway.poll() is None:
            self.gateway.terminate()
            try:
                self.gateway.wait(patience)
            except subprocess.TimeoutExpired:
                for process in (*self.members().values(), self.gateway):
                    process.kill()
                self.gateway.wait()
        return self.gateway.returncode

    def close(self) -> None:
        self.stop_gateway(10)
        for engine in self.engines:
            engine.kill()
        self._out.close()
        self._err.close()


def frozen(process: psutil.Process) -> list[int]:
    """Stops a process in its tracks. Returns the clients' ports of the connections it has accepted: what else was sent
    to it waits in the kernel for its successor."""
    listening = {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    process.suspend()
    deadline = time.monotonic() + 5
    while process.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.001)
    return [one.raddr.port for one in process.net_connections("tcp") if one.raddr and one.laddr.port in listening]


def available(ports: Sequence[int]) -> bool:
    """Whether somebody listens at each of them."""
    listening = {one.laddr.port for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    return set(ports) <= listening
