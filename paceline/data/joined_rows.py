"""Rows of several files, one file after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

from paceline.errors import DataError


class Part(Protocol):
    """The rows of one file."""

    fingerprint: str
    columns: tuple[str, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


class JoinedRows:
    """The rows of all parts, in their order."""

    def __init__(self, parts: Sequence[Part], names: Sequence[str]) -> None:
        """`names` are those of the parts, for messages. Raises DataError for a part that lacks a column of the first."""
        for part, name in zip(parts, names, strict=True):
            if missing := sorted(set(parts[0].columns) - set(part.columns)):
                raise DataError(
                    f"{name}: no column {missing[0]!r}, which {names[0]} has; give every file the same columns"
                )
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))
        self.columns = parts[0].columns
        self.fingerprint = "; ".join(part.fingerprint for part in parts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index`. Raises Unreadable as the part does."""
        number = bisect_right(self._ends, index)
        return self._parts[number][index - (self._ends[number - 1] if number else 0)]
