"""Writes one HTML file that draws text, tables and charts with the dashboard's modules and uPlot, and loads nothing.

Promise: text from models and strangers stays text. It is data of the page (JSON), becomes text nodes only, and the
content security policy runs no script but the page's, identified by its digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple

from paceline.errors import counted
from paceline.services.common.reporting.metric_table import PARTS, metric_of

NO_METRICS = ("step", "time")
MAX_POINTS = 300
"""Largest number of points of a curve. If a run has more, neighbours are averaged."""
STYLES = ("vendor/uPlot.min.css", "style.css")
MODULES = ("dom.js", "charts.js")

Row = dict[str, Any]
Point = tuple[float, float]
Block = list[Any]
"""A kind of block in page.html (`heading`, `text`, `list`, `table`, `long`, `folded`, `charts`) and its arguments."""


class RunCurves(NamedTuple):
    """A row for each step and for each evaluation of a run: `step`, and values by metric."""

    run_id: str
    state: str
    steps: Sequence[Row]
    evaluations: Sequence[Row]


def page(title: str, blocks: Sequence[Block]) -> str:
    template = (files("paceline.apps.reports") / "page.html").read_text("utf-8")
    begin, _, rest = template.partition("{{modules}}")
    own, closing, end = rest.partition("</script>")
    script = _modules() + own
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style = "\n".join(map(_static, STYLES))
    content = json.dumps({"title": title, "blocks": blocks}, allow_nan=False).replace("<", "\\u003c")
    head = begin.replace("{{digest}}", digest).replace("{{style}}", style).replace("{{content}}", content)
    return head + script + closing + end


def _modules() -> str:
    """Return uPlot, with its licence, and the dashboard's modules as one source without imports and exports."""
    licence, uplot = _static("vendor/uPlot.LICENSE"), _static("vendor/uPlot.esm.js")
    uplot = uplot.replace("export { uPlot as default };", "return uPlot;")
    sources = [f"/*\n{licence}*/\nconst uPlot = (() => {{\n{uplot}\n}})();", *map(_static, MODULES)]
    return re.sub(r"^(import .*$|export (?=\w))", "", "\n".join(sources), flags=re.MULTILINE)


def _static(name: str) -> str:
    return (files("paceline.apps.dashboard") / "static" / name).read_text("utf-8")


def curves_page(runs: Sequence[RunCurves]) -> str:
    names = ", ".join(run.run_id for run in runs)
    key = [
        ["text", f"{run.run_id} ({run.state}, {counted(len(run.steps), 'step')})", f"key c{number % 8 + 1}"]
        for number, run in enumerate(runs)
    ]
    return page(names, [["heading", 1, names], *key, *curve_blocks(runs)])


def curve_blocks(runs: Sequence[RunCurves], *, tabled: bool = False) -> list[Block]:
    """Return the blocks with a chart for each metric, grouped as in the table of metrics; each run has one colour. If
    `tabled`, metrics that never moved have a row of a table instead."""
    blocks: list[Block] = []
    constant: list[list[str]] = []
    for kind, rows in (("train", [run.steps for run in runs]), ("eval", [run.evaluations for run in runs])):
        metrics = dict.fromkeys(name for each in rows for row in each for name in row if name not in NO_METRICS)
        for title, members in _by_part(kind, metrics):
            shown = []
            for name in members:
                figure = _figure(kind, name, runs, [points(each, name) for each in rows])
                values = [found for each in rows if (found := _values(each, name))]
                if tabled and values and all(len(found) > 1 and len(set(found)) == 1 for found in values):
                    constant.append([f"{title}: {figure['title']}", ", ".join(f"{found[0]:.10g}" for found in values)])
                elif values:
                    shown.append(figure)
            blocks += [["heading", 2, title], ["charts", shown]] if shown else []
    if constant:
        blocks += [
            ["heading", 2, "Metrics that never moved"],
            ["table", "Constant metrics", ["metric", "value"], constant],
        ]
    return blocks or [["text", "No value is recorded yet.", "hint"]]


def _values(rows: Sequence[Row], name: str) -> list[float]:
    """Return the finite numbers of a metric."""
    return [float(row[name]) for row in rows if _is_finite(row.get(name))]


def _by_part(kind: str, names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return the names of metrics by the parts of the table of metrics, in its order; names that it lacks come last."""
    order = {metric: (p, i) for p, part in enumerate(PARTS) for i, metric in enumerate(part.metrics)}
    placed: dict[str, list[tuple[int, int, str]]] = {}
    for name in names:
        metric = metric_of(kind, name)
        p, i = (len(PARTS), 0) if metric is None else order[metric]
        title = "Others" if metric is None else PARTS[p].title
        placed.setdefault(title, []).append((p, i, name))
    sections = sorted(placed.items(), key=lambda item: min(item[1])[0])
    return [(title, [name for _, _, name in sorted(members)]) for title, members in sections]


def _figure(kind: str, name: str, runs: Sequence[RunCurves], curves: Sequence[list[Point]]) -> dict[str, Any]:
    metric = metric_of(kind, name)
    title = f"{name} [{metric.unit}]" if metric is not None and metric.unit else name
    lines = [
        line(run.run_id if len(runs) > 1 else title, curve, colour=number)
        for number, (run, curve) in enumerate(zip(runs, curves, strict=True))
        if curve
    ]
    return {"title": title, "meaning": "" if metric is None else metric.meaning, "lines": lines}


def line(label: str, places: Sequence[Point], **options: Any) -> dict[str, Any]:
    """Return a line of a chart, with gaps for values that are not finite. `options`: of a line in the dashboard's
    charts.js."""
    ys = [y if math.isfinite(y) else None for _, y in places]
    return {"label": label, "xs": [x for x, _ in places], "ys": ys, **options}


def points(rows: Sequence[Row], name: str) -> list[Point]:
    """Return (step, value) for the rows with a finite number."""
    found = [(float(row["step"]), float(row[name])) for row in rows if _is_finite(row.get(name))]
    if len(found) <= MAX_POINTS:
        return found
    edges = [i * len(found) // MAX_POINTS for i in range(MAX_POINTS + 1)]
    return [
        (sum(x for x, _ in found[a:b]) / (b - a), sum(y for _, y in found[a:b]) / (b - a)) for a, b in pairwise(edges)
    ]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
