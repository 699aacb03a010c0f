"""Connections to an encrypted SQLite file, through SQLCipher (library `sqlcipher3`).

SQLCipher encrypts every page of the file, of its log and of its journal with AES-256 and seals it with HMAC-SHA-512, so a page that
was changed is found when it is read. After such a page a connection reads nothing more.

Promise: to its caller a connection is one of the module `sqlite3`, and raises that module's errors. Their codes are the primary ones, such as
SQLITE_CONSTRAINT: the library does not give the extended ones.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # its interface is that of sqlite3, and it has no types
    dbapi = sqlite3
else:
    from sqlcipher3 import dbapi2 as dbapi

Row = dbapi.Row


def _as_sqlite3(method: Callable[..., Any]) -> Any:
    """Return a method that raises the error of the module `sqlite3` where the given one raises that of its library."""

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
    """Open a file, which needs its key before anything else. Options and errors are those of `sqlite3.connect`."""
    try:
        return dbapi.connect(target, factory=CipherConnection, **options)
    except dbapi.Error as error:
        raise _translated(error) from None
