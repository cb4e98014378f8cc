"""Messages to a service manager, over a real datagram socket."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.notify import MOST_STATUS, Notifier


class Manager:
    """The side of the service manager."""

    def __init__(self, address: str, name: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(5)
        self.name = name

    def told(self) -> list[str]:
        return self.socket.recv(4096).decode().split("\n")


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    if request.param == "file":
        made = Manager(str(tmp_path / "notify"), str(tmp_path / "notify"))
    else:
        made = Manager(f"\0sekisho-test-{os.getpid()}", f"@sekisho-test-{os.getpid()}")
    with made.socket:
        yield made


@pytest.fixture
def notifier(manager: Manager) -> Iterator[Notifier]:
    made = Notifier({"NOTIFY_SOCKET": manager.name})
    yield made
    made.close()


def test_a_life(manager: Manager, notifier: Notifier) -> None:
    notifier.ready("serves 2 models")
    assert manager.told() == ["READY=1", "STATUS=serves 2 models"]
    notifier.alive()
    assert manager.told() == ["WATCHDOG=1"]
    notifier.stopping()
    assert manager.told() == ["STOPPING=1"]


def test_a_reload_says_when(manager: Manager, notifier: Notifier) -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.reloading()
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    first, stamp = manager.told()
    assert first == "RELOADING=1"
    name, _, value = stamp.partition("=")
    assert name == "MONOTONIC_USEC" and before <= int(value) <= after


def test_a_status_is_one_line(manager: Manager, notifier: Notifier) -> None:
    notifier.ready("x\nSTOPPING=1\r\n" + "y" * 1000)
    ready, line = manager.told()
    assert ready == "READY=1"
    assert line.startswith("STATUS=x STOPPING=1 yyy") and len(line) == len("STATUS=") + MOST_STATUS
    notifier.ready(" \n")
    assert manager.told() == ["READY=1"]


@pytest.mark.parametrize("name", ["", "vsock:2:1234"])
def test_nobody_listens(name: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": name} if name else {})
    notifier.ready("serves")
    notifier.close()


def test_a_relative_name_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listener = Manager("notify", "notify")
    with listener.socket:
        Notifier({"NOTIFY_SOCKET": listener.name}).ready()
        listener.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.told()


def test_a_manager_that_has_gone(manager: Manager, notifier: Notifier) -> None:
    manager.socket.close()
    notifier.ready()
    notifier.stopping()


def test_a_manager_that_does_not_read(manager: Manager, notifier: Notifier) -> None:
    for _ in range(2000):  # more than any queue of datagrams holds: neither an error nor a wait
        notifier.alive()


def test_a_name_too_long_for_a_socket() -> None:
    notifier = Notifier({"NOTIFY_SOCKET": "/" + "x" * 500})
    notifier.ready()
    notifier.close()


def test_after_the_end(manager: Manager, notifier: Notifier) -> None:
    notifier.ready()
    assert manager.told() == ["READY=1"]
    notifier.close()
    notifier.close()
    notifier.ready()
    manager.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.told()


def test_watchdog() -> None:
    own, another = str(os.getpid()), str(os.getpid() + 1)
    assert Notifier({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": own}).watchdog_interval == 15.0
    assert Notifier({"WATCHDOG_USEC": "30000000"}).watchdog_interval == 15.0
    assert Notifier({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": another}).watchdog_interval is None
    assert Notifier({"WATCHDOG_USEC": "0"}).watchdog_interval is None
    assert Notifier({"WATCHDOG_USEC": "soon"}).watchdog_interval is None
    assert Notifier({}).watchdog_interval is None
