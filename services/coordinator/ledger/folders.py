"""Paths of a run's folders. The ledger keeps them relative to its own folder, so that the whole folder can be moved.

Paths outside of the ledger's folder are kept as `file://` URLs, which are not moved; other URLs are kept as they are. A copy
therefore never reads the original's files.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.files.storage import is_url

FILE_SCHEME = "file://"


def stored(base: Path, path: str) -> str:
    """Return `path` as the ledger keeps it; `base` is the ledger's folder."""
    if is_url(path) or not os.path.isabs(path):
        return path
    inside = os.path.relpath(path, base)
    if inside == os.pardir or inside.startswith(os.pardir + os.sep):
        return FILE_SCHEME + path
    return inside


def resolved(base: Path, path: str) -> str:
    """Return the path as of now: an absolute path or a URL; empty for none."""
    if not path or is_url(path):
        return path.removeprefix(FILE_SCHEME)
    return str(base / path)
