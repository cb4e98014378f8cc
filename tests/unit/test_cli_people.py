"""`sekisho keys`, `tenants`, `usage` and `audit` on a database of their own: what they do, print and end with."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import load
from gateway.config.access import KeyConfig
from gateway.keys import digest
from tests.command_line import Run, runner
from tests.e2e.harness import free_port

KEY = re.compile(r"sk-[A-Za-z0-9_-]{48}")
OPTIONS = ("--expires", "--role", "--name", "--model", "--allow-from", "--requests", "--budget", "--concurrency")
CONFIG = "tenants: [{name: written, keys: [{name: ci, sha256: '%s'}]}]\n" % digest("sk-x")  # noqa: UP031


@pytest.fixture(name="run")
def _run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in a folder that holds only an empty configuration; gives exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SEKISHO_CONFIG", raising=False)
    monkeypatch.delenv("SEKISHO_ADMIN_KEY", raising=False)
    (tmp_path / "gateway.yaml").write_text("{}\n")
    return runner(capsys)


def good(run: Run, *args: str) -> str:
    code, out, err = run(*args)
    assert code == 0, err
    return out


def asked(run: Run, *args: str) -> Any:
    return json.loads(good(run, *args, "--json"))


def entries(run: Run) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = asked(run, "audit", "list", "--order", "asc")["data"]
    return found


def rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(sql).fetchall()


# --- keys
def test_the_first_key_of_a_fresh_machine_needs_one_command(run: Run, tmp_path: Path) -> None:
    code, out, err = run("keys", "create", "--tenant", "ops", "--role", "admin")
    key = out.rstrip("\n")
    assert code == 0 and KEY.fullmatch(key) and key not in err and "Created the tenant ops" in err
    (one,) = asked(run, "keys", "list")["data"]
    assert (one["tenant"], one["role"], one["source"]) == ("ops", "admin", "database")
    ((stored,),) = rows(tmp_path / "sekisho.db", "SELECT digest FROM keys")
    assert digest(key) == (stored.hex() if isinstance(stored, bytes) else stored)


def test_a_later_tenant_that_does_not_exist_is_taken_for_a_mistake(run: Run) -> None:
    good(run, "keys", "create", "--tenant", "ops")
    code, out, err = run("keys", "create", "--tenant", "osp")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "`sekisho tenants create osp`" in err and "--create-tenant" in err
    good(run, "keys", "create", "--tenant", "osp", "--create-tenant")
    assert [one["name"] for one in asked(run, "tenants", "list")["data"]] == ["ops", "osp"]


def test_a_tenant_of_the_configuration_is_known(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text(CONFIG)
    good(run, "keys", "create", "--tenant", "written", "--name", "more")
    assert run("keys", "create", "--tenant", "writen")[0] == 2
    assert [(one["name"], one["source"]) for one in asked(run, "keys", "list", "--tenant", "written")["data"]] == [
        ("ci", "file"), ("more", "database")]  # fmt: skip
    code, _, err = run("keys", "revoke", "written/ci")
    assert code == 2 and "configuration file" in err


def test_every_option_of_a_new_key_counts(run: Run) -> None:
    before = time.time()
    made = asked(
        run, "keys", "create", "--tenant", "t", "--name", "ci", "--role", "operator", "--model", "a*", "--model", "b",
        "--requests", "10/s", "--requests", "600/min", "--tokens", "5/min", "--budget", "9/day", "--concurrency", "3",
        "--allow-from", "10.0.0.0/8", "--allow-from", "::1", "--expires", "90d",
    )  # fmt: skip
    assert KEY.fullmatch(made["key"])
    assert (made["name"], made["role"], made["models"]) == ("ci", "operator", ["a*", "b"])
    assert made["limits"] == {
        "requests": ["10/s", "600/min"], "tokens": ["5/min"], "token_budget": ["9/day"], "concurrency": 3}  # fmt: skip
    assert made["allow_from"] == ["10.0.0.0/8", "::1/128"]
    ends = datetime.fromisoformat(made["expires_at"]).timestamp() - 90 * 86400
    assert int(before) <= ends <= time.time()


@pytest.mark.parametrize("when", ["2100-01-31", "2100-01-31T00:00:00Z", "4105036800"])
def test_an_end_may_be_a_date_or_a_time(run: Run, when: str) -> None:
    made = asked(run, "keys", "create", "--tenant", "t", "--expires", when)
    assert made["expires_at"] == "2100-01-31T00:00:00Z"


def test_the_life_of_a_key(run: Run) -> None:
    identity = asked(run, "keys", "create", "--tenant", "t", "--name", "ci", "--requests", "5/s")["id"]
    changed = asked(run, "keys", "update", identity, "--role", "operator", "--concurrency", "2")
    assert changed["limits"]["requests"] == ["5/s"] and changed["limits"]["concurrency"] == 2
    cleared = asked(run, "keys", "update", identity, "--requests", "none", "--concurrency", "none")
    assert cleared["limits"] == {"requests": [], "tokens": [], "token_budget": [], "concurrency": None}
    assert asked(run, "keys", "show", identity) == cleared
    fresh = asked(run, "keys", "rotate", identity, "--overlap", "0s", "--expires", "1d")
    assert fresh["rotated_from"] == identity and KEY.fullmatch(fresh["key"]) and fresh["role"] == "operator"
    old = datetime.fromisoformat(asked(run, "keys", "show", identity)["expires_at"])
    assert old <= datetime.now(UTC)
    assert asked(run, "keys", "revoke", fresh["id"])["revoked_at"]
    assert [one["id"] for one in asked(run, "keys", "list")["data"]] == [identity]
    assert len(asked(run, "keys", "list", "--revoked")["data"]) == 2


def test_what_was_narrowed_can_be_widened_again(run: Run) -> None:
    narrow = ("--model", "a", "--allow-from", "::1", "--expires", "1d")
    identity = asked(run, "keys", "create", "--tenant", "t", *narrow)["id"]
    wide = asked(run, "keys", "update", identity, "--model", "none", "--allow-from", "none", "--expires", "none")
    assert (wide["models"], wide["allow_from"], wide["expires_at"]) == (None, [], None)


def test_a_rotated_key_is_printed_alone_for_scripts(run: Run) -> None:
    identity = asked(run, "keys", "create", "--tenant", "t")["id"]
    code, out, err = run("keys", "rotate", identity)
    assert code == 0 and KEY.fullmatch(out.rstrip("\n")) and out.strip() not in err and "shown only now" in err


def test_tables_are_whole_and_hold_no_secret(run: Run) -> None:
    secret = good(run, "keys", "create", "--tenant", "t", "--name", "a-rather-long-name", "--requests", "5/s").strip()
    out = good(run, "keys", "list") + good(run, "audit", "list") + good(run, "tenants", "list")
    for text in ("a-rather-long-name", "5/s requests", "key.create", "tenant.create", "database"):
        assert text in out
    assert secret not in out and secret[3:11] not in out and digest(secret)[:8] not in out


# --- the line for the file
def test_a_printed_line_carries_all_options_and_touches_no_database(run: Run, tmp_path: Path) -> None:
    out = good(
        run, "keys", "create", "--print", "--name", "ci", "--role", "operator", "--model", "a*", "--requests", "5/s",
        "--concurrency", "3", "--allow-from", "10.0.0.0/8", "--expires", "2100-01-01",
    )  # fmt: skip
    key, line = out.splitlines()
    (entry,) = yaml.safe_load(line)
    read = KeyConfig.model_validate(entry)
    assert (read.sha256, read.role, read.models) == (digest(key), "operator", ("a*",))
    assert (str(read.limits.requests[0]), read.limits.concurrency) == ("5/s", 3)
    assert (str(read.allow_from[0]), read.expires) == ("10.0.0.0/8", datetime(2100, 1, 1, tzinfo=UTC))
    assert not (tmp_path / "sekisho.db").exists()
    config = tmp_path / "whole.yaml"
    config.write_text(f"tenants:\n  - name: t\n    keys:\n      {line}\n")
    assert load(config, kinds=()).tenants[0].keys == (read,)


@pytest.mark.parametrize("wrong", [("--role", "root"), ("--model", "[a"), ("--requests", "many"), ("--tenant", "a b")])
def test_a_wrong_option_prints_no_line(run: Run, wrong: tuple[str, str]) -> None:
    code, out, err = run("keys", "create", "--print", *wrong)
    assert (code, out) == (2, "") and err.count("\n") == 1


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("more", [(), ("--print",)])
def test_an_empty_option_is_refused_and_not_taken_for_none(run: Run, option: str, more: tuple[str, ...]) -> None:
    """As when a script's variable is unset: the key would be open to more than was meant."""
    good(run, "tenants", "create", "t")
    code, out, err = run("keys", "create", "--tenant", "t", option, "", *more)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert asked(run, "keys", "list")["data"] == []


