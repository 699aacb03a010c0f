"""Opens encrypted SQLite files through SQLCipher (library `sqlcipher3`).

SQLCipher encrypts every page of the file, its write-ahead log and its rollback journal with AES-256 and authenticates
it with HMAC-SHA-512: a changed page is detected when it is read, and the connection then reads nothing more. Promise:
callers see a connection of the module `sqlite3` with that module's errors. Error codes are the primary ones, such as
SQLITE_CONSTRAINT, because the library does not report the extended ones.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it has sqlite3's interface, but no types
    dbapi = sqlite3
else:
    from sqlcipher3 import dbapi2 as dbapi

Row = dbapi.Row


def _as_sqlite3(method: Callable[..., Any]) -> Any:
    """Return `method` with the library's errors replaced by those of `sqlite3`."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except dbapi.Error as error:
            raise _translated(error) from None

    return call


def _translated(error: dbapi.Error) -> sqlite3.Error:
    kind: type[sqlite3.Error] = getattr(sqlite3, type(error).__name__)
    same = kind(*error.args)
    for name in ("sqlite_errorcode", "sqlite_errorname"):
        if hasattr(error, name):
            setattr(same, name, getattr(error, name))
    return same


class CipherCursor(dbapi.Cursor):
    """A cursor with the errors of `sqlite3`."""

    execute = _as_sqlite3(dbapi.Cursor.execute)
    executemany = _as_sqlite3(dbapi.Cursor.executemany)
    executescript = _as_sqlite3(dbapi.Cursor.executescript)
    fetchone = _as_sqlite3(dbapi.Cursor.fetchone)
    fetchmany = _as_sqlite3(dbapi.Cursor.fetchmany)
    fetchall = _as_sqlite3(dbapi.Cursor.fetchall)
    __next__ = _as_sqlite3(dbapi.Cursor.__next__)


class CipherConnection(dbapi.Connection):
    """A connection with the errors of `sqlite3`; its `execute` methods go through its cursors."""

    backup = _as_sqlite3(dbapi.Connection.backup)
    close = _as_sqlite3(dbapi.Connection.close)

    def cursor(self, factory: Any = CipherCursor) -> Any:
        return super().cursor(factory)


def connect(target: str, **options: Any) -> CipherConnection:
    """Open a file; its key must be set before anything else. Options and errors are those of `sqlite3.connect`."""
    try:
        return dbapi.connect(target, factory=CipherConnection, **options)
    except dbapi.Error as error:
        raise _translated(error) from None
