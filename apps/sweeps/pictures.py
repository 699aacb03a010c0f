"""Draws the charts of a sweep in one HTML page that loads nothing. Pure, except that Optuna computes the importance."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.apps.reports.report_page import Block, Point, line, page
from paceline.apps.sweeps.sweep_file import Range, Sweep, Value
from paceline.errors import counted

if TYPE_CHECKING:
    import optuna

GREY = 7
FADED = 0.85
"""Paleness of the worst trial's line, from 0 to 1."""
Figure = dict[str, Any]


class Ended(NamedTuple):
    number: int
    state: str
    """Optuna's state of the trial: `COMPLETE`, `PRUNED`, `FAIL` or `RUNNING`."""
    values: dict[str, Value]
    run_id: str
    message: str
    value: float | None
    """Measured value; None unless the trial is `COMPLETE`."""
    course: Sequence[tuple[int, float]]
    """Intermediate values as (step, value)."""


def trials_of(study: optuna.Study) -> list[Ended]:
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
"""Number of completed trials from which on importances are computed."""


def importances(study: optuna.Study) -> dict[str, float]:
    """Return each key's share in the spread of the best values (PED-ANOVA, Watanabe et al. 2023); empty for few trials."""
    import optuna

    complete = [each for each in study.get_trials(deepcopy=False) if each.state.name == "COMPLETE"]
    if len(complete) < MIN_TRIALS:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about few trials, and raises for too few
            return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
    except (ValueError, RuntimeError):  # too few trials, or only one value
        return {}


def report(sweep: Sweep, trials: Sequence[Ended], shares: dict[str, float], best: Ended | None) -> str:
    ended = [each for each in trials if each.value is not None]
    names = [f"trial {each.number} ({each.run_id})" for each in ended]
    figures = [_history(sweep, ended, names)] if ended else []
    figures += [_slice(sweep, key, ended, names) for key in sweep.search] if ended else []
    figures += [_parallel(sweep, ended, names)] if ended else []
    figures += [_courses(sweep, trials)] if any(each.course for each in trials) else []
    importance = [[key, f"{share:.0%}"] for key, share in shares.items()]
    title = "Importance: share of each key in the difference between the best trials and the other trials"
    blocks: list[Block] = [*_head(sweep, trials, best), ["charts", figures]]
    blocks += [["heading", 2, title], ["table", title, ["key", "share"], importance]] if importance else []
    return page(f"Sweep {sweep.name}", [*blocks, ["heading", 2, "Trials"], _table(sweep, trials)])


def _head(sweep: Sweep, trials: Sequence[Ended], best: Ended | None) -> list[Block]:
    states = [each.state for each in trials]
    of = (
        "evaluation" if sweep.of == "evaluation" else f"trial, the mean of its last {counted(sweep.last_steps, 'step')}"
    )
    counts = (
        f"{counted(len(states), 'trial')}: {states.count('COMPLETE')} complete, {states.count('PRUNED')} pruned, "
        f"{states.count('FAIL')} failed; {sweep.direction} {sweep.metric} of each {of}."
    )
    blocks: list[Block] = [["heading", 1, f"Sweep {sweep.name}"], ["text", counts, ""]]
    if best is not None:
        values = ", ".join(f"{key} = {short(value)}" for key, value in best.values.items())
        found = f"Best: {best.value:.4g}, trial {best.number} ({best.run_id}): {values}"
        blocks.append(["text", found, "good"])
    return blocks


def _history(sweep: Sweep, ended: Sequence[Ended], names: Sequence[str]) -> Figure:
    better = max if sweep.direction == "maximize" else min
    values = [_value(each) for each in ended]
    so_far = [(float(each.number), better(values[: index + 1])) for index, each in enumerate(ended)]
    measured = [(float(each.number), _value(each)) for each in ended]
    lines = [line("best so far", so_far, colour=1), line("trials", measured, colour=0, dots=True, names=names)]
    return _figure("History", "values in the order of the trials; the line is the best so far", lines, x="trial")


