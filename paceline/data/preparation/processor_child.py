"""The process of a processor: loads the user's function once, then answers one batch of rows after another. The
promises of `paceline.user_code.child` hold. This module never imports torch or transformers."""

from __future__ import annotations

import contextlib
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import InvalidInput, Unreadable
from paceline.user_code.child import connect
from paceline.user_code.frames import encode, receive
from paceline.user_code.loading import describe_error, load_from_file


def main() -> None:
    with connect() as connection, contextlib.suppress(EOFError, ConnectionError):
        _serve(connection)


def _serve(connection: socket.socket) -> None:
    path, _, name = receive(connection)["load"].rpartition(":")
    try:
        function = load_from_file(Path(path), name, "processor")
    except InvalidInput as error:
        connection.sendall(encode({"refused": str(error), "passing": isinstance(error, Unreadable)}))
        return
    connection.sendall(encode({"loaded": 1}))
    while True:
        connection.sendall(_reply(function, receive(connection)["rows"], Path(path).resolve()))


def _reply(function: Callable[[dict[str, Any]], Any], rows: list[dict[str, Any]], path: Path) -> bytes:
    """Return the frame with the rows that the function makes of each row, or with the function's first failure."""
    made: list[list[dict[str, Any]]] = []
    try:
        for row in rows:
            made.append(_as_rows(function(row)))
        return encode({"rows": made})
    except BaseException as error:  # sys.exit() in a function is a failure too
        traceback.print_exc()
        return encode({"failed": describe_error(error, path), "at": min(len(made), len(rows) - 1)})


def _as_rows(result: Any) -> list[dict[str, Any]]:
    rows = [] if result is None else result if isinstance(result, list) else [result]
    if not all(isinstance(row, dict) for row in rows):
        raise TypeError(
            f"a processor must return a row (a dict), a list of rows, or None (which leaves the row out); it returned {result!r:.80}"
        )
    return rows
