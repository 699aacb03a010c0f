"""Rows of several data sets or files, one after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

from paceline.errors import DataError


class Part(Protocol):
    """The rows of one data set or file."""

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
        self.sizes = tuple(map(len, parts))
        """Rows of each part."""
        self._ends = list(accumulate(self.sizes))
        self.columns = parts[0].columns
        self.fingerprint = "; ".join(part.fingerprint for part in parts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index`. Raises Unreadable as the part does."""
        number = bisect_right(self._ends, index)
        return self._parts[number][index - (self._ends[number - 1] if number else 0)]


def left_out_of(rows: Part) -> Counter[str]:
    """Return the rows that were left out of a data set, by reason."""
    return +Counter(getattr(rows, "left_out", {}))


def counted(left_out: Counter[str]) -> str:
    """Return numbers of rows with their reasons, for people; the most frequent reason comes first."""
    return ", ".join(f"{number:,} ({reason})" for reason, number in left_out.most_common()) or "none left out"


def sizes_of(rows: Part) -> tuple[int, ...]:
    """Return the rows of each data set that was joined; of any other rows their number."""
    sizes: tuple[int, ...] = getattr(rows, "sizes", (len(rows),))
    return sizes
