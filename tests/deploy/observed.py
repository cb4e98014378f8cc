"""Gateways in all the situations of which metrics tell, and a real Prometheus that reads them every second.

One gateway has two workers, Redis, tracing towards a collector that is away, and a content log; Prometheus shows it an
admin key. The other is one process that lets Prometheus in by its address, with a certificate that ends soon. A third
address has nobody behind it.
"""

from __future__ import annotations

import json
import shutil
import ssl
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import yaml
from cryptography import x509

from tests.doubles.authority import Authority
from tests.doubles.dialects import USAGE
from tests.doubles.engine import Engine, Exchange, answer
from tests.doubles.kinds import KINDS
from tests.e2e.harness import ADMIN, ROOT, Gateway, base_config, chat, digest, eventually, free_port, replica, together
from tests.e2e.wire import Wire
from tests.servers.prometheus import Prometheus
from tests.servers.redis import Redis

RED, BLUE, POOR = (f"sk-{name}-" + "o" * 40 for name in ("red", "blue", "poor"))
ROUNDS = 40  # of traffic, until every figure is there
LOAD = (
    'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'
    'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:prefix_cache_hits_total{engine="0"} 40.0\n'
    'vllm:prefix_cache_queries_total{engine="0"} 100.0\n'
)


def _healthy(x: Exchange) -> None:
    if x.request.target.endswith("/chat/completions") and x.request.json().get("stream"):
        x.stream(["Hel", "lo"], usage=USAGE | {"prompt_tokens_details": {"cached_tokens": 4}})
    else:
        answer(x)


def _slow(x: Exchange) -> None:
    x.begin()
    x.role()
    x.delta("slow")
    x.pause(0.5)
    x.delta("ly", "stop")
    x.done()


