"""Fixtures: every test of the contract runs on an SQLite file and on a real PostgreSQL server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers.postgres import Postgres
from tests.store.harness import Bench, Place


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if not Postgres.available():
        pytest.skip("no PostgreSQL server is installed")
    server = Postgres()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return Place("sqlite", f"sqlite:///{tmp_path}/sekisho.db", None)
    postgres: Postgres = request.getfixturevalue("postgres")
    return Place("postgresql", postgres.create(), postgres)


@pytest.fixture
def open_bench() -> Iterator[Callable[[str], Bench]]:
    """Opens stores that are closed after the test."""
    opened: list[Bench] = []

    def one(url: str) -> Bench:
        opened.append(Bench(url))
        return opened[-1]

    yield one
    for bench in opened:
        bench.close()


@pytest.fixture
def store(place: Place, open_bench: Callable[[str], Bench]) -> Bench:
    return open_bench(place.url)
