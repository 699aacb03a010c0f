"""How a service that took a free port tells its starter which: an address in a file that appears at once."""

from __future__ import annotations

from pathlib import Path


def announce(ready_file: Path | None, address: str) -> None:
    """Writes `address` to `ready_file` as one object."""
    if ready_file is not None:
        partial = ready_file.with_name(ready_file.name + ".partial")
        partial.write_text(address + "\n")
        partial.replace(ready_file)
