"""The lines of metrics.jsonl that the ledger does not know: of steps after a backup that was put back, or of a transaction that a
kill undid. They are set aside when a coordinator opens the file, so that each step is in it once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 1 << 20

IsAhead = Callable[[str, int], bool]
"""Whether the ledger does not know of the line of this kind and step."""


def set_aside(path: Path, is_ahead: IsAhead) -> int:
    """Moves lines that are ahead, and what is no whole line, to the end of `<path>.set-aside`; returns how many.

    Read from the end, up to the newest line of a trained step that is known: what stands before it was written before it.
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
    """The lines after the newest one of a trained step that the ledger knows, and where they begin."""
    size, window = file.seek(0, os.SEEK_END), BLOCK_BYTES
    while True:
        start = max(0, size - window)
        file.seek(start)
        lines = file.read(size - start).splitlines(keepends=True)
        if start and lines:
            start += len(lines.pop(0))  # it may have begun before
        for index in range(len(lines) - 1, -1, -1):
            kind, step = _said(lines[index])
            if kind == "train" and not is_ahead(kind, step):
                return start + sum(map(len, lines[: index + 1])), lines[index + 1 :]
        if window >= size:
            return start, lines
        window *= 4


def _is_ahead(line: bytes, is_ahead: IsAhead) -> bool:
    kind, step = _said(line)
    return not kind or is_ahead(kind, step)


def _said(line: bytes) -> tuple[str, int]:
    """Kind and step of a line; no kind for what is no whole line."""
    if not line.endswith(b"\n"):
        return "", 0
    try:
        content = json.loads(line)
        return str(content["kind"]), int(content["step"])
    except (ValueError, TypeError, KeyError):
        return "", 0
