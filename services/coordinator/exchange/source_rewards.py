"""Rewards by the source of the prompts (`data.source_key`). Pure.

Suffixes: G groups, C completions of a group.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from paceline.advantages import Rewards

MAX_SOURCES = 32
"""Sources that are measured by themselves; all further ones are `other`."""
MAX_NAME = 40
OTHER = "other"


def rewards_by_source(totals_GC: Rewards, sources_G: Sequence[object]) -> dict[str, float]:
    """Return `reward_of/<source>`, the mean over a source's groups of their mean reward, and `groups_of/<source>`, their number.

    A group without any reward counts only as a group; a source without any reward has no mean.
    """
    names_G = source_names(sources_G)
    found: dict[str, float] = {}
    for name in sorted(set(names_G)):
        rows_GC = [totals_C for totals_C, of in zip(totals_GC, names_G, strict=True) if of == name]
        known = [float(np.nanmean(totals_C)) for totals_C in rows_GC if not np.isnan(totals_C).all()]
        if known:
            found[f"reward_of/{name}"] = float(np.mean(known))
        found[f"groups_of/{name}"] = float(len(rows_GC))
    return found


def source_names(sources: Sequence[object]) -> list[str]:
    """Return the values of a column as parts of metric names, bounded in length and number; the most frequent ones stay."""
    names = [re.sub(r"[^\w.-]+", "_", str(source))[:MAX_NAME] or "none" for source in sources]
    counts = Counter(names)
    if len(counts) <= MAX_SOURCES:
        return names
    kept = {
        name for name, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: MAX_SOURCES - 1]
    }
    return [name if name in kept else OTHER for name in names]
