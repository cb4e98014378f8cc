"""What the content log costs a request: `python tests/load/content.py`.

As access.py: gateway and engine on loopback, CPU time of the gateway's process for each request, and beside it that of
the process that makes the records. With more requests than that one can do records are dropped, which is counted here.
Run it on an idle machine with two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench import ENGINE, GATEWAY, KEY, ROOT, Engine, cpu, load, request

MODES = ("none", "full", "masked")
PROSE = "Please send the offer to taro@example.jp or call 090-1234-5678 before noon. " * 12


def config(mode: str) -> dict[str, Any]:
    key = {"name": "bench", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}
    return {
        "server": {"host": "127.0.0.1", "port": GATEWAY},
        "logging": {"content": mode},
        "state": {"database": None},
        "tenants": [{"name": "bench", "keys": [key | {"role": "admin"}]}],
        "models": [
            {"name": "mock", "replicas": [{"backend": "vllm", "url": f"http://127.0.0.1:{ENGINE}", "model": "mock"}]}
        ],
    }


def dropped() -> tuple[int, int]:
    """Records written and dropped so far."""
    ask = urllib.request.Request(f"http://127.0.0.1:{GATEWAY}/metrics", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(ask, timeout=10) as page:
        lines = page.read().decode().splitlines()
    counts = {line.partition(" ")[0]: line.partition(" ")[2] for line in lines if line.startswith("sekisho_content")}
    found = [counts.get(f'sekisho_content_records_total{{result="{name}"}}', "0") for name in ("written", "dropped")]
    return int(float(found[0])), int(float(found[1]))


async def measure(mode: str, folder: Path, seconds: float, data: bytes) -> tuple[float, float, float, int, int]:
    """CPU microseconds a request of the gateway and of its child, requests per second, records written and dropped."""
    file = folder / f"{mode}.yaml"
    file.write_text(json.dumps(config(mode)))
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "gateway", "serve", "--config", str(file)]
        gateway = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)  # noqa: ASYNC220 (nothing runs yet)
        try:
            for _ in range(100):
                await asyncio.sleep(0.1)
                try:
                    (await asyncio.open_connection("127.0.0.1", GATEWAY))[1].close()
                    break
                except OSError:
                    if gateway.poll() is not None:
                        sys.exit(f"the gateway ended: {(folder / 'log').read_text()}")
            await asyncio.sleep(1)
            await load(GATEWAY, data, 16, 1)
            children = [child.pid for child in psutil.Process(gateway.pid).children()]
            before, before_child = cpu(gateway.pid), sum(map(cpu, children))
            took = await load(GATEWAY, data, 16, seconds)
            own = (cpu(gateway.pid) - before) / len(took) * 1e6
            child = (sum(map(cpu, children)) - before_child) / len(took) * 1e6
            counts = await asyncio.to_thread(dropped)
            return own, child, len(took) / seconds, *counts
        finally:
            gateway.terminate()
            gateway.wait(20)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream", action="store_true", help="streamed answers")
    args = parser.parse_args()
    body: dict[str, Any] = {"messages": [{"role": "user", "content": PROSE}]}
    data = request(body | ({"stream": True} if args.stream else {}))
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", ENGINE, backlog=4096)
    figures: dict[str, list[tuple[float, float, float, int, int]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(args.rounds):
            for mode in MODES:
                figures[mode].append(await measure(mode, Path(name), args.seconds, data))
    server.close()
    print(f"{'content':8}{'us/request':>12}{'child':>8}{'requests/s':>12}{'written':>9}{'dropped':>9}   (medians)")
    for mode, rows in figures.items():
        middle = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(f"{mode:8}{middle[0]:>12.1f}{middle[1]:>8.1f}{middle[2]:>12.0f}{middle[3]:>9.0f}{middle[4]:>9.0f}")
    print(f"load average of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    uvloop.run(main())
