"""Lines of metrics.jsonl that the ledger does not know: of steps after a restored backup, or of a transaction that a
kill undid. They are set aside when a coordinator opens the file, so that each step is in it once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 1 << 20

IsAhead = Callable[[str, int], bool]
"""Function that returns whether the ledger does not know the line of this kind and step."""


def set_aside(path: Path, is_ahead: IsAhead) -> int:
    """Move lines that are ahead, and incomplete lines, to the end of `<path>.set-aside`; return their number.

    The file is read from its end, up to the newest known line of a trained step, because the lines before it are older.
    Raises OSError.
    """
    if not path.is_file():
        return 0
    with path.open("r+b") as file:
        start, lines = _tail(file, is_ahead)
        ahead = [line for line in lines if _is_ahead(line, is_ahead)]
        kept = [line for line in lines if not _is_ahead(line, is_ahead)]
        if not ahead:
            return 0
        with path.with_name(f"{path.name}.set-aside").open("ab") as aside:
            aside.writelines(line if line.endswith(b"\n") else line + b"\n" for line in ahead)
        file.seek(start)
        file.truncate()
        file.writelines(kept)
    return len(ahead)


def _tail(file: BinaryIO, is_ahead: IsAhead) -> tuple[int, list[bytes]]:
    """Return the lines after the newest line of a trained step that the ledger knows, and their offset."""
    size, window = file.seek(0, os.SEEK_END), BLOCK_BYTES
    while True:
        start = max(0, size - window)
        file.seek(start)
        lines = file.read(size - start).splitlines(keepends=True)
        if start and lines:
            start += len(lines.pop(0))  # it may have begun before
        for index in range(len(lines) - 1, -1, -1):
            kind, step = _kind_and_step(lines[index])
            if kind == "train" and not is_ahead(kind, step):
                return start + sum(map(len, lines[: index + 1])), lines[index + 1 :]
        if window >= size:
            return start, lines
        window *= 4


def _is_ahead(line: bytes, is_ahead: IsAhead) -> bool:
    kind, step = _kind_and_step(line)
    return not kind or is_ahead(kind, step)


def _kind_and_step(line: bytes) -> tuple[str, int]:
    """Return kind and step of a line; no kind if the line is incomplete."""
    if not line.endswith(b"\n"):
        return "", 0
    try:
        content = json.loads(line)
        return str(content["kind"]), int(content["step"])
    except (ValueError, TypeError, KeyError):
        return "", 0
