"""Fixtures: the fleet of real engines, each started by the first test that asks for it and stopped at the end."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.engines.real import KEY, KINDS, Fleet, RealEngine


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("engines"))
    yield fleet
    fleet.stop()
    assert "Traceback" not in fleet.gateway.log(), fleet.gateway.log()[-5000:]


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> RealEngine:
    """The engine a test is parametrised with; skips with the reason where it is not installed."""
    if (why := KINDS[request.param].missing()) is not None:
        pytest.skip(why)
    fleet: Fleet = request.getfixturevalue("fleet")
    return fleet.get(request.param)


@pytest.fixture
def sdk(fleet: Fleet) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{fleet.gateway.port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client