# --- tenants
def test_the_life_of_a_tenant(run: Run) -> None:
    made = asked(run, "tenants", "create", "t", "--model", "a*", "--requests", "600/min", "--weight", "2.5")
    assert (made["models"], made["limits"]["requests"], made["weight"]) == (["a*"], ["600/min"], 2.5)
    changed = asked(run, "tenants", "update", "t", "--tokens", "5/min", "--priority", "-3")
    assert changed["limits"]["requests"] == ["600/min"] and changed["limits"]["tokens"] == ["5/min"]
    assert (changed["priority"], changed["models"]) == (-3, ["a*"])
    identity = asked(run, "keys", "create", "--tenant", "t")["id"]
    assert "revoked its keys" in good(run, "tenants", "delete", "t")
    assert asked(run, "keys", "show", identity)["revoked_at"] and asked(run, "tenants", "list")["data"] == []


# --- reports
def test_usage_of_nothing_is_a_header_or_an_empty_table(run: Run) -> None:
    (header,) = csv.reader(io.StringIO(good(run, "usage", "--csv", "--group-by", "tenant,day")))
    assert header[:3] == ["tenant", "day", "requests"]
    assert good(run, "usage") == ""
    assert asked(run, "usage", "--group-by", "")["data"][0]["requests"] == 0


