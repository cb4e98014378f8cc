"""What callers see while the stores are away: two gateways under load, Redis frozen, stopped, and PostgreSQL restarted.

    python -m tests.load.outages [--rate 200] [--phase 6] [--policy local]

Two gateways share one Redis and one PostgreSQL. Requests come at `--rate` a second, spread evenly, and the tenant's
limit is half of that. Prints for each phase the answers by status, how many were admitted in a second, and the slowest
answer; at the end whether every admitted request has its usage record.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.doubles.engine import Engine
from tests.e2e.harness import Gateway, base_config, chat, digest, eventually, replica
from tests.servers.postgres import Postgres
from tests.servers.redis import Redis

KEY = "sk-outage-" + "o" * 40


class Load:
    """Requests at a steady rate from many threads; what came of each."""

    def __init__(self, gateways: list[Gateway], rate: float) -> None:
        self._gateways, self._rate = gateways, rate
        self.answers: list[tuple[float, int, float]] = []  # when it ended, status (0 = no answer), seconds it took
        self._pool = ThreadPoolExecutor(64)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._pool.shutdown()

    def _run(self) -> None:
        began, sent = time.monotonic(), 0
        while not self._stop.wait(max(0.0, began + sent / self._rate - time.monotonic())):
            self._pool.submit(self._ask, self._gateways[sent % len(self._gateways)])
            sent += 1

    def _ask(self, gateway: Gateway) -> None:
        began = time.monotonic()
        try:
            answer = gateway.http.post(
                "/v1/chat/completions", json=chat(max_tokens=20), headers={"authorization": f"Bearer {KEY}"}
            )
            status = answer.status_code
        except httpx.TransportError:
            status = 0
        self.answers.append((time.monotonic(), status, time.monotonic() - began))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--phase", type=float, default=6, help="seconds")
    parser.add_argument("--policy", choices=["local", "allow", "refuse"], default="local")
    args = parser.parse_args()
    limit = int(args.rate / 2)
    engine = Engine("vllm")
    with tempfile.TemporaryDirectory() as name, Redis(Path(name) / "redis") as redis:
        postgres = Postgres()
        postgres.start()
        tenant = {"name": "red", "limits": {"requests": f"{limit}/s"}, "keys": [{"name": "ci", "sha256": digest(KEY)}]}
        url = postgres.create()
        gateways = []
        for number in (1, 2):
            folder = Path(name) / f"gateway-{number}"
            folder.mkdir()
            state = {"database": url, "redis": redis.url, "spool": str(folder / "spool")}
            config = base_config(
                {"m": [replica(engine)]}, [tenant], state=state, limits={"on_store_failure": args.policy}
            )
            gateways.append(Gateway(folder, config))
        phases: list[tuple[str, Callable[[], None]]] = [
            ("all well", lambda: None),
            ("redis frozen", redis.pause),
            ("redis back", redis.resume),
            ("redis stopped", redis.stop),
            ("redis started, empty", redis.start),
            ("postgres stopped", postgres.stop),
            ("postgres started", postgres.start),
        ]
        marks = []
        with Load(gateways, args.rate) as load:
            for title, act in phases:
                marks.append((title, time.monotonic()))
                act()
                time.sleep(args.phase)
            marks.append(("end", time.monotonic()))
        print(f"{'phase':22}{'200':>7}{'429':>7}{'503':>7}{'none':>6}{'most/s':>8}{'limit':>7}{'slowest ms':>12}")
        for (title, begin), (_, end) in itertools.pairwise(marks):
            part = [one for one in load.answers if begin <= one[0] < end]
            statuses = Counter(status for _, status, _ in part)
            admitted = sorted(at for at, status, _ in part if status == 200)
            # Ends of requests, so a few milliseconds of jitter are in it.
            most = max((sum(at <= other < at + 1 for other in admitted) for at in admitted), default=0)
            slowest = max((took for _, _, took in part), default=0.0) * 1000
            print(
                f"{title:22}{statuses[200]:>7}{statuses[429]:>7}{statuses[503]:>7}{statuses[0]:>6}"
                f"{most:>8}{limit:>7}{slowest:>12.0f}"
            )
        done = sum(status == 200 for _, status, _ in load.answers)

        def stored() -> int:
            rows = gateways[0].get("/admin/v1/usage", params={"tenant": "red", "group_by": "status"}).json()["data"]
            return sum(row["requests"] for row in rows if str(row["status"]) == "200")

        eventually(lambda: stored() == done, timeout=30)
        print(f"answered 200: {done}, usage records of them: {stored()}")
        for gateway in gateways:
            gateway.stop()
        postgres.close()
    engine.stop()


if __name__ == "__main__":
    main()
