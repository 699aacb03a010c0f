r"""Makes text for a terminal: draws curves, and escapes control characters in what models or remote people wrote, in
the form of Python (`\x1b`), because such characters can move the cursor, change the title or reverse the order of
characters."""

from __future__ import annotations

import re
from itertools import pairwise
from math import isfinite

KEPT = "\n\t"
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, those of ANSI sequences included
    "\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069"  # marks and overrides of direction
    "\u2028\u2029\ufeff\ud800-\udfff]"  # separators that some terminals take for lines; lone surrogates
)


def visible(text: str) -> str:
    """Return the text with every control character but newline and tab escaped."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)


BLOCKS = " ▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int) -> str:
    """Return a line of at most `width` characters for values in [0, 1]; if there are more values, neighbours are
    averaged."""
    return "".join(BLOCKS[round(_clamped(value) * (len(BLOCKS) - 1))] for value in _averaged(values, width))


def scaled(values: list[float]) -> list[float]:
    """Return finite values scaled from [least, greatest] to [0, 1]; unchanged if all values are within [0, 1] already."""
    finite = [value for value in values if isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if low >= 0.0 and high <= 1.0:
        return finite
    return [(value - low) / (high - low) if high > low else 0.5 for value in finite]


def chart(values: list[float], *, width: int = 60, height: int = 10, label: str = "step") -> str:
    """Return a chart of values in [0, 1] over their index: `height` lines and two for the horizontal axis."""
    columns = _averaged(values, width)
    lines = []
    for row in range(height, 0, -1):
        cells = "".join(_cell(_clamped(value) * height - (row - 1)) for value in columns)
        mark = f"{row / height:4.1f} ┤" if row % 2 == 0 else "     │"
        lines.append(mark + cells)
    lines.append(" 0.0 └" + "─" * len(columns))
    last = f"{label} {len(values)}"
    lines.append("      0" + " " * max(1, len(columns) - 1 - len(last)) + last)
    return "\n".join(lines)


def _cell(filled: float) -> str:
    return BLOCKS[max(0, min(len(BLOCKS) - 1, round(filled * (len(BLOCKS) - 1))))]


def _averaged(values: list[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [i * len(values) // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _clamped(value: float) -> float:
    return min(1.0, max(0.0, value))
