"""The gateway as systemd meets it: what it says over $NOTIFY_SOCKET from its start to its end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Gateway, base_config, eventually

WATCHDOG_S = 1.0


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify"))
        made.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_S * 1e6)))
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        yield made


def told(manager: socket.socket, wanted: str) -> list[str]:
    """The next message that begins with `wanted`. Others come between: signs of life, and a file that is saved is
    noticed by itself besides the signal."""
    for _ in range(200):
        lines = manager.recv(4096).decode().split("\n")
        if lines[0] == wanted:
            return lines
    raise AssertionError(f"nobody said {wanted}")


def config(model: str) -> dict[str, Any]:
    return base_config({model: [{"backend": "vllm", "url": "http://127.0.0.1:9"}]}, [])


def test_from_start_to_end(tmp_path: Path, manager: socket.socket) -> None:
    gateway = Gateway(tmp_path, config("before"), wait_for=None)
    try:
        told(manager, "READY=1")
        assert gateway.get("/health", key=None).status_code == 200  # at once: ready means that it answers
        for _ in range(2):
            told(manager, "WATCHDOG=1")
        gateway.write(config("after"))
        os.kill(gateway.process.pid, signal.SIGHUP)
        assert told(manager, "RELOADING=1")[1].startswith("MONOTONIC_USEC=")
        told(manager, "READY=1")
        assert eventually(lambda: [entry["model"] for entry in gateway.replicas()] == ["after"])
        gateway.terminate()
        told(manager, "STOPPING=1")
        assert gateway.wait() == 0
    finally:
        gateway.stop()


def test_a_reload_that_fails_is_over_too(tmp_path: Path, manager: socket.socket) -> None:
    gateway = Gateway(tmp_path, config("m"))
    try:
        told(manager, "READY=1")
        gateway.write({"servers": {}})
        assert gateway.reload().status_code == 400
        told(manager, "RELOADING=1")
        told(manager, "READY=1")
    finally:
        gateway.stop()
