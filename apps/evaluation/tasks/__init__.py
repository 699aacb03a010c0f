"""Holds evaluation files of public data sets; `paceline eval` finds these files by name.

Promise: a file names columns of the public data set, and its scoring needs no other columns.
"""

from __future__ import annotations

from pathlib import Path

TASKS = Path(__file__).parent


def task_names() -> list[str]:
    return sorted(path.stem for path in TASKS.glob("*.yaml"))


def task_file(name: str) -> Path | None:
    return TASKS / f"{name}.yaml" if name in task_names() else None
