"""An HTML page with a curve for each metric of one or several runs. Pure; the page needs no network and no script.

Metrics come in the order of docs/metrics.md, each with its meaning; a run has the same colour everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

from services.coordinator.reporting.metric_table import PARTS, metric_of

COLOURS = ("#3465a4", "#cc5500", "#4e9a06", "#a40000", "#75507b", "#8f5902", "#06989a", "#555753")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 320, 150, 52, 20, 8
NO_METRICS = ("step", "time")
MAX_POINTS = 300
"""Points of a curve; of more, neighbours are averaged."""

STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1060px; padding: 0 1em; color: #222; }
h2 { margin: 1.6em 0 .4em; } .grid { display: flex; flex-wrap: wrap; gap: 18px; } figure { margin: 0; width: 330px; }
figcaption { font-size: 13px; color: #555; } figcaption b { color: #222; } .key { font-weight: bold; margin-right: 1.2em; }
svg text { font: 11px system-ui, sans-serif; fill: #555; }
"""

Row = Mapping[str, Any]
Point = tuple[float, float]


class RunCurves(NamedTuple):
    """The metrics of a run: a row for each step and for each evaluation, with `step` and values by name."""

    run_id: str
    state: str
    steps: Sequence[Row]
    evaluations: Sequence[Row]


def report_page(runs: Sequence[RunCurves]) -> str:
    """Return the page as HTML."""
    names = ", ".join(run.run_id for run in runs)
    key = "".join(
        f'<span class="key" style="color:{_colour(i)}">{escape(run.run_id)} ({escape(run.state)}, {len(run.steps)} steps)'
        "</span>"
        for i, run in enumerate(runs)
    )
    return page(names, f"<h1>{escape(names)}</h1><p>{key}</p>{curve_sections(runs)}")


def page(title: str, body: str, style: str = "") -> str:
    """Return a whole document, in which nothing can run or be loaded."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}{style}</style></head>'
        f"<body>{body}</body></html>\n"
    )


def curve_sections(runs: Sequence[RunCurves]) -> str:
    """Return a section of charts for each part of docs/metrics.md that the runs have metrics of."""
    sections = []
    for kind, rows_of in (("train", _steps), ("eval", _evaluations)):
        metrics = dict.fromkeys(
            name for run in runs for row in rows_of(run) for name in row if name not in NO_METRICS
        )
        for title, members in _by_part(kind, metrics):
            figures = "".join(
                _figure(kind, name, [points(rows_of(run), name) for run in runs]) for name in members
            )
            if figures:
                sections.append(f'<h2>{escape(title)}</h2><div class="grid">{figures}</div>')
    return "".join(sections) or "<p>No step is recorded yet.</p>"


def _by_part(kind: str, names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return the names by the sections of docs/metrics.md, in its order; names without an entry at the end."""
    order = {metric: (p, i) for p, part in enumerate(PARTS) for i, metric in enumerate(part.metrics)}
    placed: dict[str, list[tuple[int, int, str]]] = {}
    for name in names:
        metric = metric_of(kind, name)
        p, i = (len(PARTS), 0) if metric is None else order[metric]
        title = "Others" if metric is None else PARTS[p].title
        placed.setdefault(title, []).append((p, i, name))
    sections = sorted(placed.items(), key=lambda item: min(item[1])[0])
    return [(title, [name for _, _, name in sorted(members)]) for title, members in sections]


def _figure(kind: str, name: str, curves: Sequence[list[Point]]) -> str:
    """Return a chart with its caption; nothing for a metric that has no number."""
    points = [point for curve in curves for point in curve]
    if not points:
        return ""
    metric = metric_of(kind, name)
    unit = f" [{escape(metric.unit)}]" if metric is not None and metric.unit else ""
    meaning = "" if metric is None else escape(metric.meaning)
    last = ", ".join(f"{curve[-1][1]:.4g}" for curve in curves if curve)
    return f"<figure>{_svg(curves)}<figcaption><b>{escape(name)}</b>{unit} {last}<br>{meaning}</figcaption></figure>"


def _svg(curves: Sequence[list[Point]]) -> str:
    xs = [x for curve in curves for x, _ in curve]
    ys = [y for curve in curves for _, y in curve]
    x_range, y_range = (min(xs), max(xs)), (min(ys), max(ys))

    def at(point: Point) -> str:
        x = LEFT + place_between(point[0], x_range) * (WIDTH - LEFT - 8)
        y = TOP + (1 - place_between(point[1], y_range)) * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f},{y:.1f}"

    lines = []
    for i, curve in enumerate(curves):
        style = f'stroke="{_colour(i)}" fill="none" stroke-width="1.6"'
        if len(curve) == 1:
            x, y = at(curve[0]).split(",")
            lines.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{_colour(i)}"/>')
        elif curve:
            lines.append(f'<polyline points="{" ".join(map(at, curve))}" {style}/>')
    bottom, right = HEIGHT - BOTTOM, WIDTH - 8
    axes = f'<path d="M{LEFT},{TOP} V{bottom} H{right}" stroke="#999" fill="none"/>'
    labels = (
        f'<text x="{LEFT - 4}" y="{TOP + 8}" text-anchor="end">{y_range[1]:.3g}</text>'
        f'<text x="{LEFT - 4}" y="{bottom}" text-anchor="end">{y_range[0]:.3g}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 5}">{x_range[0]:.0f}</text>'
        f'<text x="{right}" y="{HEIGHT - 5}" text-anchor="end">{x_range[1]:.0f}</text>'
    )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{axes}{labels}{"".join(lines)}</svg>'


def place_between(value: float, bounds: tuple[float, float]) -> float:
    """Return where a value lies between its bounds, from 0 to 1; a half where they are equal."""
    low, high = bounds
    return (value - low) / (high - low) if high > low else 0.5


def points(rows: Sequence[Row], name: str) -> list[Point]:
    """Return (step, value) for the rows that have a finite number."""
    found = [(float(row["step"]), float(row[name])) for row in rows if _is_finite(row.get(name))]
    if len(found) <= MAX_POINTS:
        return found
    edges = [i * len(found) // MAX_POINTS for i in range(MAX_POINTS + 1)]
    return [
        (sum(x for x, _ in found[a:b]) / (b - a), sum(y for _, y in found[a:b]) / (b - a))
        for a, b in pairwise(edges)
    ]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _steps(run: RunCurves) -> Sequence[Row]:
    return run.steps


def _evaluations(run: RunCurves) -> Sequence[Row]:
    return run.evaluations


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
