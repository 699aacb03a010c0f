"""Division of texts into passes of a bounded size. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def passes(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return the indices of the texts in passes, longest first, so that texts of similar length share one.

    A pass has at most `max_tokens` tokens, padding included (texts times the longest), or one text.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    found = []
    while order:
        count = max(1, max_tokens // max(1, lengths[order[0]]))
        found.append(order[:count])
        order = order[count:]
    return found
