"""What several workers bring: `python tests/load/workers.py [--rounds 3] [--seconds 4] [--workers 1 2]`.

As bench.py: gateway and engine on loopback, the load from this process. Load, engine and gateway share the machine's
processors, so the requests a second that are reached here say little. What counts is the processor time of all the
gateway's processes for each request: a worker is one thread, so with a processor for each of them n workers do
n / (seconds of a request) requests a second. The limits are shared over Redis in every case, also with one worker.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench import ENGINE, GATEWAY, KEY, ROOT, TOKENS, Engine, cpu, load, request

CONNECTIONS = 64  # the kernel deals them out by a hash: few of them would be dealt out unevenly
Figures = dict[str, float]


def config(redis_port: int) -> dict[str, object]:
    key = {"name": "bench", "sha256": hashlib.sha256(KEY.encode()).hexdigest(), "role": "admin"}
    limits = {"requests": "1000000000/min", "tokens": "1000000000000/min", "concurrency": 100000}
    return {
        "server": {"host": "127.0.0.1", "port": GATEWAY},
        "state": {"redis": f"redis://127.0.0.1:{redis_port}/0"},
        "tenants": [{"name": "bench", "limits": limits, "keys": [key]}],
        "models": [
            {"name": "mock", "replicas": [{"backend": "vllm", "url": f"http://127.0.0.1:{ENGINE}", "model": "mock"}]}
        ],
    }


@contextmanager
def redis() -> Iterator[int]:
    """The port of a server that keeps nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        server.kill()
        server.wait()


async def started(folder: Path, workers: int, redis_port: int) -> subprocess.Popen[bytes]:
    file = folder / "gateway.yaml"
    file.write_text(json.dumps(config(redis_port)))
    file.chmod(0o600)
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(file), "--workers", str(workers)]
    with (folder / "log").open("wb") as log:
        gateway = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)  # noqa: ASYNC220 (nothing runs yet)
    for _ in range(200):
        await asyncio.sleep(0.1)
        if gateway.poll() is not None:
            sys.exit(f"the gateway ended: {(folder / 'log').read_text()}")
        if await asyncio.to_thread(serving) == workers:
            await asyncio.sleep(1)
            return gateway
    sys.exit("the gateway does not serve within 20 seconds")


def serving() -> int:
    """How many workers do."""
    ask = urllib.request.Request(f"http://127.0.0.1:{GATEWAY}/metrics", headers={"authorization": f"Bearer {KEY}"})
    try:
        with urllib.request.urlopen(ask, timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return 0
    return next((int(float(line.split()[1])) for line in lines if line.startswith("sekisho_workers ")), 1)


def times(gateway: subprocess.Popen[bytes]) -> dict[int, float]:
    """Processor seconds of each of the gateway's processes; the first is the one that was started."""
    pids = [gateway.pid, *(child.pid for child in psutil.Process(gateway.pid).children())]
    return {pid: cpu(pid) for pid in pids}


async def measured(workers: int, seconds: float, redis_port: int) -> Figures:
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        gateway = await started(Path(folder), workers, redis_port)
        try:
            stream = request({"stream": True, "stream_options": {"include_usage": True}})
            for name, data, units in (("request", request({}), 1), ("chunk", stream, TOKENS)):
                await load(GATEWAY, data, CONNECTIONS, 1)
                before, begun = times(gateway), time.monotonic()
                took = await load(GATEWAY, data, CONNECTIONS, seconds)
                spent = {pid: after - before[pid] for pid, after in times(gateway).items()}
                count = len(took) * units
                figures[f"us/{name}"] = sum(spent.values()) / count * 1e6
                if name == "request":
                    figures["here/s"] = count / (time.monotonic() - begun)
                    own = spent.pop(gateway.pid) if workers > 1 else 0.0
                    figures["supervisor us"] = own / count * 1e6
                    figures["busiest %"] = max(spent.values()) / sum(spent.values()) * 100
        finally:
            gateway.terminate()
            gateway.wait(40)
    return figures


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", ENGINE, backlog=4096)
    rounds: dict[int, list[Figures]] = {workers: [] for workers in args.workers}
    with redis() as port:
        for _ in range(args.rounds):
            for workers in args.workers:
                rounds[workers].append(await measured(workers, args.seconds, port))
    server.close()
    medians = {
        workers: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for workers, found in rounds.items()
    }
    base = medians[args.workers[0]]
    possible = {workers: workers / found["us/request"] * 1e6 for workers, found in medians.items()}
    heads = "".join(f"{name:>15}" for name in base)
    print(f"{'workers':8}{heads}{'derived req/s':>15}{'ratio':>8}")
    for workers, found in medians.items():
        row = "".join(f"{value:>15.1f}" for value in found.values())
        print(f"{workers:<8}{row}{possible[workers]:>15.0f}{possible[workers] / possible[args.workers[0]]:>8.2f}")


if __name__ == "__main__":
    uvloop.run(main())