def test_the_trail_names_the_user_of_this_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "mallory")
    good(run, "tenants", "create", "t")
    good(run, "tenants", "update", "t", "--weight", "3")
    assert [(one["actor"], one["address"], one["action"]) for one in entries(run)] == [
        ("cli:mallory", "", "tenant.create"), ("cli:mallory", "", "tenant.update")]  # fmt: skip
    assert "weight: 1.0 -> 3.0" in good(run, "audit", "list")


def test_a_broken_trail_ends_with_1(run: Run, tmp_path: Path) -> None:
    for name in ("a", "b"):
        good(run, "tenants", "create", name)
    out = good(run, "audit", "verify")
    head = out.split()[-1]
    assert out == f"unbroken: 2 entries, head {head}\n" and entries(run)[-1]["hash"] == head
    assert run("audit", "verify", "--expect", entries(run)[0]["hash"])[0] == 0
    assert run("audit", "verify", "--expect", "0" * 64)[0] == 1
    with closing(sqlite3.connect(tmp_path / "sekisho.db")) as database:
        for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            database.execute(f'DROP TRIGGER "{name}"')
        database.execute("UPDATE audit SET actor = 'nobody' WHERE seq = 1")
        database.commit()
    code, out, err = run("audit", "verify")
    assert (code, out) == (1, "") and err.startswith("broken: ") and err.count("\n") == 1
    code, out, _ = run("audit", "verify", "--json")
    assert code == 1 and json.loads(out)["broken_at"] == 1


