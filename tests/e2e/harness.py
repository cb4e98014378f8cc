"""The gateway as a process, and the laboratory a test works in: engines, a configuration, a client."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.doubles.dialects import UPSTREAM_MODEL
from tests.doubles.engine import Engine, Script
from tests.e2e.wire import Answer, Wire

ROOT = Path(__file__).parents[2]
ADMIN = "sk-admin" + "A" * 40
PATIENCE = 20.0  # seconds until something that has to happen counts as not happening
T = TypeVar("T")
_numbers = itertools.count(1)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def eventually(check: Callable[[], T], timeout: float = PATIENCE) -> T:
    """The first true value of `check`, or its last value."""
    deadline = time.monotonic() + timeout
    while not (value := check()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


def together(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Runs all of them at once; results in order."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(job) for job in jobs]]


def replica(engine: Engine | str, **more: Any) -> dict[str, Any]:
    if isinstance(engine, str):
        return {"backend": "vllm", "url": engine, "model": UPSTREAM_MODEL} | more
    return {"backend": engine.dialect.backend, "url": engine.url, "model": UPSTREAM_MODEL} | more


def chat(model: str = "m", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Say hello."}]} | more


class Gateway:
    """`sekisho serve` on a port of its own."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any] | None = None,
        *,
        args: Sequence[str] = (),
        wait_for: str | None = "/health",
        scheme: str = "http",
        verify: Any = True,
    ) -> None:
        self.folder, self.port = folder, free_port()
        self.config_file = folder / "gateway.yaml"
        self.write(config or {})
        self._out, self._err = (folder / "stdout").open("wb"), (folder / "stderr").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", "--config", str(self.config_file),
             "--port", str(self.port), *args],
            cwd=ROOT, stdout=self._out, stderr=self._err,
            env={name: value for name, value in os.environ.items() if not name.startswith("SEKISHO")},
        )  # fmt: skip
        self.http = httpx.Client(
            base_url=f"{scheme}://127.0.0.1:{self.port}", timeout=PATIENCE, trust_env=False, verify=verify
        )
        if wait_for is not None:
            self.wait_until_up(wait_for)

    def wait_until_up(self, path: str) -> None:
        def answers() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"the gateway ended with {self.process.returncode}:\n{self.log()}")
            try:
                return self.http.get(path).status_code == 200
            except httpx.TransportError:
                return False

        if not eventually(answers):
            raise RuntimeError(f"{path} did not become 200:\n{self.log()}")

    def log(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    def access_lines(self) -> list[dict[str, Any]]:
        lines = (self.folder / "stdout").read_bytes().split(b"\n")
        return [json.loads(line) for line in lines[:-1]]

    def access_line(self, request_id: str) -> dict[str, Any]:
        """What the access log says of one request."""
        found = eventually(lambda: [line for line in self.access_lines() if line["request_id"] == request_id])
        assert len(found) == 1, f"{len(found)} access lines for {request_id}"
        return found[0]

    # --- configuration
    def write(self, config: Mapping[str, Any]) -> None:
        temporary = self.config_file.with_suffix(".new")
        temporary.write_text(json.dumps(config, indent=1))  # JSON is YAML
        temporary.replace(self.config_file)

    def reload(self) -> httpx.Response:
        return self.http.post("/admin/v1/reload", headers={"authorization": f"Bearer {ADMIN}"})

    def configure(self, config: Mapping[str, Any]) -> None:
        self.write(config)
        answer = self.reload()
        assert answer.status_code == 200, answer.text

    # --- asking
    def get(self, path: str, key: str | None = ADMIN, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return self.http.get(path, headers=headers | options.pop("headers", {}), **options)

    def wire(self, **options: Any) -> Wire:
        return Wire(self.port, **options)

    def metrics_page(self) -> str:
        return self.get("/metrics").text

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name whose labels fit; 0 when there is none."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.metrics_page())
            for sample in family.samples
            if sample.name == name and all(sample.labels.get(label) == value for label, value in labels.items())
        )

    def replicas(self) -> list[dict[str, Any]]:
        data: list[dict[str, Any]] = self.get("/admin/v1/replicas").json()["data"]
        return data

    def wait_for_replica(self, health: str = "up") -> None:
        assert eventually(lambda: any(entry["health"] == health for entry in self.replicas()))

    # --- the end
    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = PATIENCE) -> int:
        return self.process.wait(timeout)

    def stop(self) -> None:
        """Ends it whatever it does."""
        self.http.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(3)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._out.close()
        self._err.close()


