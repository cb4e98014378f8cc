"""Several worker processes behind one port: to callers and operators they are one gateway."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.doubles.engine import Engine, Exchange
from tests.e2e.harness import ADMIN, ROOT, Gateway, base_config, chat, digest, eventually, free_port, replica, together
from tests.e2e.wire import Answer, Wire
from tests.servers.redis import Redis

Start = Callable[..., Gateway]
WORKERS = 4
KEY = "sk-workers-" + "w" * 40


def config(engine: Engine, redis: Redis, workers: int = WORKERS, **more: Any) -> dict[str, Any]:
    limits, sections = more.pop("limits", {}), {"server": {"workers": workers}} | more
    tenant = {"name": "red", "limits": limits, "keys": [{"name": "ci", "sha256": digest(KEY)}]}
    entry = {"queue": {"max_waiting": 50, "max_wait": "20s"}, "replicas": [replica(engine)]}
    models = sections.pop("models", {"m": entry})
    return base_config(models, [tenant], state={"redis": redis.url} | sections.pop("state", {}), **sections)


def ask(gateway: Gateway, body: Any = None, key: str = KEY) -> Answer:
    """Over a connection of its own, which the kernel gives to whichever worker it likes."""
    with Wire(gateway.port) as wire:
        return wire.ask("POST", "/v1/chat/completions", body or chat(), key=key).rest()


def held_back(engine: Engine) -> threading.Event:
    """From now on streams stop in the middle until the event is set; everything else is answered at once."""
    release = threading.Event()

    def script(x: Exchange) -> None:
        if not x.request.json().get("stream"):
            x.reply(x.dialect.completion())
            return
        x.begin()
        x.delta("before ")
        x.wait(release)
        x.delta("after", "stop")
        x.done()

    engine.script = script
    return release


def processes(gateway: Gateway) -> list[psutil.Process]:
    """The workers, in the order in which they were started."""
    children = psutil.Process(gateway.process.pid).children()
    return sorted(filter(is_worker, children), key=lambda process: process.create_time())


def is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # it ends while it is looked at, or has ended and nobody knows yet
        return "gateway.workers.member" in process.cmdline()
    return False


def all_serve(gateway: Gateway, workers: int = WORKERS) -> bool:
    def counted() -> bool:
        with suppress(httpx.TransportError):  # a kept connection may be that of a worker that was killed
            return gateway.metric("sekisho_workers") == workers
        return False

    return eventually(counted)


def owner(wire: Wire, workers: list[psutil.Process]) -> psutil.Process | None:
    """The worker that a connection of ours has come to."""
    port = wire.sock.getsockname()[1]
    for worker in workers:
        if any(one.raddr and one.raddr.port == port for one in worker.net_connections("tcp")):
            return worker
    return None


Reach = Callable[[Gateway], dict[int, Wire]]


@pytest.fixture
def reach() -> Iterator[Reach]:
    """Opens a connection to every worker: pid -> connection."""
    with ExitStack() as stack:

        def one_for_each(gateway: Gateway) -> dict[int, Wire]:
            workers, found = processes(gateway), dict[int, Wire]()
            for _ in range(200):
                wire = Wire(gateway.port)
                wire.ask("GET", "/health", key=None).rest()
                process = owner(wire, workers)
                if process is None or process.pid in found:
                    wire.close()
                else:
                    found[process.pid] = wire
                    stack.callback(wire.close)
                if len(found) == len(workers):
                    return found
            raise AssertionError("not every worker gets connections")

        yield one_for_each


def streams(wires: dict[int, Wire]) -> dict[int, Answer]:
    """A stream at every worker, up to its first event: pid -> answer."""
    asked = chat(stream=True)
    return {pid: wire.ask("POST", "/v1/chat/completions", asked, key=KEY).until(1) for pid, wire in wires.items()}


class Totals:
    """What must never fall, over the scrapes that are read."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._last = gateway, dict[tuple[str, str], float]()

    def read(self, wire: Wire | None = None) -> None:
        text = wire.ask("GET", "/metrics", key=ADMIN).rest().body.decode() if wire else self._gateway.metrics_page()
        for family in text_string_to_metric_families(text):
            if family.type not in ("counter", "histogram"):
                continue
            for sample in family.samples:
                key = sample.name, json.dumps(sample.labels, sort_keys=True)
                assert sample.value >= self._last.get(key, 0.0), f"{key} fell from {self._last[key]} to {sample.value}"
                self._last[key] = sample.value

    @property
    def answered(self) -> float:
        return sum(value for (name, labels), value in self._last.items()
                   if name == "sekisho_requests_total" and '"tenant": "red"' in labels)  # fmt: skip


