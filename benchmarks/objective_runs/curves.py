"""Learning curves as a small SVG: one line for each name, the range over its runs behind it. Needs no plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 12, 40
SMOOTHED_OVER = 5
"""Steps of the moving mean that is drawn; a batch's reward alone is too noisy to read."""


class Style(NamedTuple):
    """Appearance of a line."""

    colour: str
    dashed: bool = False


def write_curves(path: Path, curves: Mapping[str, Sequence[Sequence[float]]], styles: Mapping[str, Style]) -> None:
    """Write values from 0 to 1 over steps. `curves` has the runs of each name; runs of one name are cut to the
    shortest."""
    steps = max(min(map(len, runs)) for runs in curves.values())
    parts = [_axes(steps)]
    for i, (name, runs) in enumerate(curves.items()):
        length = min(map(len, runs))
        smooth = [_smoothed(run[:length]) for run in runs]
        low, high = ([end(values) for values in zip(*smooth, strict=True)] for end in (min, max))
        middle = [mean(values) for values in zip(*smooth, strict=True)]
        style = styles[name]
        band = _points(low, steps) + " " + " ".join(reversed(_points(high, steps).split()))
        dash = ' stroke-dasharray="6 4"' if style.dashed else ""
        parts.append(f'<polygon points="{band}" fill="{style.colour}" opacity="0.12"/>')
        line = f'fill="none" stroke="{style.colour}" stroke-width="1.8"{dash}'
        parts.append(f'<polyline points="{_points(middle, steps)}" {line}/>')
        y = HEIGHT - BOTTOM - 16 * (len(curves) - i)
        x = WIDTH - RIGHT - 170
        parts.append(f'<path d="M{x} {y - 4}h26" {line}/><text x="{x + 32}" y="{y}">{name}</text>')
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _axes(steps: int) -> str:
    lines = []
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        lines.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tenth * 10} %</text>')
    for step in range(0, steps + 1, 20):
        lines.append(f'<text x="{_x(step, steps):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    lines.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    return "\n".join(lines)


def _smoothed(values: Sequence[float]) -> list[float]:
    return [mean(values[max(i - SMOOTHED_OVER + 1, 0) : i + 1]) for i in range(len(values))]


def _points(values: Sequence[float], steps: int) -> str:
    return " ".join(f"{_x(i, steps):.1f},{_y(value):.1f}" for i, value in enumerate(values))


def _x(step: float, steps: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / max(steps, 1)


def _y(value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value
