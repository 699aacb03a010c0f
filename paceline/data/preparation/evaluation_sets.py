"""The evaluation sets that a spec's training data are compared with: its validation data, and test files beside its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.data.files import FILE_KINDS
from paceline.data.rows import Rows, open_rows, open_source
from paceline.files.storage import is_url
from paceline.spec import RunSpec

STEMS = ("test", "eval", "validation", "valid", "dev")
"""Names of files beside the training data that are taken for evaluation sets."""


def evaluation_sets(spec: RunSpec, prepared: RunSpec) -> dict[str, Rows]:
    """Return the evaluation sets of a spec by their names; `prepared` is the spec after its preparation, whose validation data
    have the columns of its training data. Raises DataError, Unreadable."""
    found: dict[str, Rows] = {}
    if spec.data.validation is not None and spec.data.validation != spec.data.train:
        found["data.validation"] = open_source(prepared.data.source(validation=True))
    return found | {str(path): open_rows(str(path), "train", "test file") for path in _siblings(spec)}


def _siblings(spec: RunSpec) -> Iterator[Path]:
    """Yield evaluation sets by their names beside the files of the training data."""
    train = spec.data.names()
    named = (*train, *spec.data.names(validation=True))
    for folder in sorted({Path(name).parent for name in train if not is_url(name)}):
        for path in sorted(folder.glob("*.*")):
            is_set = path.stem.lower() in STEMS and path.suffix in FILE_KINDS
            if is_set and path.is_file() and str(path) not in named:
                yield path
