"""`paceline plot RUN reward kl -o curve.svg`: one chart for each metric, one line for each run, as an SVG or PNG file. Pure but for
Pillow, which draws the PNG.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from fnmatch import fnmatchcase
from html import escape
from typing import Any, NamedTuple

from services.cli.recorded.report_page import COLOURS, NO_METRICS, Point, RunCurves, points

WIDTH, CHART_HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 30
SCALE = 2
"""Pixels of a PNG for each unit of the drawing."""

FORMATS = (".svg", ".png")
INK, MUTED, GRID = "#222222", "#666666", "#dddddd"


class Chart(NamedTuple):
    """The curves of one metric, by run."""

    name: str
    curves: list[list[Point]]
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def place(self, point: Point, top: int) -> tuple[float, float]:
        """Return where a point is drawn."""
        x = LEFT + _share(point[0], self.x_range) * (WIDTH - LEFT - RIGHT)
        y = top + TOP + (1 - _share(point[1], self.y_range)) * (CHART_HEIGHT - TOP - BOTTOM)
        return x, y


def charts_of(runs: Sequence[RunCurves], patterns: Sequence[str]) -> list[Chart]:
    """Return a chart for each metric that a pattern names, in the order of the patterns; metrics without a number have none."""
    names = dict.fromkeys(name for run in runs for row in run.steps for name in row if name not in NO_METRICS)
    wanted = dict.fromkeys(name for pattern in patterns for name in names if fnmatchcase(name, pattern))
    charts = []
    for name in wanted:
        curves = [points(run.steps, name) for run in runs]
        found = [point for curve in curves for point in curve]
        if found:
            xs, ys = zip(*found, strict=True)
            charts.append(Chart(name, curves, (min(xs), max(xs)), (min(ys), max(ys))))
    return charts


def as_svg(charts: Sequence[Chart], run_ids: Sequence[str]) -> bytes:
    """Return the charts below one another as an SVG file."""
    parts = []
    for number, chart in enumerate(charts):
        top = number * CHART_HEIGHT
        bottom, right = top + CHART_HEIGHT - BOTTOM, WIDTH - RIGHT
        parts.append(
            f'<path d="M{LEFT},{top + TOP} V{bottom} H{right}" stroke="{GRID}" fill="none"/>'
            f'<text x="{LEFT}" y="{top + 20}" font-weight="bold" fill="{INK}">{escape(chart.name)}</text>'
        )
        for text, x, y, anchor in _labels(chart, top):
            parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{MUTED}">{text}</text>')
        for index, curve in enumerate(chart.curves):
            places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (chart.place(point, top) for point in curve))
            colour = COLOURS[index % len(COLOURS)]
            if len(curve) == 1:
                x, y = chart.place(curve[0], top)
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
            elif curve:
                parts.append(
                    f'<polyline points="{places}" stroke="{colour}" fill="none" stroke-width="1.6"/>'
                )
    for index, run_id in enumerate(run_ids):
        colour = COLOURS[index % len(COLOURS)]
        parts.append(
            f'<text x="{WIDTH - RIGHT}" y="{20 + 14 * index}" text-anchor="end" fill="{colour}">{escape(run_id)}</text>'
        )
    height = CHART_HEIGHT * len(charts)
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )
    return text.encode()


def as_png(charts: Sequence[Chart], run_ids: Sequence[str]) -> bytes:
    """Return the charts below one another as a PNG file."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH * SCALE, CHART_HEIGHT * len(charts) * SCALE), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(12 * SCALE)

    def write(x: float, y: float, text: str, colour: str, anchor: str) -> None:
        draw.text((x * SCALE, y * SCALE), text, fill=colour, font=font, anchor=anchor)

    for number, chart in enumerate(charts):
        top = number * CHART_HEIGHT
        bottom, right = top + CHART_HEIGHT - BOTTOM, WIDTH - RIGHT
        axes = [value * SCALE for value in (LEFT, top + TOP, LEFT, bottom, right, bottom)]
        draw.line(axes, fill=GRID, width=SCALE)
        write(LEFT, top + 20, chart.name, INK, "ls")
        for text, x, y, anchor in _labels(chart, top):
            write(x, y, text, MUTED, "rs" if anchor == "end" else "ls")
        for index, curve in enumerate(chart.curves):
            colour = COLOURS[index % len(COLOURS)]
            places: list[Any] = [value * SCALE for point in curve for value in chart.place(point, top)]
            if len(curve) == 1:
                draw.circle(places, 3 * SCALE, fill=colour)
            elif curve:
                draw.line(places, fill=colour, width=3, joint="curve")
    for index, run_id in enumerate(run_ids):
        colour = COLOURS[index % len(COLOURS)]
        write(WIDTH - RIGHT, 20 + 14 * index, run_id, colour, "rs")
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def _labels(chart: Chart, top: int) -> list[tuple[str, float, float, str]]:
    """Return the texts at the axes: text, place and anchor."""
    bottom = top + CHART_HEIGHT - BOTTOM
    return [
        (f"{chart.y_range[1]:.4g}", LEFT - 6, top + TOP + 8, "end"),
        (f"{chart.y_range[0]:.4g}", LEFT - 6, bottom, "end"),
        (f"{chart.x_range[0]:.0f}", LEFT, bottom + 18, "start"),
        (f"step {chart.x_range[1]:.0f}", WIDTH - RIGHT, bottom + 18, "end"),
    ]


def _share(value: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    return (value - low) / (high - low) if high > low else 0.5