class Lab:
    """What one test builds. The gateway process is shared: its configuration, tenant and key are this test's own."""

    def __init__(self, gateway: Gateway) -> None:
        number = next(_numbers)
        self.gateway = gateway
        self.tenant, self.key = f"tenant-{number}", f"sk-{number:04}-" + "k" * 40
        self._engines: list[Engine] = []

    def engine(self, dialect: str = "vllm", script: Script | None = None, **options: Any) -> Engine:
        engine = Engine(dialect, script, **options)
        self._engines.append(engine)
        return engine

    def serve(
        self,
        models: Mapping[str, Any],
        *,
        allowed: Sequence[str] = ("*",),
        limits: Mapping[str, Any] | None = None,
        tenants: Sequence[Mapping[str, Any]] = (),
        **sections: Any,
    ) -> Lab:
        """Loads a configuration. `models`: public name -> a list of replicas, or a whole entry."""
        self.gateway.configure(self.config(models, allowed=allowed, limits=limits, tenants=tenants, **sections))
        return self

    def config(
        self,
        models: Mapping[str, Any],
        *,
        allowed: Sequence[str] = ("*",),
        limits: Mapping[str, Any] | None = None,
        tenants: Sequence[Mapping[str, Any]] = (),
        **sections: Any,
    ) -> dict[str, Any]:
        own = {
            "name": self.tenant,
            "models": list(allowed),
            "limits": limits or {},
            "keys": [{"name": "test", "sha256": digest(self.key)}],
        }
        return base_config(models, [own, *tenants], **sections)

    def one(
        self,
        dialect: str = "vllm",
        script: Script | None = None,
        *,
        model: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Engine:
        """One engine behind the model `m`. `more`: options of its replica."""
        engine = self.engine(dialect, script)
        self.serve({"m": {"replicas": [replica(engine, **more)]} | dict(model or {})})
        return engine

    # --- asking
    def call(
        self, body: Any = None, path: str = "/v1/chat/completions", *, method: str = "POST", **options: Any
    ) -> Answer:
        """A whole answer, over a connection of its own."""
        options.setdefault("key", self.key)
        with self.gateway.wire() as wire:
            return wire.ask(method, path, body, **options).rest()

    def chat(self, model: str = "m", **more: Any) -> Answer:
        return self.call(chat(model, **more))

    def stream(self, model: str = "m", **more: Any) -> Answer:
        return self.call(chat(model, stream=True, **more))

    def tokens(self, kind: str) -> float:
        """Tokens booked for this test."""
        return self.gateway.metric("sekisho_tokens_total", tenant=self.tenant, kind=kind)

    def booked(self, prompt: int, completion: int) -> bool:
        """Whether exactly that gets booked."""
        wanted = (prompt, completion)
        return eventually(lambda: (self.tokens("prompt"), self.tokens("completion")) == wanted)

    def answered(self, status: int, code: str | None = None) -> float:
        labels = {"tenant": self.tenant, "status": str(status)} | ({} if code is None else {"code": code})
        return self.gateway.metric("sekisho_requests_total", **labels)

    def at_rest(self) -> bool:
        """Whether the gateway comes to hold no request any more."""
        return eventually(lambda: self.gateway.metric("sekisho_inflight_requests") == 0)

    def close(self) -> None:
        for engine in self._engines:
            engine.stop()
        surprises = [surprise for engine in self._engines for surprise in engine.surprises]
        assert not surprises, surprises


def base_config(models: Mapping[str, Any], tenants: Sequence[Mapping[str, Any]], **sections: Any) -> dict[str, Any]:
    entries = [
        {"name": name} | (dict(entry) if isinstance(entry, Mapping) else {"replicas": list(entry)})
        for name, entry in models.items()
    ]
    root = {"name": "root", "sha256": digest(ADMIN), "role": "admin"}
    operators = {"name": "operators", "models": [], "keys": [root]}
    return {"models": entries, "tenants": [operators, *tenants]} | sections
