"""Several workers on a bad day: one dies, and something else happens before it is back."""

from __future__ import annotations

import ipaddress
import resource
import signal
import ssl
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cryptography import x509

from tests.doubles.authority import Authority
from tests.doubles.engine import Engine
from tests.e2e.harness import ADMIN, Gateway, base_config, digest, eventually, replica
from tests.e2e.test_workers import KEY, Start, all_serve, ask, owner, processes
from tests.e2e.wire import Wire
from tests.servers.redis import Redis

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers share one socket")

WORKERS = 2
TRIES = 24  # connections, of which some come to every worker
SHORT = httpx.Timeout(2)


def config(engine: Engine, redis: Redis, *, keys: bool = True, **server: Any) -> dict[str, Any]:
    red = {"name": "red", "keys": [{"name": "ci", "sha256": digest(KEY)}] if keys else []}
    server = {"workers": WORKERS} | server
    return base_config({"m": [replica(engine)]}, [red], state={"redis": redis.url}, server=server)


def kill_one(gateway: Gateway) -> set[int]:
    """Pids of those there were."""
    before = processes(gateway)
    before[1].kill()
    return {process.pid for process in before}


def survivor(gateway: Gateway) -> Wire:
    """A connection to the worker that will not be killed."""
    first = processes(gateway)[:1]
    for _ in range(200):
        wire = Wire(gateway.port)
        wire.ask("GET", "/health", key=None).rest()
        if owner(wire, first) is not None:
            return wire
        wire.close()
    raise AssertionError("no connection comes to the first worker")


def has_successor(gateway: Gateway, before: set[int]) -> bool:
    """Whether there is a process in place of the one that was killed; it does not serve yet."""

    def found() -> bool:
        with suppress(psutil.NoSuchProcess):  # the killed one, while nobody has asked for its exit code
            return any(process.pid not in before for process in processes(gateway))
        return False

    return eventually(found)


def test_a_worker_that_starts_follows_what_changes_meanwhile(start: Start, engine: Engine, redis: Redis) -> None:
    gateway = start(config(engine, redis))
    assert all_serve(gateway, WORKERS)
    gateway.wait_for_replica()
    with survivor(gateway) as wire:
        assert has_successor(gateway, kill_one(gateway))
        gateway.write(config(engine, redis, keys=False))  # the key is revoked
        assert wire.ask("POST", "/admin/v1/reload", key=ADMIN).rest().status == 200
    assert all_serve(gateway, WORKERS)
    assert {ask(gateway).status for _ in range(TRIES)} == {401}


def test_a_worker_that_starts_knows_of_a_drain_meanwhile(start: Start, engine: Engine, redis: Redis) -> None:
    gateway = start(config(engine, redis))
    assert all_serve(gateway, WORKERS)
    gateway.wait_for_replica()
    replica_id = gateway.replicas()[0]["id"]
    with survivor(gateway) as wire:
        assert has_successor(gateway, kill_one(gateway))
        assert wire.ask("POST", f"/admin/v1/replicas/{replica_id}/drain", key=ADMIN).rest().status == 200
    assert all_serve(gateway, WORKERS)
    assert {ask(gateway).status for _ in range(TRIES)} == {503}


def test_a_worker_that_cannot_be_started_for_want_of_files_is_started_later(
    start: Start, engine: Engine, redis: Redis
) -> None:
    gateway = start(config(engine, redis))
    assert all_serve(gateway, WORKERS)
    supervisor = gateway.process.pid
    usual = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (5, usual[1]))  # it has more open already
    psutil.Process(processes(gateway)[1].pid).send_signal(signal.SIGKILL)
    assert eventually(lambda: "cannot be started: Too many open files" in gateway.log()), gateway.log()
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, usual)
    assert all_serve(gateway, WORKERS)
    assert {ask(gateway).status for _ in range(TRIES)} == {200}


def test_a_worker_that_cannot_start_keeps_no_connections(
    start: Start, engine: Engine, redis: Redis, tmp_path: Path
) -> None:
    """The key of the port's certificate breaks, and then a worker dies: the others have the old key, and go on."""
    authority = Authority(tmp_path, "authority")
    cert, key = authority.issue("gateway", x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    tls = {"cert_file": str(cert), "key_file": str(key)}
    trust = ssl.create_default_context(cafile=authority.ca_file)
    gateway = start(config(engine, redis, tls=tls), scheme="https", verify=trust)
    assert all_serve(gateway, WORKERS)
    whole = key.read_bytes()
    key.write_bytes(b"broken")
    kill_one(gateway)
    assert eventually(lambda: gateway.log().count("worker 1 cannot start") >= 2)

    def get() -> int:
        url = f"https://127.0.0.1:{gateway.port}/health"
        return httpx.get(url, verify=trust, timeout=SHORT, trust_env=False).status_code

    assert eventually(lambda: "starting another in 0.8 s" in gateway.log())  # after the second failed start
    assert [get() for _ in range(TRIES)] == [200] * TRIES
    key.write_bytes(whole)
    assert all_serve(gateway, WORKERS)
    assert [get() for _ in range(TRIES)] == [200] * TRIES


def test_the_file_is_watched_although_a_worker_does_not_start(
    start: Start, engine: Engine, redis: Redis, tmp_path: Path
) -> None:
    """The first one begins, and then the key of the certificate breaks, before the second one has read it."""
    authority = Authority(tmp_path, "authority")
    cert, key = authority.issue("gateway", x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    trust = ssl.create_default_context(cafile=authority.ca_file)
    tls = {"cert_file": str(cert), "key_file": str(key)}
    gateway = start(config(engine, redis, tls=tls), scheme="https", verify=trust, wait_for=None)

    def has_second() -> bool:
        with suppress(psutil.NoSuchProcess):
            return len(processes(gateway)) == WORKERS
        return False

    assert eventually(has_second)  # it takes a while to import what it needs
    key.write_bytes(b"broken")
    assert eventually(lambda: "worker 1 cannot start" in gateway.log())
    body = {"model": "m", "messages": [{"role": "user", "content": "Say hello."}]}

    def status() -> int:
        try:
            return gateway.http.post(
                "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}"}
            ).status_code
        except httpx.TransportError:  # it had come to the second one's socket
            return 0

    assert eventually(lambda: status() == 200)
    gateway.write(config(engine, redis, keys=False, tls=tls))
    assert eventually(lambda: "the changed configuration was not loaded" in gateway.log())  # for the key's sake
