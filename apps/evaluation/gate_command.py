"""`paceline gate RESULT --baseline RESULT`: may a model take the place of another."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.apps.evaluation.decision import decision_options, end


def _bounds(_context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for each in given:
        name, _, value = each.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise click.UsageError(
                f"{option.opts[0]} {each!r} has to look like METRIC=VALUE, such as reward=0.4"
            )
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
    "--min",
    "minima",
    multiple=True,
    metavar="METRIC=VALUE",
    callback=_bounds,
    help="Least value of a metric.",
)
@click.option(
    "--max",
    "maxima",
    multiple=True,
    metavar="METRIC=VALUE",
    callback=_bounds,
    help="Greatest value of a metric, such as gap/reward[category].",
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
    """Compare RESULT with a baseline's, problem by problem: exit status 0 passed, 1 failed, 2 not decidable with these
    problems.

    Both are folders or files that `paceline eval` has written; a file that was changed since is refused.
    """
    from paceline.apps.evaluation.gate import Bounds, judge
    from paceline.models.evaluation_results import digest_of, read_result

    bounds = Bounds(max_drop, margin, minima, maxima)
    verdict = judge(*read_result(result), *read_result(baseline), bounds, metric=metric, seed=seed)
    verdict["digest"] = digest_of(verdict)
    end(verdict, verdict["outcome"], [verdict["outcome"], *verdict["reasons"]], output, as_json)