def test_every_scrape_shows_the_same_totals(
    start: Start, engine: Engine, redis: Redis, reach: Reach
) -> None:
    """1000 requests over four workers, 40 scrapes, a worker killed, 40 more."""
    gateway = start(config(engine, redis))
    assert all_serve(gateway)
    answers = [answer for _ in range(50) for answer in together([lambda: ask(gateway)] * 20)]
    assert {answer.status for answer in answers} == {200}
    totals, wires = Totals(gateway), reach(gateway)
    for number in range(40):
        totals.read(list(wires.values())[number % WORKERS])
        assert totals.answered == 1000
    victim = processes(gateway)[1]
    victim.kill()
    assert all_serve(gateway) and eventually(lambda: gateway.metric("sekisho_worker_restarts_total") == 1)
    for _ in range(40):
        totals.read()
    assert totals.answered == 1000
    assert gateway.metric("sekisho_inflight_requests") == 0


def test_a_killed_worker_takes_only_its_own_requests_along(
    start: Start, engine: Engine, redis: Redis, reach: Reach
) -> None:
    release = held_back(engine)
    gateway = start(config(engine, redis))
    assert all_serve(gateway)
    answers = streams(reach(gateway))
    victim = next(iter(answers))
    os.kill(victim, signal.SIGKILL)
    assert eventually(lambda: victim not in {process.pid for process in processes(gateway)})
    assert all_serve(gateway)
    assert eventually(lambda: gateway.metric("sekisho_inflight_requests") == WORKERS - 1)
    release.set()
    for pid, answer in answers.items():
        if pid != victim:
            assert answer.rest().text() == "before after"
    assert [ask(gateway).status for _ in range(20)] == [200] * 20
    assert "ended (exit code -9)" in gateway.log()


def test_places_of_a_replica_belong_to_all_workers_together(start: Start, engine: Engine, redis: Redis) -> None:
    """Four workers, three places: never more than three open, and every request gets its turn."""
    running, most, lock = 0, 0, threading.Lock()

    def slow(x: Exchange) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        x.pause(0.05)
        with lock:
            running -= 1
        x.reply(x.dialect.completion())

    engine.script = slow
    entry = {"queue": {"max_waiting": 64, "max_wait": "60s"}, "replicas": [replica(engine, max_inflight=3)]}
    gateway = start(config(engine, redis, models={"m": entry}))
    assert all_serve(gateway)
    gateway.wait_for_replica()
    statuses = Counter(answer.status for answer in together([lambda: ask(gateway)] * 48))
    assert statuses == {200: 48}
    # Two workers that choose in the same few microseconds may take one place: see gateway/workers/places.py.
    assert 3 <= most <= 3 + WORKERS - 1
    assert gateway.metric("sekisho_queue_depth") == 0 and gateway.metric("sekisho_inflight_requests") == 0


def test_limits_hold_for_all_workers_together(start: Start, engine: Engine, redis: Redis) -> None:
    """60 requests an hour, asked for twenty at a time."""
    gateway = start(config(engine, redis, limits={"requests": "60/hour"}))
    assert all_serve(gateway)
    statuses = Counter(answer.status for _ in range(10) for answer in together([lambda: ask(gateway)] * 20))
    assert statuses == {200: 60, 429: 140}


def test_what_an_administrator_does_holds_at_every_worker(
    start: Start, engine: Engine, redis: Redis, reach: Reach
) -> None:
    gateway = start(config(engine, redis))
    assert all_serve(gateway)
    wires = reach(gateway)
    made = gateway.http.post(
        "/admin/v1/tenants", json={"name": "blue"}, headers={"authorization": f"Bearer {ADMIN}"}
    )
    assert made.status_code == 200, made.text
    made = gateway.http.post(
        "/admin/v1/keys", json={"tenant": "blue", "name": "one"}, headers={"authorization": f"Bearer {ADMIN}"}
    )
    key, identity = made.json()["key"], made.json()["id"]
    for wire in wires.values():  # from the answer on, without a pause
        assert wire.ask("POST", "/v1/chat/completions", chat(), key=key).rest().status == 200
    gateway.http.delete(f"/admin/v1/keys/{identity}", headers={"authorization": f"Bearer {ADMIN}"}).raise_for_status()
    for wire in wires.values():
        assert wire.ask("POST", "/v1/chat/completions", chat(), key=key).rest().status == 401

    replica_id = gateway.replicas()[0]["id"]
    drained = gateway.http.post(
        f"/admin/v1/replicas/{replica_id}/drain", headers={"authorization": f"Bearer {ADMIN}"}
    )
    assert drained.status_code == 200
    for wire in wires.values():
        assert wire.ask("POST", "/v1/chat/completions", chat(), key=KEY).rest().status == 503
    processes(gateway)[0].kill()  # the new worker knows of it too
    assert all_serve(gateway)
    assert {ask(gateway).status for _ in range(20)} == {503}
    gateway.http.post(f"/admin/v1/replicas/{replica_id}/undrain", headers={"authorization": f"Bearer {ADMIN}"})
    assert {ask(gateway).status for _ in range(20)} == {200}


