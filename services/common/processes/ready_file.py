"""The ready file: a service writes its address there once it listens, because its starter does not know a free port
that it took."""

from __future__ import annotations

from pathlib import Path

from paceline.files.whole_file import write_whole


def announce(ready_file: Path | None, address: str) -> None:
    """Write `address` to `ready_file`, whole or not at all."""
    if ready_file is not None:
        write_whole(ready_file, address + "\n")
