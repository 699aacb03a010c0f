"""Paths of a run's folders. The ledger keeps them relative to its own folder, so that the whole folder can be moved.

Paths outside of the ledger's folder, and all URLs, are kept as they are. Older ledgers have absolute paths: where such
a path does not exist, its end, from the run's own folder on, is searched below the ledger's folder.
"""

from __future__ import annotations

import os
from pathlib import Path


def stored(base: Path, path: str) -> str:
    """Return `path` as the ledger keeps it; `base` is the ledger's folder."""
    if is_url(path) or not os.path.isabs(path):
        return path
    inside = os.path.relpath(path, base)
    return path if inside == os.pardir or inside.startswith(os.pardir + os.sep) else inside


def resolved(base: Path, path: str, run_id: str) -> str:
    """Return the path as of now: an absolute path or a URL; empty for none."""
    if not path or is_url(path):
        return path
    if not os.path.isabs(path):
        return str(base / path)
    parts = Path(path).parts
    if not os.path.exists(path) and run_id in parts:
        last = len(parts) - 1 - parts[::-1].index(run_id)
        moved = base.joinpath(*parts[last:])
        if moved.exists():
            return str(moved)
    return path


def is_url(path: str) -> bool:
    """Return whether this is a URL of fsspec, not a path of this machine's file system."""
    return "://" in path