# --- where the records are
def test_a_database_may_be_named_without_a_configuration(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").unlink()
    assert run("keys", "list")[0] == 2
    url = f"sqlite:///{tmp_path}/other.db"
    good(run, "keys", "create", "--tenant", "t", "--database", url)
    assert len(asked(run, "keys", "list", "--database", url)["data"]) == 1
    assert (tmp_path / "other.db").exists() and not (tmp_path / "sekisho.db").exists()


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("keys", "create"), 2),
        (("keys", "create", "--tenant", "a b"), 2),
        (("keys", "create", "--tenant", "t", "--create-tenant", "--role", "root"), 2),
        (("keys", "create", "--tenant", "t", "--create-tenant", "--expires", "soon"), 2),
        (("keys", "create", "--tenant", "t", "--create-tenant", "--expires", "1e999d"), 2),
        (("keys", "create", "--tenant", "t", "--create-tenant", "--expires", "99999999999999999999d"), 2),
        (("keys", "rotate", "key_0123456789abcdef"), 2),
        (("keys", "show", "nobody"), 2),
        (("keys", "update", "key_0123456789abcdef"), 2),
        (("tenants", "create", "a b"), 2),
        (("tenants", "create", "t", "--weight", "heavy"), 2),
        (("tenants", "delete", "t"), 2),
        (("tenants", "update", "t", "--requests", "5/s"), 2),
        (("usage", "--from", "yesterday"), 2),
        (("usage", "--group-by", "colour"), 2),
        (("audit", "list", "--order", "up"), 2),
        (("audit", "verify", "--expect", "abc"), 2),
        (("keys", "list", "--database", "mysql://u:hunter22@h/x"), 2),
        (("keys", "list", "--database", "sqlite:///:memory:"), 2),
        (("keys", "list", "--database", "sqlite:////nowhere/at/all.db"), 2),
        (("keys", "list", "--database", "postgresql://u:hunter22@127.0.0.1:1/x"), 1),
        (("keys", "list", "--config", "nowhere.yaml"), 2),
        (("keys", "list", "--url", "http://127.0.0.1:1"), 2),
        (("keys", "list", "--url", "http://u:hunter22@127.0.0.1:1"), 2),
        (("keys", "list", "--url", "127.0.0.1:1"), 2),
        (("keys", "list", "--url", "http://127.0.0.1:1", "--config", "gateway.yaml"), 2),
        (("keys", "list", "--url", "http://127.0.0.1:1", "--key-file", "nowhere"), 2),
        (("keys", "list", "--key-file", "nowhere"), 2),
    ],
)
def test_what_goes_wrong_is_one_line(run: Run, args: tuple[str, ...], code: int) -> None:
    ended, out, err = run(*args)
    assert (ended, out) == (code, "") and err.count("\n") == 1 and len(err) > 20, err
    assert "hunter22" not in err


def test_a_configuration_without_a_database_has_no_keys_to_manage(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text("state: {database: null}\n")
    code, _, err = run("keys", "list")
    assert code == 2 and "--database" in err


def test_a_key_pasted_as_an_id_is_not_repeated(run: Run) -> None:
    secret = good(run, "keys", "create", "--tenant", "t").strip()
    code, out, err = run("keys", "revoke", secret)
    assert code == 2 and "its id" in err and secret[3:11] not in out + err


# --- another program at the other end
class Stranger:
    """A server that is no gateway."""

    def __init__(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.paths: list[str] = []
        paths = self.paths

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                paths.append(self.path)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(name="stranger")
def _stranger() -> Iterator[Callable[..., Stranger]]:
    made: list[Stranger] = []

    def one(status: int, body: bytes, **headers: str) -> Stranger:
        made.append(Stranger(status, body, headers))
        return made[-1]

    yield one
    for stranger in made:
        stranger.close()


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b"<html>hello"), (200, b"[]"), (200, b'"x"'), (404, b"not here"), (500, b'{"error": "x"}'),
     (502, b'{"error": {}}'), (401, b'{"detail": "no"}'), (204, b"")],
)  # fmt: skip
def test_what_is_no_gateway_is_called_so(
    run: Run, stranger: Callable[..., Stranger], monkeypatch: pytest.MonkeyPatch, status: int, body: bytes
) -> None:
    monkeypatch.setenv("SEKISHO_ADMIN_KEY", "sk-secret" + "s" * 42)
    server = stranger(status, body)
    code, out, err = run("keys", "list", "--url", server.url)
    assert (code, out) == (1, "") and err.count("\n") == 1 and "no Sekisho gateway" in err
    assert server.paths == ["/admin/v1/keys"]


