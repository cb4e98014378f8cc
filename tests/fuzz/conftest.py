"""A gateway for hostile input: short time limits, an engine double, and a look at its health after every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.e2e.harness import Gateway, Lab, base_config, eventually

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


def is_at_rest(gateway: Gateway) -> bool:
    """Whether it holds no request. (By the text: the page is long after so many models.)"""
    lines = gateway.metrics_page().splitlines()
    return all(line.endswith(" 0.0") for line in lines if line.startswith("sekisho_inflight_requests{"))


@pytest.fixture
def lab(fuzzed_gateway: Gateway) -> Iterator[Lab]:
    lab = Lab(fuzzed_gateway)
    yield lab
    assert fuzzed_gateway.process.poll() is None, fuzzed_gateway.log()[-8000:]
    assert eventually(lambda: is_at_rest(fuzzed_gateway)), "a request was never let go"
    lab.close()
