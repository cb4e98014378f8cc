"""What outlives the process, through the front door: stored keys, budgets and usage, also with the database down."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import Engine
from tests.e2e.harness import ADMIN, ROOT, Gateway, base_config, chat, eventually, replica
from tests.servers.postgres import Postgres

Start = Callable[..., Gateway]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine("vllm")
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    if not Postgres.available():
        pytest.skip("PostgreSQL is not installed")
    server = Postgres()
    server.start()
    yield server
    server.close()


def configuration(engine: Engine, url: str, folder: Path, **more: Any) -> dict[str, Any]:
    return base_config({"m": [replica(engine)]}, [], state={"database": url, "spool": str(folder / "spool")}, **more)


def post(gateway: Gateway, path: str, body: Any) -> dict[str, Any]:
    answer = gateway.http.post(path, json=body, headers={"authorization": f"Bearer {ADMIN}"})
    assert answer.status_code in (200, 201), answer.text
    document: dict[str, Any] = answer.json()
    return document


def new_key(gateway: Gateway, name: str = "ci", **tenant: Any) -> str:
    """A tenant `red` and a key of it, both in the database."""
    post(gateway, "/admin/v1/tenants", {"name": "red"} | tenant)
    secret: str = post(gateway, "/admin/v1/keys", {"tenant": "red", "name": name})["key"]
    return secret


def ask(gateway: Gateway, key: str, **more: Any) -> tuple[int, dict[str, Any]]:
    answer = gateway.http.post(
        "/v1/chat/completions", json=chat(**more), headers={"authorization": f"Bearer {key}"}
    )
    return answer.status_code, answer.json()


def used(gateway: Gateway) -> dict[str, Any]:
    """What the database holds of tenant `red`."""
    rows = gateway.get("/admin/v1/usage", params={"tenant": "red"}).json()["data"]
    return rows[0] if rows else {"requests": 0, "tokens": 0}


def test_a_budget_is_spent_for_good(start: Start, engine: Engine, tmp_path: Path) -> None:
    """Also over a restart, whatever the process had in memory."""
    config = configuration(engine, f"sqlite:///{tmp_path}/s.db", tmp_path)
    first = start(config)
    key = new_key(first, limits={"token_budget": "600/day"})
    spent = 0
    for _ in range(2):
        status, answer = ask(first, key, max_tokens=200)
        assert status == 200
        spent += answer["usage"]["total_tokens"]
    first.terminate()
    assert first.wait() == 0

    second = start(config)
    asked = 600 - spent + 1  # one more than is left, prompt not counted
    status, answer = ask(second, key, max_tokens=asked)
    assert status == 429 and answer["error"]["code"] == "insufficient_quota"
    assert f"{spent} used" in answer["error"]["message"]
    assert ask(second, key, max_tokens=1)[0] == 200


def test_known_keys_work_while_the_database_is_down_and_no_record_is_lost(
    start: Start, engine: Engine, tmp_path: Path, postgres: Postgres
) -> None:
    gateway = start(configuration(engine, postgres.create(), tmp_path))
    key = new_key(gateway)
    assert ask(gateway, key)[0] == 200
    postgres.stop()
    try:
        assert eventually(lambda: gateway.metric("sekisho_database_up") == 0)
        assert [ask(gateway, key)[0] for _ in range(20)] == [200] * 20
        status = gateway.get("/admin/v1/usage")
        assert status.status_code == 503 and status.json()["error"]["code"] == "store_unavailable"
        assert "retry-after" in status.headers
    finally:
        postgres.start()
    assert eventually(lambda: gateway.metric("sekisho_database_up") == 1)
    assert eventually(lambda: used(gateway)["requests"] == 21, timeout=60)
    assert gateway.metric("sekisho_usage_rows_dropped_total") == 0
    secret = post(gateway, "/admin/v1/keys", {"tenant": "red", "name": "later"})["key"]
    assert ask(gateway, secret)[0] == 200
    assert postgres.url("").split("@")[0] not in gateway.log()


def test_a_gateway_starts_while_its_database_is_down(
    start: Start, engine: Engine, tmp_path: Path, postgres: Postgres
) -> None:
    """Keys of the file work at once, those of the database as soon as it is back."""
    config = configuration(engine, postgres.create(), tmp_path)
    first = start(config)
    key = new_key(first)
    first.stop()
    postgres.stop()
    try:
        second = start(config)
        assert second.get("/v1/models").status_code == 200
        assert ask(second, key)[0] == 401
    finally:
        postgres.start()
    assert eventually(lambda: ask(second, key)[0] == 200)


def test_records_survive_a_killed_gateway(start: Start, engine: Engine, tmp_path: Path, postgres: Postgres) -> None:
    """What was acknowledged while the database was down is stored once by the next process."""
    config = configuration(engine, postgres.create(), tmp_path)
    first = start(config)
    key = new_key(first)
    postgres.stop()
    try:
        assert [ask(first, key)[0] for _ in range(7)] == [200] * 7
        assert eventually(lambda: sum(file.read_bytes().count(b"req_") for file in _segments(tmp_path)) == 7)
        first.process.kill()
        first.process.wait()
    finally:
        postgres.start()
    second = start(config)
    assert eventually(lambda: used(second)["requests"] == 7)


def _segments(folder: Path) -> list[Path]:
    return [file for file in (folder / "spool").rglob("*") if file.is_file()]


def test_a_database_that_was_put_back_counts_as_it_is(start: Start, engine: Engine, tmp_path: Path) -> None:
    """Keys made after the backup are gone from memory too."""
    file = tmp_path / "s.db"
    gateway = start(configuration(engine, f"sqlite:///{file}", tmp_path))
    old = new_key(gateway)
    with sqlite3.connect(file) as source, sqlite3.connect(tmp_path / "backup") as target:
        source.backup(target)
    source.close()
    new = post(gateway, "/admin/v1/keys", {"tenant": "red", "name": "new"})["key"]
    assert ask(gateway, new)[0] == 200
    with sqlite3.connect(tmp_path / "backup") as source, sqlite3.connect(file) as target:
        source.backup(target)
    source.close()
    target.close()
    assert eventually(lambda: ask(gateway, new)[0] == 401)
    assert ask(gateway, old)[0] == 200


def test_without_a_database_nothing_is_kept(start: Start, engine: Engine, tmp_path: Path) -> None:
    config = base_config({"m": [replica(engine)]}, [], state={"database": None})
    gateway = start(config)
    assert ask(gateway, ADMIN)[0] == 404  # the operators of the harness may use no model: known, though
    assert gateway.get("/admin/v1/keys").status_code in (200, 503)
    assert sorted(path.name for path in gateway.folder.iterdir()) == ["gateway.yaml", "stderr", "stdout"]


def test_an_unusable_database_stops_the_start_with_a_remedy(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    (tmp_path / "s.db").write_text("this is no database, and long enough to be seen as none" * 100)
    file.write_text(json.dumps({"state": {"database": "sqlite:///s.db"}}))
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "serve", "--config", str(file), "--port", "18431"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, env={**os.environ},
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert "s.db" in lines[0] and "Traceback" not in done.stderr


def test_a_change_made_on_the_command_line_reaches_a_running_gateway(
    start: Start, engine: Engine, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    gateway = start(configuration(engine, url, tmp_path))

    def sekisho(*args: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "gateway", *args, "--database", url],
            cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    sekisho("tenants", "create", "red")
    key = sekisho("keys", "create", "--tenant", "red", "--name", "ci").splitlines()[0]
    began = time.monotonic()
    assert eventually(lambda: ask(gateway, key)[0] == 200)
    sekisho("tenants", "delete", "red")
    assert eventually(lambda: ask(gateway, key)[0] == 401)
    assert time.monotonic() - began < 20
