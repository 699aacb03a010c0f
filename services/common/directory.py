"""The coordinator's directory, which `--directory` names."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import Unreadable


def make_directory(directory: Path) -> None:
    """Make the folder and those above it. Raises Unreadable when it cannot be made or nothing can be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unreadable(
            f"--directory {directory} cannot be made: {error.strerror}; name a folder in which you can write"
        ) from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise Unreadable(
            f"--directory {directory} cannot be used: you cannot write there; name a folder in which you can write"
        )