def test_a_redirect_does_not_carry_the_key_away(
    run: Run, stranger: Callable[..., Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEKISHO_ADMIN_KEY", "sk-secret" + "s" * 42)
    elsewhere = stranger(200, b'{"data": []}')
    assert run("keys", "list", "--url", stranger(307, b"", location=elsewhere.url).url)[0] == 1
    assert elsewhere.paths == []


def test_nobody_at_the_other_end_is_a_failure_and_says_where(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = free_port()
    key = tmp_path / "key"
    key.write_text("sk-secret" + "s" * 42 + "\n")
    code, out, err = run("keys", "list", "--url", f"http://127.0.0.1:{port}", "--key-file", str(key))
    assert (code, out) == (1, "") and err.count("\n") == 1 and f"127.0.0.1:{port}" in err and "sk-" not in err


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"\xff\xfe", b"a\x00b"])
def test_a_file_that_holds_no_key_is_refused_unread(run: Run, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    code, _, err = run("keys", "list", "--url", "http://127.0.0.1:1", "--key-file", str(tmp_path / "key"))
    assert code == 2 and err.count("\n") == 1 and "words" not in err


def test_there_is_no_way_to_put_the_admin_key_on_the_command_line(run: Run) -> None:
    for command in (("keys", "list"), ("tenants", "create"), ("usage",), ("audit", "verify")):
        options = re.findall(r"--[a-z-]+", good(run, *command, "--help"))
        assert "--key-file" in options and not {"--api-key", "--admin-key", "--token"} & {*options}




# --- tools of tenants
def test_tools_of_a_tenant_from_the_command_line(run: Run) -> None:
    def tools() -> Any:
        (one,) = [one for one in asked(run, "tenants", "list")["data"] if one["name"] == "shop"]
        return one["tools"]

    lists = ("--allow-tools", "get_*", "--allow-tools", "put_*", "--deny-tools", "get_all")
    good(run, "tenants", "create", "shop", *lists, "--tool-violation", "strip")
    strict = {"allow": ["get_*", "put_*"], "deny": ["get_all"], "types": ["*"], "on_violation": "strip"}
    assert tools() == strict
    table = good(run, "tenants", "list")
    assert all(word in table for word in ("get_*, put_*", "not get_all", "strip"))
    good(run, "tenants", "update", "shop", "--weight", "2")
    assert tools() == strict
    good(run, "tenants", "update", "shop", "--tool-types", "function", "--deny-tools", "none")
    assert tools() == strict | {"types": ["function"], "deny": []}
    good(run, "tenants", "update", "shop", "--allow-tools", "none", "--tool-violation", "refuse")
    assert tools()["allow"] == [] and "none" in good(run, "tenants", "list")
    before, after = entries(run)[-1]["before"]["tools"], entries(run)[-1]["after"]["tools"]
    assert (before["on_violation"], before["allow"]) == ("strip", ["get_*", "put_*"])
    assert after == {"allow": [], "types": ["function"]}
    code, _, err = run("tenants", "update", "shop", "--tool-violation", "ignore")
    assert code == 2 and err.count("\n") == 1 and "strip" in err
