"""The spool: a folder of this machine for files on their way to a store. It needs no backup."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import InvalidInput

FOLDER_VARIABLE = "PACELINE_SPOOL"
SIZE_VARIABLE = "PACELINE_SPOOL_MB"
DEFAULT_MB = 65_536


def spool_folder() -> Path:
    """Return the folder that PACELINE_SPOOL names, else `paceline/spool` in the user's cache."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "spool"


def quota_bytes() -> int:
    """Return the bytes of checkpoints that may wait for a store, by PACELINE_SPOOL_MB. Raises InvalidInput."""
    text = os.environ.get(SIZE_VARIABLE) or str(DEFAULT_MB)
    if not text.isdecimal() or not int(text):
        raise InvalidInput(f"{SIZE_VARIABLE} is {text!r}; set it to a number of MB")
    return int(text) << 20