def test_a_reload_reaches_every_worker_and_cuts_no_stream(
    start: Start, engine: Engine, redis: Redis, reach: Reach
) -> None:
    release = held_back(engine)
    gateway = start(config(engine, redis))
    assert all_serve(gateway)
    answers = streams(reach(gateway))
    entry = [replica(engine)]
    gateway.configure(config(engine, redis, models={"m": entry, "new": entry}))
    fresh = reach(gateway)
    for wire in fresh.values():  # all of them, as soon as the reload is answered
        assert wire.ask("POST", "/v1/chat/completions", chat("new"), key=KEY).rest().status == 200
    gateway.write(config(engine, redis) | {"nonsense": 1})
    refused = gateway.reload()
    assert refused.status_code == 400 and "nonsense" in refused.json()["error"]["message"]
    for wire in fresh.values():
        assert wire.ask("POST", "/v1/chat/completions", chat("new"), key=KEY).rest().status == 200
    gateway.write(config(engine, redis))
    gateway.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: ask(gateway, chat("new")).status == 404)
    release.set()
    assert [answer.rest().text() for answer in answers.values()] == ["before after"] * WORKERS
    assert gateway.metric("sekisho_config_reloads_total", result="failure") >= 1


def test_stopping_lets_streams_of_all_workers_finish(
    start: Start, engine: Engine, redis: Redis, reach: Reach
) -> None:
    release = held_back(engine)
    gateway = start(config(engine, redis))
    assert all_serve(gateway)
    answers = streams(reach(gateway))
    gateway.terminate()
    assert eventually(lambda: gateway.log().count("stopping:") == WORKERS)
    release.set()
    assert [answer.rest().text() for answer in answers.values()] == ["before after"] * WORKERS
    assert gateway.wait() == 0
    assert "Traceback" not in gateway.log()


def test_workers_do_not_outlive_their_supervisor(start: Start, engine: Engine, redis: Redis) -> None:
    gateway = start(config(engine, redis, workers=2))
    assert all_serve(gateway, 2)
    workers = processes(gateway)
    gateway.process.kill()
    _, left = psutil.wait_procs(workers, timeout=20)
    assert not left


def test_a_worker_that_hangs_still_counts(start: Start, engine: Engine, redis: Redis, reach: Reach) -> None:
    """A stopped process answers nothing: what it has counted is shown all the same."""
    gateway = start(config(engine, redis, workers=2))
    assert all_serve(gateway, 2)
    wires = reach(gateway)
    for wire in wires.values():
        assert wire.ask("POST", "/v1/chat/completions", chat(), key=KEY).rest().status == 200
    frozen, other = wires
    totals = Totals(gateway)
    totals.read(wires[other])
    os.kill(frozen, signal.SIGSTOP)
    try:
        totals.read(wires[other])
        assert totals.answered == 2
    finally:
        os.kill(frozen, signal.SIGCONT)


def test_access_lines_of_all_workers_are_whole(start: Start, engine: Engine, redis: Redis) -> None:
    gateway = start(config(engine, redis))
    assert all_serve(gateway)
    for _ in range(10):
        together([lambda: ask(gateway)] * 20)
    assert eventually(lambda: sum(line["event"] == "request" for line in gateway.access_lines()) == 200)


def test_a_start_that_cannot_work_ends_with_one_line(tmp_path: Path, engine: Engine, redis: Redis) -> None:
    file = tmp_path / "gateway.yaml"
    wrong = config(engine, redis, workers=2, state={"database": "postgresql://nobody:wrong@127.0.0.1:1/none"})
    wrong["server"]["port"] = free_port()
    wrong["state"]["database"] = f"sqlite:///{tmp_path}/no/such/folder/x.db"
    file.write_text(json.dumps(wrong))
    ended = subprocess.run(
        [sys.executable, "-m", "gateway", "serve", "--config", str(file)], cwd=ROOT, capture_output=True, timeout=60,
        text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert re.search(r"(?m)^[^{].*database", ended.stderr), ended.stderr


def test_a_taken_port_is_noticed_although_workers_share_theirs(start: Start, engine: Engine, redis: Redis) -> None:
    gateway = start(config(engine, redis, workers=2))
    ended = subprocess.run(
        [sys.executable, "-m", "gateway", "serve", "--config", str(gateway.config_file), "--port", str(gateway.port)],
        cwd=ROOT, capture_output=True, timeout=60, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 2 and "is taken" in ended.stderr
