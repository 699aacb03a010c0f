"""`paceline samples`: shows or exports a run's trained samples or an evaluation's completions."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from paceline.errors import NotFound, counted
from paceline.records import Records, missing_samples
from paceline.services.cli import render
from paceline.services.cli.recorded.source import Source, records_of_run, source_options
from paceline.services.cli.render import FILE
from paceline.services.common.options import json_option, print_json

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
FILTERS = (
    click.option("--text", metavar="TEXT", help="Take only completions with TEXT in the completion or the prompt."),
    click.option("--group", "group_id", type=click.IntRange(min=0), help="Take only the group with this id."),
    click.option("--state", help="Take groups in this state: generated, scored, dropped … Default: groups of batches."),
    click.option(
        "--finish-reason", metavar="REASON", help="Take only completions that ended with this reason: stop, length …"
    ),
    click.option("--min-reward", type=float, help="Least total reward of a completion."),
    click.option("--max-reward", type=float, help="Largest total reward of a completion."),
    click.option("--min-tokens", type=click.IntRange(min=0), help="Smallest number of tokens of a completion."),
    click.option("--max-tokens", type=click.IntRange(min=0), help="Largest number of tokens of a completion."),
    click.option("--min-age", type=int, help="Least age of a completion's oldest token, in steps."),
    click.option("--max-age", type=int, help="Largest age of a completion's oldest token, in steps."),
)


def filter_options(command: CommandT) -> CommandT:
    """Add the filters as options with the names of ListSamplesRequest's fields."""
    for option in reversed(FILTERS):
        command = option(command)
    return command


@dataclass(frozen=True)
class SampleChoice:
    """The samples that the options of `paceline samples` select."""

    step: int | None
    of_evaluation: bool
    version: int | None
    filters: dict[str, Any]
    """Fields of ListSamplesRequest that are set."""

    def groups(self, source: Source, run_id: str, limit: int) -> list[dict[str, Any]]:
        """Return the groups as `paceline samples --json` prints them, with only the completions that pass the filters.
        With filters there are at most `limit` groups, unless `limit` is 0. Raises NotFound."""
        source.get(run_id)  # raises NotFound, with the existing runs
        request = self._request(source.records, run_id)
        found: list[dict[str, Any]] = []
        for group in source.records.sample_groups(run_id, full=True, **request):
            content = json.loads(group.json) if group.json else _without_completions(group)
            passed = {completion.index for completion in group.completions}
            content["completions"] = [c for i, c in enumerate(content["completions"]) if i in passed]
            found.append(content)
            if self.filters and limit and len(found) == limit:
                break
        if not (self.filters or self.of_evaluation or any(group["completions"] for group in found)):
            raise missing_samples(source.records, run_id, request["from_step"])
        if not self.filters:
            for content in found:
                if not content["completions"]:
                    click.echo(
                        f"group {content['group_id']} cannot be read; `paceline ledger verify {run_id}` names the damage",
                        err=True,
                    )
        if not found:
            raise NotFound(
                f"run {run_id} has no sample that passes the filters; `paceline runs` shows how many steps it has"
            )
        return found

    def write_parquet(self, source: Source, run_id: str, destination: Path) -> int:
        """Write the completions as a table; return the number of rows. Raises NotFound."""
        from paceline.data.table_rows import need_table_packages
        from paceline.services.cli.recorded.metrics import write_parquet

        need_table_packages("a Parquet file")
        if not destination.parent.is_dir():
            raise NotFound(f"no folder {destination.parent}; create it first")
        columns = source.records.samples(run_id, **self._request(source.records, run_id, all_steps=True))
        if not columns:
            raise NotFound(f"run {run_id} has no sample that passes the filters")
        if any(not isinstance(prompt, str) for prompt in columns["prompt"]):
            columns["prompt"] = [json.dumps(prompt) for prompt in columns["prompt"]]
        write_parquet(columns, destination)
        return len(columns["group_id"])

    def _request(self, records: Records, run_id: str, *, all_steps: bool = False) -> dict[str, Any]:
        request = dict(self.filters)
        if self.of_evaluation:
            return request | (
                {"newest_evaluation": True} if self.version is None else {"evaluated_version": self.version}
            )
        step = self.step
        if step is None and not self.filters and not all_steps:
            step = records.newest_trained_step(run_id)
        return request if step is None else request | {"from_step": step, "to_step": step}


def _without_completions(group: Any) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "step": group.step if group.HasField("step") else None,
        "state": group.state,
        "reason": group.reason,
        "attempt": group.attempt,
        "prompt": json.loads(group.prompt_json),
        "reward": group.reward if group.HasField("reward") else None,
        "completions": [],
    }


