"""What the drivers raise, in the gateway's words. No text of a driver passes: some quote values, users or addresses."""

from __future__ import annotations

import sqlite3

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from gateway.config import StartupError
from gateway.errors import StoreUnavailable

# OSError: refused and broken connections, names that do not resolve, and time limits.
DRIVER_ERRORS = (DBAPIError, PoolTimeout, OSError, sqlite3.Error)

_RETRY_AFTER = 2  # seconds
_BUSY = ("SQLITE_BUSY", "SQLITE_LOCKED")
_SQLITE_REMEDIES = {  # beginning of SQLite's name for an error -> what the user has to do; {} is the file
    "SQLITE_CANTOPEN": "cannot open the database {}: check that its folder exists and that sekisho may write there",
    "SQLITE_READONLY": "cannot write to the database {}: give sekisho the right to write to it and to its folder",
    "SQLITE_NOTADB": "{} is not an SQLite database: name another file in `state.database`",
    "SQLITE_CORRUPT": "the database {} is damaged: restore a backup, or name another file in `state.database`",
}
_POSTGRES_REMEDIES = {  # SQLSTATE -> what the user has to do
    "28000": "the database server does not let this user in: check `state.database` and the server's pg_hba.conf",
    "28P01": "the database server refuses the user or password: check `state.database`",
    "3D000": "the database does not exist on its server: create it, or name another in `state.database`",
    "42501": "the database user may not create tables: make it the owner of the database, or grant it CREATE",
}


def unavailable(error: BaseException) -> StoreUnavailable:
    """The answer for whoever needed the database just now."""
    cause = _cause(error)
    if isinstance(error, PoolTimeout | TimeoutError) or _sqlite_name(cause).startswith(_BUSY):
        return StoreUnavailable("The database is too busy to answer in time. Try again.", retry_after=_RETRY_AFTER)
    if isinstance(cause, OSError) or (isinstance(error, DBAPIError) and error.connection_invalidated):
        return StoreUnavailable("The database cannot be reached. Try again.", retry_after=_RETRY_AFTER)
    # The name of the error's class tells an operator much, and nobody else anything.
    return StoreUnavailable(f"The database failed ({type(cause).__name__}). Try again.", retry_after=_RETRY_AFTER)


def at_start(error: BaseException, file: str) -> StartupError | StoreUnavailable:
    """What ends the start: StartupError for what the user has to change. `file` is SQLite's, for the text."""
    cause = _cause(error)
    for beginning, remedy in _SQLITE_REMEDIES.items():
        if _sqlite_name(cause).startswith(beginning):
            return StartupError(remedy.format(file))
    state = str(getattr(cause, "sqlstate", ""))
    if state in _POSTGRES_REMEDIES:
        return StartupError(_POSTGRES_REMEDIES[state])
    if isinstance(cause, ValueError):  # asyncpg's word for a URL with options that it cannot use
        return StartupError("`state.database` has options that are not understood: check what follows the `?`")
    return unavailable(error)


def _cause(error: BaseException) -> BaseException:
    """The driver's own exception, out of SQLAlchemy's wrapping."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        return error.orig.__cause__ or error.orig
    return error


def _sqlite_name(cause: BaseException) -> str:
    return getattr(cause, "sqlite_errorname", "") if isinstance(cause, sqlite3.Error) else ""
