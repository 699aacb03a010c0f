"""How a service that took a free port tells its starter which: an address in a file that appears at once."""

from __future__ import annotations

from pathlib import Path

from paceline.files.whole_file import write_whole


def announce(ready_file: Path | None, address: str) -> None:
    """Writes `address` to `ready_file` as one object."""
    if ready_file is not None:
        write_whole(ready_file, address + "\n")
