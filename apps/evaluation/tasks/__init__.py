"""Evaluation files of public data sets, which `paceline eval` knows by name.

Promise: a file names the columns that the public data set has, and its scoring needs no other.
"""

from __future__ import annotations

from pathlib import Path

TASKS = Path(__file__).parent


def task_names() -> list[str]:
    """Return the names of the files, sorted."""
    return sorted(path.stem for path in TASKS.glob("*.yaml"))


def task_file(name: str) -> Path | None:
    """Return the file of a task; None for another name."""
    return TASKS / f"{name}.yaml" if name in task_names() else None
