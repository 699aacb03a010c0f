"""Commands that read the records of a run: ledger verify, ledger backup, export. They need no coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.errors import NotFound
from paceline.files.names import EXPORTS, LEDGER_NAME
from services.cli import render
from services.common.options import directory_option, find_run, json_option, print_json

if TYPE_CHECKING:
    from services.coordinator.ledger.ledger import Ledger


@click.group()
def ledger() -> None:
    """Verify or back up the record of every group."""


@ledger.command()
@click.argument("run", required=False)
@click.option("--deep", is_flag=True, help="Read the contents of every checkpoint, not only of the newest.")
@click.option(
    "--repair",
    "repairs",
    is_flag=True,
    help="Repair damage first, as far as possible. Stop the coordinator before.",
)
@directory_option
@json_option
def verify(run: str | None, deep: bool, repairs: bool, directory: Path, as_json: bool) -> None:
    """Compare all records of RUN (its id or its folder; default all runs); exit status 1 if any of them disagree."""
    from services.coordinator.audit.repair import repair
    from services.coordinator.audit.verify import verify as verify_records

    path, run_id = find_run(run, directory) if run else (directory / LEDGER_NAME, "")
    done: list[str] = []
    if repairs:
        repair(path, done.append if as_json else click.echo)
    with opened_ledger(path) as opened:
        run_ids = [run_id] if run_id else [row["run_id"] for row in opened.runs()]
        reports = {run_id: verify_records(opened, run_id, deep=deep) for run_id in run_ids}
    found = {run_id: {"problems": each.problems, "facts": each.facts} for run_id, each in reports.items()}
    if as_json:
        print_json((found[run_id] if run_id else {"runs": found}) | ({"repaired": done} if repairs else {}))
    else:
        for each, report in reports.items():
            click.echo(render.verify_text(each, report.problems, report.facts))
    if any(report.problems for report in reports.values()):
        raise click.exceptions.Exit(1)


@ledger.command()
@click.argument("destination", type=click.Path(path_type=Path, dir_okay=False))
@directory_option
@json_option
def backup(destination: Path, directory: Path, as_json: bool) -> None:
    """Write a consistent copy of the ledger to the file DESTINATION, also while the coordinator runs."""
    from services.coordinator.ledger.backup import back_up

    with opened_ledger(directory / LEDGER_NAME) as opened:
        size_bytes = back_up(opened, destination)
    if as_json:
        print_json({"path": str(destination), "size_bytes": size_bytes})
    else:
        click.echo(f"{destination}: {size_bytes:,} bytes")


@click.command()
@click.argument("run")
@click.argument("destination", metavar="[FOLDER|URL]", required=False)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Type of the weights; default the run's checkpointing.export_dtype.",
)
@click.option("--adapter", is_flag=True, help="Write the LoRA adapter alone.")
@directory_option
@json_option
def export(
    run: str, destination: str | None, dtype: str | None, adapter: bool, directory: Path, as_json: bool
) -> None:
    """Write a Hugging Face model folder from the newest complete checkpoint of RUN (its id or its folder), to a folder or an
    fsspec URL (s3://bucket/model).

    Without a destination it is `exports/step-N` beside the run's checkpoints, where `run:RUN` in a spec finds it.
    A LoRA adapter is merged into its base; with --adapter the folder holds the adapter alone, as peft reads it.
    """
    from paceline.spec.reading import spec_of_run

    if adapter and dtype:
        raise click.UsageError("--dtype goes with whole models; an adapter is always float32")
    path, run_id = find_run(run, directory)
    with opened_ledger(path) as opened:
        spec = spec_of_run(run_id, opened.run(run_id)["spec_yaml"])[0]
        checkpoint = opened.checkpoints.newest(run_id)
        directory = opened.run_directory(run_id)
    if checkpoint is None:
        raise NotFound(
            f"run {run_id} has no complete checkpoint yet; checkpointing.save_period says when it makes one"
        )
    if destination is None:
        beside = (
            checkpoint.path.rpartition("/checkpoints/")[0] if not spec.checkpointing.checkpoint_dir else ""
        )
        destination = f"{beside or directory}/{EXPORTS}/step-{checkpoint.step}"
    import torch

    from learner.checkpoints.export import export_checkpoint

    export_checkpoint(
        checkpoint.path,
        destination,
        expected_sha256=checkpoint.sha256,
        policy=spec.policy,
        dtype=getattr(torch, dtype or spec.checkpointing.export_dtype),
        scoring=spec.has_scoring_head,
        adapter_only=adapter,
    )
    facts = {
        "run_id": run_id,
        "step": checkpoint.step,
        "session": checkpoint.session,
        "path": destination,
    }
    if as_json:
        print_json(facts)
    else:
        click.echo(f"{destination}: the weights of {run_id} after {checkpoint.step} steps")


@contextlib.contextmanager
def opened_ledger(path: Path) -> Iterator[Ledger]:
    """Open the ledger at `path`, read-only; explain the damage of a file that cannot be read. Raises NotFound,
    LedgerFault."""
    from services.coordinator.ledger.integrity.file_damage import explained

    with contextlib.closing(open_ledger(path)) as opened, explained(opened.db, opened.path):
        yield opened


def open_ledger(path: Path) -> Ledger:
    """Open the ledger at `path`, read-only. Raises NotFound."""
    from services.coordinator.ledger.ledger import Ledger

    try:
        return Ledger(path, read_only=True)
    except NotFound:
        raise NotFound(
            f"no ledger at {path}; name the coordinator's --directory, or the run's folder"
        ) from None