SHOWN = 4
"""Number of groups that are shown if --limit is not given."""


class _ShowByDefault(click.Group):
    """Click group that reads `samples RUN` as `samples show RUN`: a run's id ends with a number, so it is never a
    command's name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ShowByDefault)
def samples() -> None:
    """Show the groups that a step trained on (samples RUN --step STEP) or those of an evaluation (samples RUN --eval),
    or write the groups of all steps to a file."""


@samples.command("export")
@click.argument("run")
@click.argument("destination", type=FILE)
@click.option(
    "--pairs",
    is_flag=True,
    help="Write only the best and the worst completion of each group, in the format for `paceline dpo`.",
)
@click.option(
    "--best", "at_least", type=float, metavar="REWARD", help="With --pairs: least total reward of the best one."
)
@click.option(
    "--worst", "at_most", type=float, metavar="REWARD", help="With --pairs: largest total reward of the worst one."
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
    function, and final_reward. With --pairs it has prompt, chosen, rejected and both rewards. `data.train: DESTINATION`
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
        source.get(run_id)  # raises NotFound, with the existing runs
        rows = export_samples(source.records, run_id, destination, pairs=bounds)
    render.answer(
        as_json,
        {"path": str(destination), "rows": rows},
        f"{destination}: {rows:,} {'pairs' if pairs else 'completions'} of {run_id}",
    )


@samples.command()
@click.argument("run")
@click.option("--step", type=click.IntRange(min=0), help="Step of the batch to show. Default: the newest step.")
@click.option("--eval", "of_evaluation", is_flag=True, help="Show the completions of an evaluation, not of a step.")
@click.option("--version", type=click.IntRange(min=0), help="With --eval: the version evaluated; default the newest.")
@click.option(
    "--limit", type=click.IntRange(min=0), help=f"Groups to show, 0 for all. Default: {SHOWN}, or all with --json."
)
@click.option("--best", type=click.IntRange(min=1), metavar="N", help="Show the N completions with the highest reward.")
@click.option("--worst", type=click.IntRange(min=1), metavar="N", help="Show the N completions with the lowest reward.")
@filter_options
@click.option(
    "--parquet",
    type=FILE,
    help="Write a table of completions to this Parquet file. Without --step, the table has all steps.",
)
@click.option("--no-pager", is_flag=True, help="Print without a pager, also on a terminal.")
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
    """Show the groups that a step of RUN (its id or its folder) trained on, or those of an evaluation; with --json as
    JSON lines. Without --step, filters of completions search all steps."""
    _check_options(step, of_evaluation, version, limit, best, worst)
    choice = SampleChoice(step, of_evaluation, version, {name: v for name, v in filters.items() if v is not None})
    with records_of_run(run, directory, coordinator) as (source, run_id):
        if parquet is not None:
            rows = choice.write_parquet(source, run_id, parquet)
            click.echo(f"{parquet}: {counted(rows, 'completion')} of {run_id}")
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
        os.environ.setdefault("LESS", "-FRX")  # `less` ends by itself if all fits on the screen
        click.echo_via_pager(f"{line}\n" for line in _lines(shown, len(groups), of_evaluation))


def _check_options(
    step: int | None, of_evaluation: bool, version: int | None, limit: int | None, best: int | None, worst: int | None
) -> None:
    if of_evaluation and step is not None:
        raise click.UsageError("--step is for a trained step; with --eval name the version: --version N")
    if version is not None and not of_evaluation:
        raise click.UsageError("--version is for --eval; name a trained step with --step N")
    if sum(option is not None for option in (limit, best, worst)) > 1:
        raise click.UsageError("--limit, --best and --worst exclude one another")


def _by_reward(groups: list[dict[str, Any]], *, best: bool) -> list[dict[str, Any]]:
    """Return a group for each completion with a reward, best or worst first; equal rewards keep the earlier order."""
    alone = [
        group | {"completions": [completion], "reward": completion["reward"]}
        for group in groups
        for completion in group["completions"]
        if completion["reward"] is not None
    ]
    return sorted(alone, key=lambda group: -group["reward"] if best else group["reward"])


def _lines(shown: list[dict[str, Any]], number: int, of_evaluation: bool) -> Iterator[str]:
    for group in shown:
        yield render.sample_text(group, of_evaluation=of_evaluation)
    if len({group["group_id"] for group in shown}) < number:
        ids = len({group["group_id"] for group in shown})
        yield f"── {ids} of {counted(number, 'group')}; --limit 0 shows all, --best N and --worst N sort by reward"


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
