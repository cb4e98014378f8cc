"""A gateway for hostile input: short time limits, an engine double, and a look at its health after every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.e2e.harness import Gateway, Lab, base_config

# The same cases in every run: what breaks here breaks for everybody, and a new find becomes an @example.
settings.register_profile(
    "fuzz", derandomize=True, database=None, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
)

SERVER = {
    "header_timeout": "300ms",
    "body_timeout": "300ms",
    "idle_timeout": "300ms",
    "max_body": "64KiB",
    "max_header": "16KiB",
    "public_docs": True,
}


@pytest.fixture(scope="session")
def fuzzed_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path_factory.mktemp("fuzzed"), base_config({}, [], server=SERVER))
    yield gateway
    alive = gateway.process.poll() is None
    gateway.terminate()
    assert alive and gateway.wait() == 0
    gateway.stop()
    assert "Traceback" not in gateway.log(), gateway.log()[-8000:]


@pytest.fixture
def lab(fuzzed_gateway: Gateway) -> Iterator[Lab]:
    lab = Lab(fuzzed_gateway)
    yield lab
    assert fuzzed_gateway.process.poll() is None, fuzzed_gateway.log()[-8000:]
    assert lab.at_rest(), "a request was never let go"
    lab.close()
