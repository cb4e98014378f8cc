"""What /openapi.json promises, held against the gateway: schemathesis makes the requests, good and bad ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.doubles.engine import Engine
from tests.e2e.harness import ADMIN, Gateway, base_config, digest, replica
from tests.fuzz.conftest import SERVER
from tests.fuzz.test_bodies import answer_anything

KEY = "sk-schemathesis-" + "s" * 40
CASES = 15  # for each operation and kind of data
CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def schema(fuzzed_gateway: Gateway) -> Iterator[Any]:
    """The document as it is served; the key is an operator's, so that the administration is reached too."""
    with Engine(script=answer_anything) as engine:
        tenant = {
            "name": "schemathesis",
            "models": ["*"],
            "keys": [{"name": "all", "sha256": digest(KEY), "role": "admin"}],
        }
        fuzzed_gateway.configure(base_config({"m": [replica(engine)]}, [tenant], server=SERVER))
        yield schemathesis.openapi.from_url(f"http://127.0.0.1:{fuzzed_gateway.port}/openapi.json")


def run(strategy: Any, examples: int, check: Callable[[Any], None]) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def each(case: Any) -> None:
        check(case)

    each()


def operations(schema: Any) -> list[Any]:
    return [found.ok() for found in schema.get_all_operations()]


@pytest.mark.parametrize("mode", GenerationMode)
def test_answers_are_as_described(schema: Any, mode: GenerationMode) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    assert len(operations(schema)) >= 10
    for operation in operations(schema):
        if mode is GenerationMode.NEGATIVE and not (operation.body or operation.path_parameters):
            continue  # nothing of it can be wrong
        run(
            operation.as_strategy(generation_mode=mode),
            CASES,
            lambda case: case.call_and_validate(checks=CHECKS, headers=headers),
        )


def test_without_a_key_everything_but_the_open_paths_is_a_401(schema: Any) -> None:
    def check(case: Any) -> None:
        answer = case.call()
        assert (answer.status_code == 401) == (case.operation.path not in ("/health", "/ready")), case
        case.validate_response(answer, checks=CHECKS)

    for operation in operations(schema):
        run(operation.as_strategy(), 2, check)


def test_the_gateway_is_still_configured(schema: Any, fuzzed_gateway: Gateway) -> None:
    assert [entry["draining"] for entry in fuzzed_gateway.get("/admin/v1/replicas", ADMIN).json()["data"]] == [False]