class Observed:
    """Use as a context manager. `where` has room for files."""

    def __init__(self, where: Path) -> None:
        self._stack, self._where = ExitStack(), where
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()

    def __enter__(self) -> Observed:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack) -> None:
        redis = stack.enter_context(Redis(self._where / "redis"))
        engines = {
            "well": Engine("vllm", _healthy), "failing": Engine("vllm", lambda x: x.fail("broken", 500)),
            "slow": Engine("vllm", _slow), "full": Engine("vllm", lambda x: x.fail("busy", 429)),
            "old": KINDS["ollama"].engine(),
        }  # fmt: skip
        for engine in engines.values():
            stack.enter_context(engine)
        engines["well"].metrics = LOAD
        self._config = base_config(
            {
                "m": [replica(engines["well"])],
                "shaky": [replica(engines["well"]), replica(engines["failing"])],
                "busy": {
                    "queue": {"max_waiting": 2, "max_wait": "20s"},
                    "replicas": [replica(engines["slow"], max_inflight=1)],
                },
                "full": [replica(engines["full"])],
                "old": [replica(engines["old"], backend="ollama", context_length=8192)],
                "away": [replica(f"http://127.0.0.1:{free_port()}")],
            },
            [
                {"name": "red", "keys": [{"name": "k", "sha256": digest(RED)}]},
                {"name": "blue", "keys": [{"name": "k", "sha256": digest(BLUE)}]},
                {"name": "poor", "limits": {"requests": "1/min"}, "keys": [{"name": "k", "sha256": digest(POOR)}]},
            ],
            server={"workers": 2}, state={"redis": redis.url}, logging={"content": "masked"},
            tracing={"endpoint": f"http://127.0.0.1:{free_port()}/v1/traces", "sample": 1},
        )  # fmt: skip
        self.gateway = self._gateway(stack, "workers", self._config)
        authority = Authority(self._where, "servers")
        self._ca_file = str(authority.ca_file)
        identity = authority.issue("gateway", x509.IPAddress(ip_address("127.0.0.1")))
        files = {name: str(path) for name, path in identity._asdict().items()}
        open_one = base_config(
            {"m": [replica(engines["well"])]}, [], metrics={"allow": ["127.0.0.0/8"]}, server={"tls": files}
        )
        trusted = ssl.create_default_context(cafile=self._ca_file)
        self.other = self._gateway(stack, "single", open_one, scheme="https", verify=trusted)
        self.targets = [f"127.0.0.1:{port}" for port in (self.gateway.port, self.other.port, free_port())]
        self.prometheus = stack.enter_context(Prometheus(self._where / "prometheus", self._scraping()))
        assert self._comes("sum(up) == 2"), self.prometheus.query("up")
        self._disturb()

    def _gateway(self, stack: ExitStack, name: str, config: dict[str, Any], **options: Any) -> Gateway:
        folder = self._where / name
        folder.mkdir()
        gateway = Gateway(folder, config, **options)
        stack.callback(gateway.stop)
        return gateway

    def _scraping(self) -> dict[str, Any]:
        """deploy/prometheus/prometheus.yml with these gateways, this key, and no patience."""
        source = ROOT / "deploy/prometheus"
        config: dict[str, Any] = yaml.safe_load((source / "prometheus.yml").read_text())
        shutil.copytree(source / "rules", self._where / "prometheus/rules")
        key = self._where / "admin.key"
        key.write_text(ADMIN + "\n")
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        [job] = config["scrape_configs"]
        job["authorization"]["credentials_file"] = str(key)
        job["static_configs"] = [{"targets": [self.targets[0]]}]
        let_in = {name: value for name, value in job.items() if name != "authorization"}
        let_in |= {"job_name": "sekisho-others", "static_configs": [{"targets": self.targets[1:]}]}
        let_in |= {"scheme": "https", "tls_config": {"ca_file": self._ca_file}}
        return config | {"scrape_configs": [job, let_in]}

    def _disturb(self) -> None:
        """What happens once: a worker dies, and a changed configuration is wrong."""
        assert self._comes("sekisho_workers == 2")
        children = psutil.Process(self.gateway.process.pid).children()
        [*_, worker] = [one for one in children if "gateway.workers.member" in one.cmdline()]
        worker.kill()
        assert self._comes("sekisho_worker_restarts_total == 1") and self._comes("sekisho_workers == 2")
        self.gateway.write(self._config | {"nonsense": 1})  # the gateway sees by itself that the file has changed
        assert self._comes('sekisho_config_reloads_total{result="failure"} > 0')

    def _comes(self, condition: str) -> bool:
        """Whether it comes to be true. Asked of Prometheus: a connection of ours may have ended with the worker."""
        return bool(eventually(lambda: self.prometheus.query(condition)))

    # --- traffic
    def until(self, wanted: Callable[[], bool]) -> bool:
        """Makes traffic of every sort until `wanted`."""
        for _ in range(ROUNDS):
            if wanted():
                return True
            together(self._round())
        return wanted()

    def _round(self) -> Sequence[Callable[[], object]]:
        long = [{"role": "user", "content": "word " * 3000}]
        embedding = {"model": "m", "input": "x"}
        return [
            lambda: self._ask(RED, chat("m", stream=True)),
            lambda: self._ask(BLUE, chat("m", stream=True)),
            lambda: self._ask(RED, chat("m")),
            lambda: self._ask(BLUE, embedding, "/v1/embeddings"),
            lambda: self._ask(RED, chat("shaky")),
            lambda: self._ask(RED, chat("shaky")),
            lambda: self._ask(BLUE, chat("full")),
            lambda: self._ask(BLUE, chat("away")),
            lambda: self._ask(BLUE, chat("old", messages=long)),
            lambda: self._ask(POOR, chat("m")),
            lambda: self._ask(POOR, chat("m")),
            lambda: self._ask(RED, {"model": "m"}),
            lambda: self._ask(RED, chat("nobody knows it")),
            lambda: self._ask("sk-" + "x" * 48, chat("m")),
            self._ask_other,
            self._leave,
            *[lambda: self._ask(RED, chat("busy", stream=True))] * 5,
        ]

    def _ask(self, key: str, body: Any, path: str = "/v1/chat/completions") -> int:
        with Wire(self.gateway.port) as wire:
            return wire.ask("POST", path, body, key=key).rest().status

    def _ask_other(self) -> int:
        headers = {"authorization": f"Bearer {ADMIN}"}
        return self.other.http.post("/v1/chat/completions", json=chat("m"), headers=headers).status_code

    def _leave(self) -> None:
        """A client that does not wait for the end."""
        with Wire(self.gateway.port) as wire:
            wire.ask("POST", "/v1/chat/completions", chat("busy", stream=True), key=BLUE)


def dashboards() -> dict[str, Any]:
    """File name -> dashboard."""
    return {path.name: json.loads(path.read_text()) for path in sorted((ROOT / "deploy/grafana/dashboards").iterdir())}
