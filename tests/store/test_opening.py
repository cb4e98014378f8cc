"""Opening: an empty database gets its tables once, and whoever has to change something is told what."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from gateway.config import StartupError
from gateway.config.access import ToolsConfig
from gateway.errors import StoreUnavailable
from gateway.records import TenantRecord
from gateway.store import schema
from tests.servers.postgres import PASSWORD, Postgres
from tests.store.harness import ADMIN, Bench, Contender, Place, assert_discreet

NOBODY = 65534


def refusal(url: str) -> StartupError:
    with pytest.raises(StartupError) as raised:
        Bench(url).close()
    assert_discreet(raised)
    return raised.value


# --- the schema
def test_the_migrations_make_the_tables_that_the_code_uses(store: Bench) -> None:
    def differs(context: MigrationContext, *columns: Any) -> bool:
        found, used = columns[2:]
        return bool(found.compile(dialect=context.dialect) != used.compile(dialect=context.dialect))

    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_type": differs})
        return list(compare_metadata(context, schema.metadata))

    async def compare() -> list[object]:
        async with store.store._database.raw(writes=False) as connection:
            return await connection.run_sync(differences)

    assert store.run(compare()) == []


def test_opening_again_changes_nothing(place: Place, open_bench: Callable[[str], Bench]) -> None:
    open_bench(place.url).create_tenant(TenantRecord("acme"), ADMIN)
    before = place.dump()
    assert "acme" in before and "alembic_version" in before
    assert [tenant.name for tenant in open_bench(place.url).tenants()] == ["acme"]
    assert place.dump() == before


def test_processes_that_open_an_empty_database_together_migrate_it_once(
    place: Place, open_bench: Callable[[str], Bench]
) -> None:
    contenders = [Contender(place.url, f"process{number}", 3) for number in range(4)]
    for contender in contenders:
        contender.go()
    for contender in contenders:
        contender.finish()
    assert place.sql("SELECT version_num FROM alembic_version").split() == ["0002"]
    store = open_bench(place.url)
    assert len(store.tenants()) == store.version() == 12
    assert store.verify_audit().ok


def test_tenants_from_before_there_was_a_policy_may_use_every_tool(
    place: Place, open_bench: Callable[[str], Bench]
) -> None:
    open_bench(place.url).create_tenant(TenantRecord("acme", weight=2.0), ADMIN)
    place.sql("ALTER TABLE tenants DROP COLUMN tools")
    place.sql("UPDATE alembic_version SET version_num = '0001'")
    store = open_bench(place.url)
    (tenant,) = store.tenants()
    assert (tenant.weight, tenant.tools) == (2.0, ToolsConfig())
    tools = ToolsConfig.model_validate({"allow": ["みかん*"], "on_violation": "strip"})
    assert store.update_tenant("acme", {"tools": tools}, ADMIN).tools == tools
    assert [one.tools for one in open_bench(place.url).tenants()] == [tools]
    assert store.verify_audit().ok


def test_a_schema_of_a_newer_program_is_left_alone(place: Place, open_bench: Callable[[str], Bench]) -> None:
    open_bench(place.url)
    place.sql("UPDATE alembic_version SET version_num = '9999'")
    before = place.dump()
    assert "newer version" in str(refusal(place.url))
    assert place.dump() == before


def test_tables_of_another_program_are_left_alone(place: Place) -> None:
    place.sql("CREATE TABLE usage (x integer)")
    before = place.dump()
    assert "another program (usage)" in str(refusal(place.url))
    assert place.dump() == before


# --- SQLite
def test_a_new_file_is_for_its_owner_alone(tmp_path: Path, open_bench: Callable[[str], Bench]) -> None:
    open_bench(f"sqlite:///{tmp_path}/sekisho.db").create_tenant(TenantRecord("acme"), ADMIN)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("sekisho.db", "sekisho.db-wal", "sekisho.db-shm"), 0o600)


def test_readers_do_not_wait_for_a_writer(tmp_path: Path, open_bench: Callable[[str], Bench]) -> None:
    store = open_bench(f"sqlite:///{tmp_path}/sekisho.db")
    store.create_tenant(TenantRecord("acme"), ADMIN)
    with closing(sqlite3.connect(tmp_path / "sekisho.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("UPDATE tenants SET weight = 9")
        assert [tenant.weight for tenant in store.tenants()] == [1.0]
        other.execute("COMMIT")
    assert [tenant.weight for tenant in store.tenants()] == [9.0]


def test_names_of_files_are_taken_literally(tmp_path: Path, open_bench: Callable[[str], Bench]) -> None:
    open_bench(f"sqlite:///{tmp_path}/a b?mode=ro#%41.db")
    assert (tmp_path / "a b?mode=ro#%41.db").exists()


def test_databases_in_memory_are_apart_and_live_until_they_are_closed(open_bench: Callable[[str], Bench]) -> None:
    left, right = open_bench("sqlite:///:memory:"), open_bench("sqlite:///:memory:")
    left.create_tenant(TenantRecord("acme"), ADMIN)
    assert (len(left.tenants()), len(right.tenants())) == (1, 0)
    assert left.verify_audit().ok


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    error = refusal(f"sqlite:///{tmp_path}/missing/sekisho.db")
    assert f"{tmp_path}/missing/sekisho.db" in str(error) and "folder exists" in str(error)


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    assert "cannot open" in str(refusal(f"sqlite:///{tmp_path}"))


@contextmanager
def unprivileged(folder: Path) -> Iterator[None]:
    """The tests may run as root, to whom no folder is closed."""
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that can be reached without being root."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    folder.chmod(0o700)
    shutil.rmtree(folder)


def test_a_read_only_folder_is_named(open_folder: Path) -> None:
    open_folder.chmod(0o555)
    with unprivileged(open_folder):
        error = refusal(f"sqlite:///{open_folder}/sekisho.db")
    assert str(open_folder) in str(error) and "may write there" in str(error)


def test_a_read_only_file_is_named(open_folder: Path) -> None:
    file = open_folder / "sekisho.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE other (x)")
    file.chmod(0o444)
    with unprivileged(open_folder):
        error = refusal(f"sqlite:///{file}")
    assert str(file) in str(error) and "right to write" in str(error)


def test_a_file_that_is_no_database_is_named_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(b"these are my notes, and they are long enough to be looked at\n" * 20)
    before = file.read_bytes()
    error = refusal(f"sqlite:///{file}")
    assert str(file) in str(error) and "not an SQLite database" in str(error)
    assert file.read_bytes() == before


def test_a_database_locked_for_long_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.store.database._BUSY_LIMIT", 0.1)
    with closing(sqlite3.connect(tmp_path / "sekisho.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnavailable, match="busy") as raised:
            Bench(f"sqlite:///{tmp_path}/sekisho.db").close()
    assert_discreet(raised)


# --- PostgreSQL
def test_both_spellings_of_the_scheme_are_understood(postgres: Postgres, open_bench: Callable[[str], Bench]) -> None:
    url = postgres.create()
    open_bench(url).create_tenant(TenantRecord("acme"), ADMIN)
    assert len(open_bench(url.replace("postgresql://", "postgresql+asyncpg://")).tenants()) == 1


def test_a_wrong_password_is_the_users_to_change(postgres: Postgres) -> None:
    assert "user or password" in str(refusal(postgres.create().replace(PASSWORD, PASSWORD + "x")))


def test_a_missing_database_is_the_users_to_create(postgres: Postgres) -> None:
    assert "does not exist" in str(refusal(postgres.url("nowhere")))


def test_a_user_without_rights_is_told_which(postgres: Postgres) -> None:
    url = postgres.create()
    postgres.sql(f"CREATE ROLE guest LOGIN PASSWORD '{PASSWORD}'", "postgres")
    assert "grant it CREATE" in str(refusal(url.replace("//sekisho:", "//guest:")))


@pytest.mark.parametrize("options", ["sslmode=perhaps", "target_session_attrs=x"])
def test_options_that_make_no_sense_are_the_users_to_change(postgres: Postgres, options: str) -> None:
    assert "options" in str(refusal(f"{postgres.create()}?{options}"))


def test_a_missing_driver_is_named_with_its_remedy(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    assert "install sekisho[postgres]" in str(refusal(postgres.url("postgres")))
