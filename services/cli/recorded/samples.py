"""`paceline samples`: shows what a run trained on or what it answered in an evaluation, and exports it. It needs no coordinator,
and takes one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from paceline.services.cli import render
from paceline.services.cli.recorded.sample_choice import SampleChoice, filter_options
from paceline.services.cli.recorded.source import records_of_run, source_options
from paceline.services.common.options import json_option, print_json

SHOWN = 4
"""Groups that are shown unless --limit says otherwise."""


class _ShowByDefault(click.Group):
    """Group in which `samples RUN` is `samples show RUN`. No run has the name of a command, because every run's id ends
    with a number."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ShowByDefault)
def samples() -> None:
    """Show the groups that a step trained on (samples RUN --step STEP) or those of an evaluation (samples RUN --eval), or
    write those of all steps to a file."""


@samples.command("export")
@click.argument("run")
@click.argument("destination", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--pairs",
    is_flag=True,
    help="Write the best and the worst completion of each group, as for `paceline dpo`.",
)
@click.option(
    "--best",
    "at_least",
    type=float,
    metavar="REWARD",
    help="With --pairs: least total reward of the best one.",
)
@click.option(
    "--worst",
    "at_most",
    type=float,
    metavar="REWARD",
    help="With --pairs: largest total reward of the worst one.",
)
@source_options
@json_option
def export_all(
    run: str,
    destination: Path,
    pairs: bool,
    at_least: float | None,
    at_most: float | None,
    directory: Path,
    coordinator: str | None,
    as_json: bool,
) -> None:
    """Write every completion that RUN (its id or its folder) trained on to DESTINATION: .parquet, .jsonl or .csv.

    A row has prompt, completion, the data set's columns, tokens, log-probabilities and versions by token, rewards by
    function, final_reward. With --pairs it has prompt, chosen, rejected and both rewards. `data.train: DESTINATION`
    trains on the file.
    """
    from paceline.services.cli.recorded.sample_files import export_samples

    if not pairs and (at_least is not None or at_most is not None):
        raise click.UsageError("--best and --worst are bounds of --pairs; add --pairs")
    if at_least is not None and at_most is not None and at_most > at_least:
        raise click.UsageError(
            f"--worst {at_most:g} is above --best {at_least:g}; the best completion has the larger reward"
        )
    bounds = (_or(at_least, float("-inf")), _or(at_most, float("inf"))) if pairs else None
    with records_of_run(run, directory, coordinator) as (source, run_id):
        source.get(run_id)  # raises NotFound with the runs that exist
        rows = export_samples(source.records, run_id, destination, pairs=bounds)
    if as_json:
        print_json({"path": str(destination), "rows": rows})
    else:
        click.echo(f"{destination}: {rows:,} {'pairs' if pairs else 'completions'} of {run_id}")


@samples.command()
@click.argument("run")
@click.option("--step", type=click.IntRange(min=0), help="Step of the batch to show; default the newest.")
@click.option("--eval", "of_evaluation", is_flag=True, help="Show the completions of an evaluation instead.")
@click.option(
    "--version", type=click.IntRange(min=0), help="With --eval: the version evaluated; default the newest."
)
@click.option(
    "--limit", type=click.IntRange(min=0), help=f"Groups to show; 0 is all. Default {SHOWN}; with --json all."
)
@click.option(
    "--best", type=click.IntRange(min=1), metavar="N", help="Show the N completions with the highest reward."
)
@click.option(
    "--worst", type=click.IntRange(min=1), metavar="N", help="Show the N completions with the lowest reward."
)
@filter_options
@click.option(
    "--parquet",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the completions as a table to this file instead, those of all steps unless --step is given.",
)
@click.option("--no-pager", is_flag=True, help="Print at once, also on a terminal.")
@source_options
@json_option
def show(
    run: str,
    step: int | None,
    of_evaluation: bool,
    version: int | None,
    limit: int | None,
    best: int | None,
    worst: int | None,
    parquet: Path | None,
    no_pager: bool,
    directory: Path,
    coordinator: str | None,
    as_json: bool,
    **filters: Any,
) -> None:
    """Show the groups that a step of RUN (its id or its folder) trained on, or those of an evaluation; as JSON lines with
    --json. Filters of completions look in all steps unless --step is given."""
    _check_options(step, of_evaluation, version, limit, best, worst)
    choice = SampleChoice(
        step, of_evaluation, version, {name: v for name, v in filters.items() if v is not None}
    )
    with records_of_run(run, directory, coordinator) as (source, run_id):
        if parquet is not None:
            rows = choice.write_parquet(source, run_id, parquet)
            click.echo(f"{parquet}: {rows:,} completions of {run_id}")
            return
        most = 0 if best or worst or as_json else _or(limit, SHOWN)
        groups = choice.groups(source, run_id, most)
    if best or worst:
        shown = _by_reward(groups, best=best is not None)[: best or worst]
    else:
        number = _or(limit, 0 if as_json else SHOWN)
        shown = groups[:number] if number else groups
    if as_json:
        for group in shown:
            print_json(group)
    elif no_pager or not sys.stdout.isatty():
        for line in _lines(shown, len(groups), of_evaluation):
            click.echo(line)
    else:
        os.environ.setdefault("LESS", "-FRX")  # less ends by itself where all fits on the screen
        click.echo_via_pager(f"{line}\n" for line in _lines(shown, len(groups), of_evaluation))


def _check_options(
    step: int | None,
    of_evaluation: bool,
    version: int | None,
    limit: int | None,
    best: int | None,
    worst: int | None,
) -> None:
    if of_evaluation and step is not None:
        raise click.UsageError("--step names a trained step; with --eval name the version: --version N")
    if version is not None and not of_evaluation:
        raise click.UsageError("--version goes with --eval; a trained step is --step N")
    if sum(option is not None for option in (limit, best, worst)) > 1:
        raise click.UsageError("--limit, --best and --worst exclude one another")


def _by_reward(groups: list[dict[str, Any]], *, best: bool) -> list[dict[str, Any]]:
    """Return a group for each completion that has a reward, best or worst first; equal ones in their order."""
    alone = [
        group | {"completions": [completion], "reward": completion["reward"]}
        for group in groups
        for completion in group["completions"]
        if completion["reward"] is not None
    ]
    return sorted(alone, key=lambda group: -group["reward"] if best else group["reward"])


def _lines(shown: list[dict[str, Any]], number: int, of_evaluation: bool) -> Iterator[str]:
    """Yield the text of each group, and at the end how to see those that were left out."""
    for group in shown:
        yield render.sample_text(group, of_evaluation=of_evaluation)
    if len({group["group_id"] for group in shown}) < number:
        ids = len({group["group_id"] for group in shown})
        yield f"── {ids} of {number} groups; --limit 0 shows all, --best N and --worst N sort by reward"


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