def _slice(sweep: Sweep, key: str, ended: Sequence[Ended], names: Sequence[str]) -> Figure:
    """Return the value of each trial over a key. Trials with the same value of the key are put on separate lines,
    because a line has one point per x."""
    part = sweep.search[key]
    layers: list[list[tuple[Point, str]]] = []
    for each, name in zip(ended, names, strict=True):
        x = _place(sweep, key, each)
        free = next((layer for layer in layers if all(x != point[0] for point, _ in layer)), None)
        if free is None:
            layers.append(free := [])
        free.append(((x, _value(each)), name))
    lines = [
        line("trials", [point for point, _ in layer], colour=0, dots=True, names=[name for _, name in layer])
        for layer in map(sorted, layers)
    ]
    log = isinstance(part, Range) and part.log
    places = None if isinstance(part, Range) else [str(choice) for choice in part.choices]
    return _figure(key, "value of each trial over this key", lines, x=key, log=log, places=places)


def _parallel(sweep: Sweep, ended: Sequence[Ended], names: Sequence[str]) -> Figure:
    values = [_value(each) for each in ended]
    columns = [[_log_place(sweep, key, each) for each in ended] for key in sweep.search] + [values]
    shares = [_shares(column) for column in columns]
    ranks = sorted(range(len(ended)), key=lambda index: values[index], reverse=sweep.direction == "minimize")
    lines = [
        line(
            names[index],
            [(float(number), share[index]) for number, share in enumerate(shares)],
            colour=0,
            fade=FADED * (1 - rank / max(1, len(ranks) - 1)),
        )
        for rank, index in enumerate(ranks)
    ]
    places = [name.rpartition(".")[2] for name in (*sweep.search, sweep.metric)]
    meaning = "each line is a trial, the best is darkest; each column runs from its least value (0) to its greatest (1)"
    return _figure("Parallel coordinates", meaning, lines, places=places)


def _courses(sweep: Sweep, trials: Sequence[Ended]) -> Figure:
    lines = [
        line(
            f"trial {each.number}",
            [(float(step), value) for step, value in each.course],
            colour=GREY if each.state == "PRUNED" else each.number % GREY,
        )
        for each in sorted(trials, key=lambda trial: trial.state != "PRUNED")
        if each.course
    ]
    meaning = "intermediate values over steps; pruned trials are grey"
    return _figure(f"{sweep.metric} of each trial", meaning, lines)


def _figure(title: str, meaning: str, lines: Sequence[dict[str, Any]], **options: Any) -> Figure:
    return {"title": title, "meaning": meaning, "lines": lines, "legend": False, "alone": True, **options}


def _shares(column: Sequence[float]) -> list[float]:
    low, high = min(column), max(column)
    return [(value - low) / (high - low) if high > low else 0.5 for value in column]


def _place(sweep: Sweep, key: str, trial: Ended) -> float:
    """Return a trial's position on a key's axis: its number, or the index of its choice."""
    part, value = sweep.search[key], trial.values[key]
    return float(value) if isinstance(part, Range) else float(part.choices.index(value))


def _log_place(sweep: Sweep, key: str, trial: Ended) -> float:
    part, place = sweep.search[key], _place(sweep, key, trial)
    return math.log(place) if isinstance(part, Range) and part.log else place


def _value(trial: Ended) -> float:
    assert trial.value is not None
    return trial.value


def _table(sweep: Sweep, trials: Sequence[Ended]) -> Block:
    names = ["trial", "run", "outcome", sweep.metric, *sweep.search]
    rows = [
        [str(each.number), each.run_id, each.message or each.state.lower(), "" if each.value is None else f"{each.value:.4g}",
         *(short(each.values.get(key, "")) for key in sweep.search)]
        for each in trials
    ]  # fmt: skip
    return ["table", "Trials", names, rows]


def short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
