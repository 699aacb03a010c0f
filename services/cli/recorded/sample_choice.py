"""Which samples `paceline samples` shows: those of a step, of an evaluation, or of all steps that pass filters."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from paceline.data.table_packages import need_table_packages
from paceline.errors import NotFound
from paceline.records import Records, missing_samples
from paceline.services.cli.recorded.source import Source

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
FILTERS = (
    click.option("--text", metavar="TEXT", help="Only completions that have TEXT, or whose prompt has it."),
    click.option("--group", "group_id", type=click.IntRange(min=0), help="Only this group."),
    click.option("--state", help="Groups in this state instead of batches: generated, scored, dropped …"),
    click.option("--finish-reason", metavar="REASON", help="Only completions that ended so: stop, length …"),
    click.option("--min-reward", type=float, help="Least total reward of a completion."),
    click.option("--max-reward", type=float, help="Largest total reward of a completion."),
    click.option("--min-tokens", type=click.IntRange(min=0), help="Least tokens of a completion."),
    click.option("--max-tokens", type=click.IntRange(min=0), help="Most tokens of a completion."),
    click.option("--min-age", type=int, help="Least age of a completion's oldest token, in steps."),
    click.option("--max-age", type=int, help="Largest age of a completion's oldest token, in steps."),
)


def filter_options(command: CommandT) -> CommandT:
    """Add the filters as options; each is named as the field of ListSamplesRequest."""
    for option in reversed(FILTERS):
        command = option(command)
    return command


@dataclass(frozen=True)
class SampleChoice:
    """What the options of `paceline samples` ask for."""

    step: int | None
    of_evaluation: bool
    version: int | None
    filters: dict[str, Any]
    """Fields of ListSamplesRequest that are set."""

    def groups(self, source: Source, run_id: str, limit: int) -> list[dict[str, Any]]:
        """Return the groups as `paceline samples --json` prints them, with the completions that pass alone; with filters at most
        `limit`, unless it is 0. Raises NotFound."""
        source.get(run_id)  # raises NotFound with the runs that exist
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
                        f"group {content['group_id']} cannot be read; `paceline ledger verify {run_id}` says why",
                        err=True,
                    )
        if not found:
            raise NotFound(
                f"run {run_id} has no sample that passes; `paceline runs` says how many steps it has"
            )
        return found

    def write_parquet(self, source: Source, run_id: str, destination: Path) -> int:
        """Write the completions as a table; return the number of rows. Raises NotFound."""
        need_table_packages("a Parquet file")
        import pyarrow as pa
        import pyarrow.parquet

        from paceline.files.whole_file import written_whole

        if not destination.parent.is_dir():
            raise NotFound(f"no folder {destination.parent}; make it first")
        columns = source.records.samples(run_id, **self._request(source.records, run_id, all_steps=True))
        if not columns:
            raise NotFound(f"run {run_id} has no sample that passes")
        if any(not isinstance(prompt, str) for prompt in columns["prompt"]):
            columns["prompt"] = [json.dumps(prompt) for prompt in columns["prompt"]]
        with written_whole(destination) as partial:
            pyarrow.parquet.write_table(pa.table(columns), partial, compression="zstd")
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
    """Return the content of a group whose completions are not stored."""
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
