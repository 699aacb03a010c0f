"""PYTHONPATH for a test's processes: packages may have come to this one by it, so it is never replaced."""

from __future__ import annotations

import os
from pathlib import Path


def python_path(*folders: str | Path) -> str:
    """Return PYTHONPATH with these folders before those that it has."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
