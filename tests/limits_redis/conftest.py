"""One Redis for the tests that leave it alone; a new one for each test that breaks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.redis import Redis


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    with Redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(_server: Redis) -> Redis:
    _server.ask("FLUSHALL")
    return _server


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[Redis]:
    """May be stopped and paused. Forgets everything when it is restarted."""
    with Redis(tmp_path / "redis") as server:
        yield server
