"""Paths of a run's folders. The ledger keeps them relative to its own folder, so that the whole folder can be moved.

Paths outside of the ledger's folder, and all URLs, are kept as they are. Older ledgers have absolute paths also of what
is in a run's folder: their end, from that folder on, is taken below the ledger's folder. A copy therefore never reads the
original's files. A path with such an end in a store elsewhere (`--store`) is kept as a `file://` URL, which is not moved.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.files.names import EXPORT, EXPORTS
from paceline.files.storage import is_url

RUN_FOLDERS = ("checkpoints", EXPORT, EXPORTS)
"""Folders that are made in a run's own folder."""
FILE_SCHEME = "file://"


def stored(base: Path, path: str) -> str:
    """Return `path` as the ledger keeps it; `base` is the ledger's folder."""
    if is_url(path) or not os.path.isabs(path):
        return path
    inside = os.path.relpath(path, base)
    if inside != os.pardir and not inside.startswith(os.pardir + os.sep):
        return inside
    return FILE_SCHEME + path if set(Path(path).parts).intersection(RUN_FOLDERS) else path


def resolved(base: Path, path: str, run_id: str) -> str:
    """Return the path as of now: an absolute path or a URL; empty for none."""
    if not path or is_url(path):
        return path.removeprefix(FILE_SCHEME)
    if not os.path.isabs(path):
        return str(base / path)
    parts = Path(path).parts
    if run_id in parts:
        last = len(parts) - 1 - parts[::-1].index(run_id)
        inside = parts[last:]
        moved = base.joinpath(*inside)
        is_of_run = len(inside) > 1 and inside[1] in RUN_FOLDERS and (base / run_id).is_dir()
        if moved.exists() or is_of_run:
            return str(moved)
    return path
