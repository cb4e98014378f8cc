"""Real engines as processes: each is started once, on loopback, and answers behind one gateway that grows with them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

import backends
from backends.base import Backend, EngineLoad
from tests.e2e.harness import ROOT, Gateway, base_config, digest, eventually, free_port

GGUF = Path(os.environ.get("SEKISHO_TEST_GGUF", ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
KEY = "sk-engines-" + "e" * 40
TENANT = "engines"
CONTEXT = 2048
AT_ENGINE = "engine-model"


@dataclass(frozen=True)
class Kind:
    """What is known beforehand of one engine. `public` is the name clients ask for."""

    public: str
    backend: str
    needs: tuple[str, ...] = ()  # environment variables; the first one that is unset is the reason for skipping
    patience: float = 60.0  # seconds from its start to its first answer
    dialect: str | None = None  # the double that plays it
    operations: frozenset[str] = frozenset({"chat", "completions"})
    capabilities: frozenset[str] = frozenset()
    context_is_checked: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> str | None:
        """Why it cannot be started here."""
        for name in self.needs:
            if not os.environ.get(name):
                return f"{self.public}: {name} is not set; `make engines` installs it"
        if self.backend in ("llamacpp", "llama_server") and not GGUF.is_file():
            return f"{self.public}: there is no {GGUF.name}; `make model` fetches it"
        if self.backend == "llamacpp" and importlib.util.find_spec("llama_cpp") is None:
            return f"{self.public}: llama-cpp-python is not installed"
        return None


def mlx_backend() -> str:
    return "mlx_lm" if "mlx_lm" in backends.kinds() else "openai_compatible"


KINDS = {
    kind.public: kind
    for kind in (
        Kind(
            "embedded", "llamacpp",
            operations=frozenset({"chat", "completions", "embeddings"}),
            capabilities=frozenset({"json_schema", "n"}),
        ),
        Kind(
            "llama-server", "llama_server", ("SEKISHO_LLAMA_SERVER",), dialect="llama_server",
            capabilities=frozenset({"json_schema", "n", "logprobs", "tools"}),
        ),
        Kind(
            "llama-server-embeddings", "llama_server", ("SEKISHO_LLAMA_SERVER",),
            operations=frozenset({"embeddings"}),
        ),
        Kind(
            "mlx", mlx_backend(), ("SEKISHO_MLX_PYTHON", "SEKISHO_SAFETENSORS"), dialect="mlx_lm", patience=90,
            capabilities=frozenset({"logprobs", "tools"}), context_is_checked=False,
            environment={"HF_HUB_OFFLINE": "1"},
        ),
        Kind(
            "vllm", "vllm", ("SEKISHO_VLLM_PYTHON", "SEKISHO_SAFETENSORS"), dialect="vllm", patience=240,
            capabilities=frozenset({"json_schema", "n", "logprobs", "tools", "named_tool"}),
            environment={
                "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
            },
        ),
    )
}  # fmt: skip
CHATTING = [name for name, kind in KINDS.items() if "chat" in kind.operations]
EMBEDDING = [name for name, kind in KINDS.items() if "embeddings" in kind.operations]


def command(kind: Kind, port: int) -> list[str]:
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if kind.backend == "llama_server":
        program, model = os.environ["SEKISHO_LLAMA_SERVER"], str(GGUF)
        base = [program, "--model", model, *where, "--alias", AT_ENGINE, "--threads", "2"]
        if kind.operations == {"embeddings"}:
            return [*base, "--embeddings", "--pooling", "mean", "--ctx-size", "512", "--parallel", "1"]
        return [*base, "--metrics", "--ctx-size", str(2 * CONTEXT), "--parallel", "2"]
    if kind.public == "mlx":
        return [os.environ["SEKISHO_MLX_PYTHON"], "-m", "mlx_lm", "server",
                "--model", os.environ["SEKISHO_SAFETENSORS"], *where]  # fmt: skip
    return [os.environ["SEKISHO_VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server",
            "--model", os.environ["SEKISHO_SAFETENSORS"], "--served-model-name", AT_ENGINE,
            "--max-model-len", str(CONTEXT), "--enforce-eager", "--enable-server-load-tracking",
            "--enable-auto-tool-choice", "--tool-call-parser", "hermes", *where]  # fmt: skip


class RealEngine:
    """One engine that runs, alone or as a child of the gateway."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self.backend: Backend = backends.load(kind.backend)
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / f"{kind.public}.log"
        self.port = free_port()
        self.started_after = 0.0
        if kind.backend == "llamacpp":
            return
        began = time.monotonic()
        (cache := folder / "cache").mkdir(exist_ok=True)  # an engine must not find, or miss, what a user has
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command(kind, self.port), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=os.environ | kind.environment | {"HF_HUB_CACHE": str(cache)}, start_new_session=True,
            )  # fmt: skip
        try:
            self._wait(kind.patience)
        except BaseException:
            self.stop()
            raise
        self.started_after = time.monotonic() - began

    def _wait(self, patience: float) -> None:
        assert self.process is not None

        def up() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                return True
            try:
                return self.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        eventually(up, patience)
        if self.process.poll() is not None or not up():
            last = self.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{self.kind.public} did not start within {patience:g} s:\n{last}")

    @property
    def name_there(self) -> str:
        return os.environ["SEKISHO_SAFETENSORS"] if self.kind.public == "mlx" else AT_ENGINE

    def replica(self) -> dict[str, Any]:
        if self.kind.backend == "llamacpp":
            return {"backend": "llamacpp", "path": str(GGUF), "context_length": CONTEXT, "parallel": 2, "threads": 2}
        return {"backend": self.kind.backend, "url": f"http://127.0.0.1:{self.port}", "model": self.name_there}

    # --- the engine without the gateway
    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=5, trust_env=False)

    def post(self, path: str, body: Any) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.post(url, json={"model": self.name_there} | body, timeout=60, trust_env=False)

    def load(self) -> EngineLoad | None:
        """Its own word on its load, by its adapter; None when it publishes nothing."""
        if self.backend.probes.load is None or self.process is None:
            return None
        return self.backend.read_load(self.get(self.backend.probes.load).content)

    def is_computing(self) -> bool:
        """Whether it uses the processor, for engines that say nothing of themselves."""
        assert self.process is not None
        before, after = self._cpu_seconds(), 0.0
        time.sleep(0.6)
        after = self._cpu_seconds()
        return after - before > 0.2

    def _cpu_seconds(self) -> float:
        assert self.process is not None
        total = 0.0
        for process in (root := psutil.Process(self.process.pid), *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def stop(self) -> None:
        """Its whole process group: vLLM has children."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Fleet:
    """The gateway and every engine that some test has asked for so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.engines: dict[str, RealEngine] = {}
        self._failed: dict[str, str] = {}
        self.gateway = Gateway(folder, self._config())

    def get(self, name: str) -> RealEngine:
        """The engine, running and known to the gateway. Raises: RuntimeError when it does not start."""
        if (why := self._failed.get(name)) is not None:
            raise RuntimeError(why)
        if (engine := self.engines.get(name)) is None:
            try:
                engine = self.engines[name] = RealEngine(KINDS[name], self._folder)
            except RuntimeError as error:
                self._failed[name] = str(error)
                raise
            self.gateway.configure(self._config())
            if not eventually(lambda: self.state_of(name)["health"] == "up", 60):
                raise RuntimeError(f"{name} is {self.state_of(name)}\n{self.gateway.log()[-3000:]}")
        return engine

    def state_of(self, name: str) -> dict[str, Any]:
        """What the gateway knows of it."""
        return next(entry for entry in self.gateway.replicas() if entry["model"] == name)

    def booked(self) -> tuple[int, int]:
        """Prompt and completion tokens of all requests so far."""
        def tokens(kind: str) -> int:
            return int(self.gateway.metric("sekisho_tokens_total", tenant=TENANT, kind=kind))

        return tokens("prompt"), tokens("completion")

    def _config(self) -> dict[str, Any]:
        tenant = {"name": TENANT, "models": ["*"], "keys": [{"name": "test", "sha256": digest(KEY)}]}
        return base_config({name: [engine.replica()] for name, engine in self.engines.items()}, [tenant])

    def stop(self) -> None:
        self.gateway.stop()
        for engine in self.engines.values():
            engine.stop()


def settles(read: Callable[[], Any], wanted: Any, timeout: float = 20.0) -> Any:
    """`wanted`, or what `read` said last."""
    eventually(lambda: read() == wanted, timeout)
    return read()
