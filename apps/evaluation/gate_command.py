"""`paceline gate RESULT --baseline RESULT`: decide whether a model may replace another.

`paceline traces compare` has the same options, report and exit statuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from paceline.services.cli import render
from paceline.services.cli.render import FILE
from paceline.services.common.options import json_option

STATUS = {"passed": 0, "failed": 1, "undecided": 2, "promote": 0, "roll back": 1, "hold": 2}
"""Maps the outcome of a gate, or a decision on traces, to the exit status."""
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def decision_options(command: CommandT) -> CommandT:
    for option in reversed(
        (
            click.option(
                "--max-drop", default=0.0, show_default=True, type=click.FloatRange(0), help="Drop that is accepted."
            ),
            click.option(
                "--margin",
                default=0.05,
                show_default=True,
                type=click.FloatRange(0),
                help="The candidate passes only if the interval excludes a drop of --max-drop plus this value.",
            ),
            click.option("--seed", default=0, show_default=True, help="Seed of the confidence intervals."),
            click.option("--output", type=FILE, help="File to write the report to, as JSON."),
            json_option,
        )
    ):
        command = option(command)
    return command


def end(report: dict[str, Any], outcome: str, lines: Sequence[str], output: Path | None, as_json: bool) -> NoReturn:
    """Write the report to `output`, if given; print the report or its lines; exit with the outcome's status."""
    from paceline.files.whole_file import write_whole

    if output is not None:
        write_whole(output, json.dumps(report, indent=2) + "\n")
    render.answer(as_json, report, "\n".join(lines))
    raise click.exceptions.Exit(STATUS[outcome])


def _bounds(_context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for each in given:
        name, _, value = each.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise click.UsageError(f"{option.opts[0]} {each!r} must look like METRIC=VALUE, such as reward=0.4")
    return found


@click.command()
@click.argument("result", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--baseline", required=True, type=click.Path(path_type=Path, exists=True), help="Result of the model in use."
)
@click.option(
    "--metric",
    default="reward",
    show_default=True,
    help="Metric to compare: reward or reward/FUNCTION; with [COLUMN=VALUE], only over the problems of that group.",
)
@click.option(
    "--min", "minima", multiple=True, metavar="METRIC=VALUE", callback=_bounds, help="Least accepted value of a metric."
)
@click.option(
    "--max",
    "maxima",
    multiple=True,
    metavar="METRIC=VALUE",
    callback=_bounds,
    help="Greatest accepted value of a metric, such as gap/reward[category].",
)
@decision_options
def gate(
    result: Path,
    baseline: Path,
    metric: str,
    minima: dict[str, float],
    maxima: dict[str, float],
    max_drop: float,
    margin: float,
    seed: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Compare RESULT with a baseline's, problem by problem. Exit status: 0 passed, 1 failed, 2 undecided with these
    problems.

    Both are folders or files that `paceline eval` has written; a file that was changed since is refused.
    """
    from paceline.apps.evaluation.gate import Bounds, judge
    from paceline.models.evaluation_results import digest_of, read_result

    bounds = Bounds(max_drop, margin, minima, maxima)
    verdict = judge(*read_result(result), *read_result(baseline), bounds, metric=metric, seed=seed)
    verdict["digest"] = digest_of(verdict)
    end(verdict, verdict["outcome"], [verdict["outcome"], *verdict["reasons"]], output, as_json)
