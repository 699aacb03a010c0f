"""Rows of pairs with a number that says which completion is better (`data.preference_key`), without those where neither is.

Promise: every row that is left out is counted.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any

import numpy as np

from paceline.data.example_rows import preference_of
from paceline.data.joined_rows import Part, sizes_of
from paceline.errors import DataError
from paceline.spec import DataSection

UNDECIDED = "neither completion is better"


class DecidedPairs:
    """The checked rows in which one completion is better. Memory holds their indices."""

    def __init__(self, rows: Part, data: DataSection, field: str) -> None:
        """Raises DataError, naming `field`, where a data set has no such row."""
        self._rows, self.columns, self.fingerprint = rows, rows.columns, rows.fingerprint
        self._kept = np.array([i for i in range(len(rows)) if preference_of(rows[i], data) != 0], np.int64)
        ends = np.searchsorted(self._kept, [0, *accumulate(sizes_of(rows))])
        self.sizes = tuple(np.diff(ends).tolist())
        """Rows of each data set that was joined."""
        if 0 in self.sizes:
            raise DataError(
                f"{field}: column {data.preference_key!r} is 0 in all {sizes_of(rows)[self.sizes.index(0)]:,} rows of a data "
                "set, so neither completion is ever better; correct data.preference_key, or remove the data set"
            )
        self.left_out = Counter({UNDECIDED: len(rows) - len(self)})
        """Rows that were left out, by reason."""

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index`. Raises Unreadable as the rows do."""
        return self._rows[int(self._kept[index])]
