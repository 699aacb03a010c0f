"""`paceline gate RESULT --baseline RESULT`: may a model take the place of another."""

from __future__ import annotations

import json
from pathlib import Path

import click

from services.common.options import json_option, print_json

STATUS = {"passed": 0, "failed": 1, "undecided": 2}


def _minima(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for each in given:
        name, _, value = each.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise click.UsageError(f"--min {each!r} has to look like METRIC=VALUE, such as reward=0.4")
    return found


@click.command()
@click.argument("result", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--baseline",
    required=True,
    type=click.Path(path_type=Path, exists=True),
    help="Result of the model in use.",
)
@click.option("--metric", default="reward", show_default=True, help="reward, or reward/FUNCTION.")
@click.option(
    "--max-drop", default=0.0, show_default=True, type=click.FloatRange(0), help="Drop that is accepted."
)
@click.option(
    "--margin",
    default=0.05,
    show_default=True,
    type=click.FloatRange(0),
    help="Further drop that the evaluations must exclude, else nothing is decided.",
)
@click.option(
    "--min",
    "minima",
    multiple=True,
    metavar="METRIC=VALUE",
    callback=_minima,
    help="Least value of a metric.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the interval.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="File for the verdict.")
@json_option
def gate(
    result: Path,
    baseline: Path,
    metric: str,
    max_drop: float,
    margin: float,
    minima: dict[str, float],
    seed: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Compare RESULT with a baseline's, problem by problem: exit status 0 passed, 1 failed, 2 not decidable with these
    problems.

    Both are folders or files that `paceline eval` has written; a file that was changed since is refused.
    """
    from paceline.evaluation.gate import Bounds, judge
    from paceline.evaluation.results import digest_of, read_result
    from paceline.files.whole_file import write_whole

    bounds = Bounds(max_drop, margin, minima)
    verdict = judge(*read_result(result), *read_result(baseline), bounds, metric=metric, seed=seed)
    verdict["digest"] = digest_of(verdict)
    if output is not None:
        write_whole(output, json.dumps(verdict, indent=2) + "\n")
    if as_json:
        print_json(verdict)
    else:
        click.echo("\n".join([verdict["outcome"], *verdict["reasons"]]))
    raise click.exceptions.Exit(STATUS[verdict["outcome"]])
