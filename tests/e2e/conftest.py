"""Fixtures: one gateway process for most tests, and the laboratory around it. Logs are shown with a failed test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import Certificates, Engine
from tests.e2e.harness import Gateway, Lab, base_config
from tests.servers.redis import Redis

LINES_SHOWN = 40
_running: list[Gateway] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.failed and call.when == "call":
        for gateway in _running:
            lines = gateway.log().splitlines()[-LINES_SHOWN:]
            report.sections.append((f"gateway on port {gateway.port}", "\n".join(lines)))
    return report


@pytest.fixture(scope="session")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that is configured anew by every test that uses it."""
    gateway = Gateway(tmp_path_factory.mktemp("gateway"), base_config({}, []))
    _running.append(gateway)
    yield gateway
    gateway.stop()
    _running.remove(gateway)
    # An exception nobody foresaw is a bug even where the client got a decent answer.
    assert "Traceback" not in gateway.log(), gateway.log()[-5000:]


@pytest.fixture
def lab(shared_gateway: Gateway) -> Iterator[Lab]:
    lab = Lab(shared_gateway)
    yield lab
    lab.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine("vllm")
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    """A server for a whole file; tests that disturb theirs make one of their own."""
    with Redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Gateway]]:
    """Starts gateways of the test's own, for what needs a process to itself."""
    started: list[Gateway] = []

    def one(config: dict[str, Any], **options: Any) -> Gateway:
        gateway = Gateway(tmp_path_factory.mktemp("own"), config, **options)
        started.append(gateway)
        _running.append(gateway)
        return gateway

    yield one
    for gateway in started:
        gateway.stop()
        _running.remove(gateway)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if not Certificates.available():
        pytest.skip("neither the cryptography package nor an openssl command")
    folder: Path = tmp_path_factory.mktemp("certificates")
    return Certificates(folder)
