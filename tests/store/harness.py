"""A store in a test: called like plain functions, looked into and tampered with past the gateway."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gateway.records import Actor, Changes, KeyRecord, Mark, News, TenantRecord
from gateway.store import Store
from tests.servers.postgres import PASSWORD, Postgres

ROOT = Path(__file__).parents[2]
ADMIN = Actor("acme/key_1", "192.0.2.7")
T = TypeVar("T")
_UNLOCK = {
    "sqlite": "DROP TRIGGER audit_no_update; DROP TRIGGER audit_no_delete; DROP TRIGGER audit_no_replace",
    "postgresql": "DROP TRIGGER audit_no_change ON audit",
}


def key(identity: str, tenant: str = "acme", **more: Any) -> KeyRecord:
    return KeyRecord(
        **{"id": identity, "tenant": tenant, "name": identity, "digest": hashlib.sha256(identity.encode()).digest()}
        | more
    )


class Place:
    """An empty database of the test's own, on disk or on a server."""

    def __init__(self, kind: str, url: str, postgres: Postgres | None) -> None:
        self.kind, self.url = kind, url
        self._postgres = postgres

    def sql(self, statement: str) -> str:
        """Runs statements past the gateway; what they find, a row a line. Raises: AssertionError: they were refused."""
        if self._postgres is not None:
            return self._postgres.sql(statement, self.url.rpartition("/")[2])
        with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as connection:
            try:
                if ";" in statement:
                    connection.executescript(statement)
                    return ""
                found = connection.execute(statement).fetchall()
                connection.commit()
            except sqlite3.Error as error:
                raise AssertionError(str(error)) from error
        return "".join("|".join(map(str, row)) + "\n" for row in found)

    def dump(self) -> str:
        if self._postgres is not None:
            return self._postgres.dump(self.url.rpartition("/")[2])
        with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as connection:
            return "\n".join(connection.iterdump())

    def unlock_audit(self) -> None:
        """What somebody does who wants to forge the log."""
        self.sql(_UNLOCK[self.kind])


class Bench:
    """An open store and the loop that it belongs to. Methods of the store can be called here, and block."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        try:
            self.store = self.run(Store.open(url))
        except BaseException:
            self._runner.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def version(self) -> int:
        """Number of the last change to tenants or keys."""
        return self.mark().version

    def mark(self) -> Mark:
        return self._whole().mark

    def living(self) -> Changes:
        """What a newcomer is told."""
        return self._whole().changes

    def _whole(self) -> News:
        news = self.run(self.store.news(None))
        assert news is not None and news.whole
        return news

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        return lambda *args, **more: self.run(method(*args, **more))

    def close(self) -> None:
        self.run(self.store.close())
        self._runner.close()


class Follower:
    """What a gateway knows that asks for changes now and then."""

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.tenants: dict[str, TenantRecord] = {}
        self.keys: dict[str, KeyRecord] = {}

    def take(self, news: News | None) -> None:
        if news is None:
            return
        assert news.whole is (self.mark is None) and news.mark.version == news.changes.version
        assert self.mark is None or news.mark.version >= self.mark.version
        self.mark, changes = news.mark, news.changes
        for tenant in changes.tenants:
            self.tenants.pop(tenant.name, None)
            if tenant.deleted_at is None:
                self.tenants[tenant.name] = tenant
        for one in changes.keys:
            self.keys.pop(one.id, None)
            if one.revoked_at is None:
                self.keys[one.id] = one

    def knows(self, all_living: Changes) -> bool:
        tenants = {tenant.name: tenant for tenant in all_living.tenants}
        keys = {one.id: one for one in all_living.keys}
        assert self.mark is not None
        return (self.mark.version, self.tenants, self.keys) == (all_living.version, tenants, keys)


class Contender:
    """Another process that opens the same database when told to, creates tenants and ends."""

    def __init__(self, url: str, name: str, count: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.store.contender", url, name, str(count)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def finish(self) -> None:
        _, errors = self._process.communicate(timeout=60)
        assert self._process.returncode == 0, errors.decode()

    @property
    def running(self) -> bool:
        return self._process.poll() is None


def assert_discreet(raised: pytest.ExceptionInfo[Exception]) -> None:
    """An error that can be shown, and logged with its traceback."""
    text = str(raised.value) + repr(raised.value)
    assert not [word for word in ("postgresql://", "sqlite:///", "127.0.0.1", "INSERT", "SELECT") if word in text]
    assert PASSWORD not in text + "".join(traceback.format_exception(raised.value))
