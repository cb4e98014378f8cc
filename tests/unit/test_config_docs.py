"""docs/configuration.md: made from the models, and true to them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gateway.config import Config, LoggingConfig, RoutingConfig, ServerConfig, StateConfig, TlsConfig
from gateway.config.checks import RESTART_ONLY, SWITCHED_BY_RESTART, stays
from gateway.config.docs import INTRODUCTION, default_forms, page
from gateway.config.shape import shape_of

ROOT = Path(__file__).resolve().parents[2]
STORED = (ROOT / "docs" / "configuration.md").read_text("utf-8")


def fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        yield f"{path}{name}", info
        shape = shape_of(info.annotation)
        inner = shape.model or (shape_of(shape.item).model if shape.kind == "list" else None)
        if inner is not None:
            yield from fields(inner, f"{path}{name}.")


FIELDS = list(fields(Config))


def test_the_page_is_current() -> None:
    assert page(INTRODUCTION.read_text("utf-8")) == STORED, "run `make schema`"


def test_every_key_has_a_row() -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", STORED, re.MULTILINE))
    assert rows == {path.rpartition(".")[2] for path, info in FIELDS if "." in path}


@pytest.mark.parametrize(("path", "info"), FIELDS, ids=[path for path, _ in FIELDS])
def test_a_description_says_the_default_that_holds(path: str, info: FieldInfo) -> None:
    said = str(info.description)
    if info.is_required():
        assert "Required" in said
    elif forms := list(default_forms(info)):
        patterns = [rf"(?i)\bdefault {re.escape(form)}(?!\w)|\b{re.escape(form)} \(default\)" for form in forms]
        assert any(re.search(one, said) for one in patterns), f"{path}: the default is {forms[-1]}"
    else:
        assert "Default" in said


def test_a_row() -> None:
    assert "| `max_body` | size | Largest request body. Default `32MiB`; a larger one is a 413. |" in STORED
    assert "| `port` | whole number, 1 to 65535 | TCP port to listen on. Default `8080`. *Restart.* |" in STORED
    assert "| `requests` | rate, or a list of rates |" in STORED
    assert "| `tls` | [`server.tls`](#section-servertls), or `null` |" in STORED
    assert STORED.count("### Section `tenants[].limits`") == 1  # and the other places of limits lead there


def test_the_introduction_names_what_needs_a_restart() -> None:
    told = INTRODUCTION.read_text("utf-8").partition("only with a restart:")[2].partition("##")[0]
    for path in (*RESTART_ONLY, *SWITCHED_BY_RESTART):
        assert f"`{path}`" in told


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (Config(), []),
        (Config(routing=RoutingConfig(retry_budget=0.5)), []),
        (Config(server=ServerConfig(port=9)), ["server.port changes only with a restart"]),
        (Config(state=StateConfig(redis="redis://h")), ["state changes only with a restart"]),
        (
            Config(logging=LoggingConfig(level="debug", format="text")),
            ["logging.format changes only with a restart", "logging.level changes only with a restart"],
        ),
        (
            Config(server=ServerConfig(tls=TlsConfig(cert_file="c", key_file="k"))),
            ["server.tls is switched on or off only with a restart"],
        ),
    ],
)
def test_a_reload_says_what_stays(changed: Config, told: list[str]) -> None:
    assert list(stays(Config(), changed)) == told


def test_other_files_of_tls_are_taken_over() -> None:
    old, new = (Config(server=ServerConfig(tls=TlsConfig(cert_file=name, key_file="k"))) for name in ("a", "b"))
    assert list(stays(old, new)) == []
