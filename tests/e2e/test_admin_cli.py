"""The command line on a database and through a gateway: the same commands do, print and end with the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import Run, runner
from tests.doubles.engine import Engine
from tests.e2e.harness import ADMIN, Gateway, base_config, digest, eventually, replica
from tests.e2e.test_admin import Office

Start = Callable[..., Gateway]
OPERATOR = "sk-operator" + "o" * 40
SCENARIO: list[tuple[str, ...]] = [  # {key} is the last id that was seen
    ("tenants", "create", "t", "--model", "m", "--requests", "600/min", "--json"),
    ("tenants", "create", "t"),
    ("tenants", "update", "t", "--tokens", "5/min", "--json"),
    ("tenants", "list", "--json"),
    ("keys", "create", "--tenant", "nowhere"),
    ("keys", "create", "--tenant", "t", "--name", "ci", "--allow-from", "127.0.0.1", "--json"),
    ("keys", "create", "--tenant", "t", "--name", "ci"),
    ("keys", "create", "--tenant", "t", "--role", "root"),
    ("keys", "update", "{key}", "--concurrency", "3", "--json"),
    ("keys", "show", "{key}", "--json"),
    ("keys", "rotate", "{key}", "--overlap", "1h", "--json"),
    ("keys", "rotate", "{key}", "--overlap", "soon"),
    ("keys", "list", "--tenant", "t"),
    ("keys", "list", "--tenant", "t", "--json"),
    ("keys", "revoke", "{key}", "--json"),
    ("keys", "revoke", "key_0123456789abcdef"),
    ("keys", "revoke", "operators/root"),
    ("keys", "show", "../tenants"),
    ("keys", "list", "--revoked", "--json"),
    ("usage", "--group-by", "tenant", "--csv"),
    ("usage", "--from", "2030-01-01", "--to", "2031-01-01", "--json"),
    ("usage", "--group-by", "colour"),
    ("audit", "list", "--order", "asc", "--json"),
    ("audit", "list", "--limit", "2", "--json"),
    ("audit", "verify", "--expect", "0" * 64),
    ("tenants", "delete", "operators"),
    ("tenants", "delete", "t"),
    ("tenants", "delete", "t"),
]
_VARIES = [  # what two runs cannot have in common
    (r"key_[A-Za-z0-9_-]{16}", "ID"), (r"sk-[A-Za-z0-9_-]{48}", "KEY"), (r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME"),
    (r'"?\b\d{10}\.\d+"?', "SECONDS"), (r"\b[0-9a-f]{64}\b", "HASH"), (r"cli:\w+|operators/root", "ACTOR"),
    (r'"address": "127\.0\.0\.1"', '"address": ""'),
]  # fmt: skip


@pytest.fixture(name="run")
def _run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("SEKISHO_ADMIN_KEY", ADMIN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("SEKISHO_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    return runner(capsys)


def play(run: Run, where: tuple[str, ...]) -> list[tuple[tuple[str, ...], int, str, str]]:
    key, played = "", []
    for step in SCENARIO:
        code, out, err = run(*(part.replace("{key}", key) for part in step), *where)
        if "--json" in step and '"object": "key"' in out and '"list"' not in out:
            key = json.loads(out)["id"]
        texts = [out, err]
        for pattern, word in _VARIES:
            texts = [re.sub(pattern, word, text) for text in texts]
        played.append((step, code, *texts))
    return played


def test_commands_do_the_same_on_a_database_and_through_a_gateway(run: Run, start: Start, tmp_path: Path) -> None:
    with Engine() as engine:
        gateway = start(base_config({"m": [replica(engine)]}, []))
        config = tmp_path / "gateway.yaml"
        config.write_text(json.dumps(base_config({"m": [replica(engine)]}, [])))
        direct = play(run, ("--config", str(config)))
        remote = play(run, ("--url", f"http://127.0.0.1:{gateway.port}"))
    assert [step[1] for step in direct] == [
        0, 2, 0, 0, 2, 0, 2, 2, 0, 0, 0, 2, 0, 0, 0, 2, 2, 2, 0, 0, 0, 2, 0, 0, 1, 2, 0, 2]  # fmt: skip
    for one, other in zip(direct, remote, strict=True):
        assert one == other


def test_keys_made_on_the_database_work_at_a_gateway_that_runs(run: Run, start: Start) -> None:
    with Engine() as engine:
        gateway = start(base_config({"m": [replica(engine)]}, []))
        office = Office(gateway)
        config = ("--config", str(gateway.config_file))
        code, out, _ = run("keys", "create", "--tenant", "ops", "--role", "admin", "--create-tenant", *config)
        key = out.strip()
        assert code == 0 and eventually(lambda: office.status(key) == 200, 5)
        made = json.loads(run("keys", "list", "--tenant", "ops", "--json", *config)[1])["data"][0]
        assert office.good("GET", f"/keys/{made['id']}", key=key)["name"] == made["name"]
        assert run("keys", "revoke", made["id"], *config)[0] == 0
        assert eventually(lambda: office.status(key) == 401, 5)
        assert office.good("GET", "/audit/verify")["ok"]


def test_what_the_gateway_refuses_ends_with_2_in_its_own_words(
    run: Run, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = {"name": "ops", "keys": [{"name": "o", "sha256": digest(OPERATOR), "role": "operator"}]}
    gateway = start(base_config({}, [operator]))
    url = ("--url", f"http://127.0.0.1:{gateway.port}/v1/")
    own = json.loads(run("keys", "create", "--tenant", "ops", "--role", "admin", "--json", *url)[1])
    (tmp_path / "key").write_text(own["key"] + "\n")
    mine = (*url, "--key-file", str(tmp_path / "key"))
    code, out, err = run("keys", "revoke", own["id"], *mine)
    assert (code, out) == (2, "") and "the key you are using" in err
    assert run("keys", "revoke", own["id"], "--force", *mine)[0] == 0
    code, out, err = run("keys", "list", *mine)
    assert (code, out) == (2, "") and "Incorrect API key" in err and err.count("\n") == 1
    monkeypatch.setenv("SEKISHO_ADMIN_KEY", OPERATOR)
    assert run("keys", "list", *url)[0] == 0
    code, _, err = run("tenants", "create", "t", *url)
    assert code == 2 and "admin role" in err


def test_no_key_reaches_the_log_of_the_gateway_or_the_screen(run: Run, start: Start) -> None:
    gateway = start(base_config({}, []), args=("--log-level", "debug"))
    url = ("--url", f"http://127.0.0.1:{gateway.port}")
    key = run("keys", "create", "--tenant", "operators", *url)[1].strip()
    commands = ("keys", "list"), ("audit", "list"), ("keys", "revoke", key)
    shown = [run(*command, *url) for command in commands]
    whole = gateway.log() + repr(shown)
    assert "key.create" in whole and not [at for at in range(3, 43) if key[at : at + 8] in whole]
