"""The pictures of a sweep, as SVG in one HTML page that loads nothing: history, importance, slices, parallel coordinates, and
the curves of the trials. Pure but for the importance, which Optuna computes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from services.cli.recorded.report_page import COLOURS, page, place_between
from services.cli.recorded.report_sections import escape
from services.cli.sweeping.sweep_file import Range, Sweep, Value

if TYPE_CHECKING:
    import optuna

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 220, 70, 14, 12, 34
FAINT, MARK, WORST = "#bbbbbb", COLOURS[0], 0.15
STYLE = """
figure.wide { width: 100%; } table { border-collapse: collapse; font-size: 14px; } .grid figure { width: 480px; }
th { text-align: left; color: #555; font-weight: normal; } th, td { padding: 3px 14px 3px 0; border-bottom: 1px solid #ddd; }
"""


class Ended(NamedTuple):
    """A trial, as the pictures show it."""

    number: int
    state: str
    """`COMPLETE`, `PRUNED`, `FAIL` or `RUNNING`."""
    values: dict[str, Value]
    run_id: str
    message: str
    value: float | None
    """Measured value; of a pruned trial None."""
    course: Sequence[tuple[int, float]]
    """(step, value) on the way."""


def trials_of(study: optuna.Study) -> list[Ended]:
    """Return the trials of a study that have a value for each key."""
    return [
        Ended(
            each.number, each.state.name, dict(each.params), str(each.user_attrs.get("run_id", "")),
            str(each.user_attrs.get("message", "")), each.value if each.state.name == "COMPLETE" else None,
            sorted(each.intermediate_values.items()),
        )
        for each in study.get_trials(deepcopy=False)
        if each.state.name != "WAITING"
    ]  # fmt: skip


MIN_TRIALS = 4
"""Trials that ran to their end, below which nothing is said of importance."""


def importances(study: optuna.Study) -> dict[str, float]:
    """Return the share of each key in the spread of the best values (PED-ANOVA, Watanabe et al. 2023); empty for few trials."""
    import optuna

    complete = [each for each in study.get_trials(deepcopy=False) if each.state.name == "COMPLETE"]
    if len(complete) < MIN_TRIALS:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few trials; an error says when they are too few
            return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
    except (ValueError, RuntimeError):  # too few trials, or one value only
        return {}


def report(sweep: Sweep, trials: Sequence[Ended], shares: dict[str, float], best: Ended | None) -> str:
    """Return the page."""
    ended = [each for each in trials if each.value is not None]
    counts = {
        state: len([each for each in trials if each.state == state])
        for state in ("COMPLETE", "PRUNED", "FAIL")
    }
    head = (
        f"<h1>Sweep {escape(sweep.name)}</h1><p>{counts['COMPLETE']} trials ran to their end, {counts['PRUNED']} were pruned, "
        f"{counts['FAIL']} failed; {escape(sweep.direction)} {escape(sweep.metric)} of each {escape(sweep.of)}.</p>"
    )
    if best is not None:
        values = ", ".join(f"{escape(key)} = {escape(_short(value))}" for key, value in best.values.items())
        head += f"<p>Best: <b>{best.value:.4g}</b>, trial {best.number} ({escape(best.run_id)}): {values}</p>"
    parts = []
    if ended:
        parts = [
            _figure(
                "History",
                "values in the order of the trials; the line is the best so far",
                _history(sweep, ended),
            )
        ]
        if shares:
            parts.append(
                _figure("Importance", "share of each key in what sets the best trials apart", _bars(shares))
            )
        parts += [
            _figure(key, "value of each trial over this key", _slice(sweep, key, ended))
            for key in sweep.search
        ]
        parts.append(
            _figure(
                "Parallel coordinates", "a line for each trial, the best darkest", _parallel(sweep, ended)
            )
        )
    if any(each.course for each in trials):
        caption = "on the way, over steps; pruned trials are grey"
        parts.append(_figure(f"{sweep.metric} of each trial", caption, _courses(trials)))
    body = f'{head}<div class="grid">{"".join(parts)}</div><h2>Trials</h2>{_table(sweep, trials)}'
    return page(f"Sweep {sweep.name}", body, STYLE)


class _Axes:
    """The place of values in a picture. An axis is linear or logarithmic."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], *, log_x: bool = False):
        self._log = log_x
        self._x, self._y = (min(xs), max(xs)), (min(ys), max(ys))

    def at(self, x: float, y: float) -> tuple[float, float]:
        if self._log:
            share = place_between(math.log(x), (math.log(self._x[0]), math.log(self._x[1])))
        else:
            share = place_between(x, self._x)
        across = LEFT + share * (WIDTH - LEFT - RIGHT)
        return across, TOP + (1 - place_between(y, self._y)) * (HEIGHT - TOP - BOTTOM)

    def labels(self) -> str:
        bottom = HEIGHT - BOTTOM
        return (
            f'<path d="M{LEFT},{TOP} V{bottom} H{WIDTH - RIGHT}" stroke="#999" fill="none"/>'
            + _text(LEFT - 6, TOP + 9, f"{self._y[1]:.3g}", "end")
            + _text(LEFT - 6, bottom, f"{self._y[0]:.3g}", "end")
            + _text(LEFT, HEIGHT - 14, f"{self._x[0]:.3g}", "start")
            + _text(WIDTH - RIGHT, HEIGHT - 14, f"{self._x[1]:.3g}{' (log)' if self._log else ''}", "end")
        )


def _history(sweep: Sweep, ended: Sequence[Ended]) -> str:
    better = max if sweep.direction == "maximize" else min
    values = [_value(each) for each in ended]
    so_far = [better(values[: index + 1]) for index in range(len(values))]
    axes = _Axes([each.number for each in ended], values)
    line = [axes.at(each.number, best) for each, best in zip(ended, so_far, strict=True)]
    return (
        axes.labels()
        + _line(line, COLOURS[1])
        + "".join(_dot(*axes.at(each.number, _value(each)), each) for each in ended)
    )


def _slice(sweep: Sweep, key: str, ended: Sequence[Ended]) -> str:
    part = sweep.search[key]
    places = [_place(sweep, key, each) for each in ended]
    axes = _Axes(places, [_value(each) for each in ended], log_x=isinstance(part, Range) and part.log)
    names = (
        ""
        if isinstance(part, Range)
        else _text(LEFT, HEIGHT - 2, "values: " + ", ".join(map(str, part.choices)), "start")
    )
    return (
        axes.labels()
        + names
        + "".join(
            _dot(*axes.at(place, _value(each)), each) for place, each in zip(places, ended, strict=True)
        )
    )


def _bars(shares: dict[str, float]) -> str:
    height = (HEIGHT - TOP) / len(shares)
    parts = []
    for index, (key, share) in enumerate(shares.items()):
        top = TOP + index * height
        parts.append(_text(8, top + 12, f"{key}  {share:.0%}", "start"))
        parts.append(
            f'<rect x="8" y="{top + 18:.1f}" width="{max(1.0, share * (WIDTH - 24)):.1f}" height="{min(14.0, height - 20):.1f}" '
            f'fill="{MARK}"/>'
        )
    return "".join(parts)


def _parallel(sweep: Sweep, ended: Sequence[Ended]) -> str:
    columns = [*sweep.search, sweep.metric]
    gap = (WIDTH - 2 * LEFT) / (len(columns) - 1)
    values = [_value(each) for each in ended]
    places = [[_log_place(sweep, key, each) for each in ended] for key in sweep.search] + [values]
    bounds = [(min(column), max(column)) for column in places]
    ranks = sorted(range(len(ended)), key=lambda index: values[index], reverse=sweep.direction == "minimize")
    parts = []
    for rank, index in enumerate(ranks):
        corners = [
            (
                LEFT + number * gap,
                TOP + 14 + (1 - place_between(column[index], bounds[number])) * (HEIGHT - TOP - BOTTOM - 14),
            )
            for number, column in enumerate(places)
        ]
        opacity = WORST + (1 - WORST) * rank / max(1, len(ranks) - 1)
        parts.append(f'<g opacity="{opacity:.2f}">{_line(corners, MARK)}</g>')
    for number, name in enumerate(columns):
        x = LEFT + number * gap
        parts.append(f'<path d="M{x:.1f},{TOP + 14} V{HEIGHT - BOTTOM}" stroke="#999"/>')
        parts.append(
            _text(x, TOP + (8 if number % 2 else HEIGHT - BOTTOM + 8), name.rpartition(".")[2], "middle")
        )
    return "".join(parts)


def _courses(trials: Sequence[Ended]) -> str:
    with_course = [each for each in trials if each.course]
    steps = [float(step) for each in with_course for step, _ in each.course]
    axes = _Axes(steps, [value for each in with_course for _, value in each.course])
    parts = [axes.labels()]
    for each in sorted(with_course, key=lambda trial: trial.state != "PRUNED"):
        colour = FAINT if each.state == "PRUNED" else COLOURS[each.number % len(COLOURS)]
        places = [axes.at(step, value) for step, value in each.course]
        parts.append(_line(places, colour) if len(places) > 1 else _dot(*places[0], each))
    return "".join(parts)


def _place(sweep: Sweep, key: str, trial: Ended) -> float:
    """Return where a trial lies on a key's axis: its number, or the index of its choice."""
    part, value = sweep.search[key], trial.values[key]
    return float(value) if isinstance(part, Range) else float(part.choices.index(value))


def _log_place(sweep: Sweep, key: str, trial: Ended) -> float:
    part, place = sweep.search[key], _place(sweep, key, trial)
    return math.log(place) if isinstance(part, Range) and part.log else place


def _value(trial: Ended) -> float:
    assert trial.value is not None
    return trial.value


def _line(places: Sequence[tuple[float, float]], colour: str) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{joined}" stroke="{colour}" fill="none" stroke-width="1.6"/>'


def _dot(x: float, y: float, trial: Ended) -> str:
    title = escape(f"trial {trial.number} ({trial.run_id})")
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{MARK}" fill-opacity="0.7"><title>{title}</title></circle>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _figure(title: str, caption: str, content: str) -> str:
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{content}</svg>'
        f"<figcaption><b>{escape(title)}</b><br>{escape(caption)}</figcaption></figure>"
    )


def _table(sweep: Sweep, trials: Sequence[Ended]) -> str:
    names = ("trial", "run", "outcome", sweep.metric, *sweep.search)
    rows = [
        (each.number, each.run_id, each.message or each.state.lower(), "" if each.value is None else f"{each.value:.4g}",
         *(_short(each.values.get(key, "")) for key in sweep.search))
        for each in trials
    ]  # fmt: skip
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
