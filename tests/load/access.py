"""What knowing and limiting a caller costs: CPU per request without keys, with key and limits, a token, shared limits.

    python tests/load/access.py [--seconds 4] [--rounds 5] [--cases open key jwt redis]

Starts the gateway once per case and round, pinned to processor 0, with the engine and the load (this process) on
processor 1, and prints the median of CPU microseconds per request and the difference to `open`. `open` has no
authentication, no limits and no database; `usage` is `key` with usage records in SQLite; the others are `key` with the
same three limits (requests, tokens, concurrency) in memory or over Redis. Needs redis-server for `redis`.
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
import time
from pathlib import Path
from typing import Any

import uvloop
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from jose import jwk, jwt

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench import ENGINE, GATEWAY, KEY, ROOT, Engine, cpu, load, request

REDIS = 6399
CASES = ("open", "key", "jwt", "redis", "usage")
LIMITS = {"requests": "1000000000/min", "tokens": "1000000000000/min", "concurrency": 100000}


class Issuer:
    """Keys in a file, and one token signed with them."""

    def __init__(self, folder: Path) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        public = jwk.construct(private, "RS256").public_key().to_dict()
        self.file = folder / "jwks.json"
        self.file.write_text(json.dumps({"keys": [public | {"kid": "one", "use": "sig"}]}))
        now = int(time.time())
        claims = {"iss": "https://id.example", "aud": "sekisho", "sub": "bench", "tenant": "bench", "iat": now}
        self.token = jwt.encode(claims | {"exp": now + 7200}, private, "RS256", headers={"kid": "one"})
        self.config = {"issuer": claims["iss"], "audience": "sekisho", "jwks_file": str(self.file)}


def config(case: str, issuer: Issuer) -> dict[str, Any]:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    replica = {"backend": "vllm", "url": f"http://127.0.0.1:{ENGINE}", "model": "mock"}
    limits = {} if case == "open" else LIMITS
    return {
        "server": {"host": "127.0.0.1", "port": GATEWAY},
        "state": {
            "database": "sqlite:///bench.db" if case == "usage" else None,
            "redis": f"redis://127.0.0.1:{REDIS}/0" if case == "redis" else None,
        },
        "auth": {"required": case != "open", "jwt": [issuer.config] if case == "jwt" else []},
        "tenants": [{"name": "bench", "limits": limits, "keys": [{"name": "bench", "sha256": digest}]}],
        "models": [{"name": "mock", "replicas": [replica]}],
    }


async def measure(case: str, folder: Path, issuer: Issuer, seconds: float) -> float:
    """CPU microseconds of the gateway per request."""
    file = folder / f"{case}.yaml"
    file.write_text(json.dumps(config(case, issuer)))
    credential = {"open": "sk-nobody", "jwt": issuer.token}.get(case, KEY)
    data = request({}, credential)
    with (folder / f"{case}.log").open("wb") as log:
        command = ["taskset", "-c", "0", sys.executable, "-m", "gateway", "serve", "--config", str(file)]
        gateway = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)  # noqa: ASYNC220 (nothing runs yet)
        try:
            for _ in range(100):
                await asyncio.sleep(0.1)
                try:
                    (await asyncio.open_connection("127.0.0.1", GATEWAY))[1].close()
                    break
                except OSError:
                    if gateway.poll() is not None:
                        sys.exit(f"the gateway ended: {(folder / f'{case}.log').read_text()}")
            await asyncio.sleep(1)
            await load(GATEWAY, data, 32, 1)
            before = cpu(gateway.pid)
            took = await load(GATEWAY, data, 32, seconds)
            return (cpu(gateway.pid) - before) / len(took) * 1e6
        finally:
            gateway.terminate()
            gateway.wait(20)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    args = parser.parse_args()
    os.sched_setaffinity(0, {1})
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", ENGINE, backlog=4096)
    figures: dict[str, list[float]] = {case: [] for case in args.cases}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        issuer = Issuer(folder)
        redis_log = (folder / "redis.log").open("wb")
        command = ["redis-server", "--port", str(REDIS), "--save", "", "--bind", "127.0.0.1", "--dir", name]
        redis = subprocess.Popen(command, stdout=redis_log) if "redis" in args.cases else None  # noqa: ASYNC220
        try:
            for _ in range(args.rounds):
                for case in args.cases:
                    figures[case].append(await measure(case, folder, issuer, args.seconds))
        finally:
            server.close()
            redis_log.close()
            if redis is not None:
                redis.terminate()
                redis.wait(10)
    base = statistics.median(figures[args.cases[0]])
    print(f"{'case':8}{'us/request':>12}{'over ' + args.cases[0]:>14}{'spread':>10}")
    for case, values in figures.items():
        middle = statistics.median(values)
        print(f"{case:8}{middle:>12.1f}{middle - base:>14.1f}{max(values) - min(values):>10.1f}")


if __name__ == "__main__":
    uvloop.run(main())
