"""Commands on the database itself."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import backends
from gateway.commands.client import Query
from gateway.config import StartupError, load
from gateway.config.server import StateConfig
from gateway.keybook import Keybook
from gateway.keybook.forms import UsageForm, read
from gateway.keybook.usage import Report
from gateway.people import People
from gateway.records import JSON, Actor
from gateway.store import Store

T = TypeVar("T")


class Direct:
    """Works on the database; gateways that use it notice within seconds. No key is in use here, so nobody can lock
    themselves out and `force` has no meaning."""

    def __init__(self, runner: asyncio.Runner, book: Keybook) -> None:
        self._runner, self._book = runner, book
        self._actor = Actor(f"cli:{_user()}")

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def tenants(self) -> JSON:
        return self._wait(self._book.tenants())

    def tenant(self, name: str) -> JSON:
        return self._wait(self._book.tenant(name))

    def create_tenant(self, body: JSON) -> JSON:
        return self._wait(self._book.create_tenant(body, self._actor))

    def update_tenant(self, name: str, body: JSON) -> JSON:
        return self._wait(self._book.update_tenant(name, body, self._actor))

    def delete_tenant(self, name: str, query: Query) -> JSON:
        return self._wait(self._book.delete_tenant(name, self._actor))

    def keys(self, query: Query) -> JSON:
        return self._wait(self._book.keys(query))

    def key(self, identity: str) -> JSON:
        return self._wait(self._book.key(identity))

    def create_key(self, body: JSON) -> JSON:
        return self._wait(self._book.create_key(body, self._actor))

    def update_key(self, identity: str, body: JSON, query: Query) -> JSON:
        return self._wait(self._book.update_key(identity, body, self._actor))

    def rotate_key(self, identity: str, body: JSON) -> JSON:
        return self._wait(self._book.rotate_key(identity, body, self._actor))

    def revoke_key(self, identity: str, query: Query) -> JSON:
        return self._wait(self._book.revoke_key(identity, self._actor))

    def usage(self, query: Query) -> JSON:
        return self._report(query).document()

    def usage_csv(self, query: Query) -> str:
        return self._report(query).csv()

    def _report(self, query: Query) -> Report:
        return self._wait(self._book.usage(read(UsageForm, query)))

    def audit(self, query: Query) -> JSON:
        return self._wait(self._book.audit(query))

    def verify_audit(self, query: Query) -> JSON:
        return self._wait(self._book.verify_audit(query))


@contextlib.contextmanager
def connect(config: Path | None, database: str | None) -> Iterator[Direct]:
    """A client of `database`, or of the one that `config` names, whose tenants and keys it then knows too.

    Raises: ConfigError, StartupError, StoreUnavailable.
    """
    people = People()
    if config is not None:
        loaded = load(config, kinds=backends.kinds())
        url = loaded.state.database.get_secret_value() if loaded.state.database is not None else None
        people = people.with_file(loaded.tenants)
    else:
        url = _checked(database or "")
    if url is None or url == "sqlite:///:memory:":
        raise StartupError("there is no database that lasts: set state.database, or name one with --database")
    with asyncio.Runner() as runner:
        store = runner.run(Store.open(url))
        try:
            yield Direct(runner, Keybook(store, people))
        finally:
            runner.run(store.close())


def _checked(database: str) -> str | None:
    """Raises: StartupError, without the URL, which may hold a password."""
    try:
        found = StateConfig.model_validate({"database": database}).database
    except ValueError:
        raise StartupError("--database: write sqlite:///file.db or postgresql://user:password@host:5432/name") from None
    return found.get_secret_value() if found is not None else None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in many containers
        return str(os.getuid())
