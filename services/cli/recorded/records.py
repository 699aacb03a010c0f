"""`paceline ledger` and `paceline export`: no command needs a coordinator, and commands that only read can use one."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.client import Client
from paceline.encryption.storage_key import FILE_VARIABLE, StorageKey, storage_key
from paceline.errors import InvalidInput, NotFound, counted
from paceline.files.names import EXPORTS, LEDGER_NAME
from paceline.models.export_origin import Origin
from paceline.records import Records
from paceline.services.cli import render
from paceline.services.cli.recorded.source import (
    Source,
    address_instead,
    files_option,
    opened_ledger,
    records_of,
    records_of_run,
    run_ids,
    source_options,
)
from paceline.services.cli.render import FILE
from paceline.services.common.options import find_run, json_option, print_json

if TYPE_CHECKING:
    from paceline.v1.records_pb2 import RecordedCheckpoint
    from paceline.v1.run_pb2 import Run


@click.group()
def ledger() -> None:
    """Verify, back up or encrypt the record of every group."""


@ledger.command()
@click.argument("run", required=False)
@click.option("--deep", is_flag=True, help="Read the contents of every checkpoint, not only of the newest.")
@click.option(
    "--repair",
    "repairs",
    is_flag=True,
    help="Before the check, generate untrained groups with damaged arrays again, and mark damaged checkpoints. Stop the coordinator first.",
)
@source_options
@json_option
def verify(run: str | None, deep: bool, repairs: bool, directory: Path, coordinator: str | None, as_json: bool) -> None:
    """Compare all records of RUN (its id or its folder; default all runs); exit status 1 if any of them disagree. With
    --coordinator the records are compared on the coordinator's host."""
    from paceline.services.coordinator.audit.repair import repair

    if repairs and coordinator:
        raise click.UsageError("--repair changes files; run it on the coordinator's host, without --coordinator")
    repaired: list[str] = []
    if repairs:
        path, run_id = find_run(run, directory) if run else (directory / LEDGER_NAME, "")
        if path == directory / LEDGER_NAME and address_instead():
            raise click.UsageError("--repair changes files; run it on the coordinator's host, and name the --directory")
        repair(path, repaired.append if as_json else click.echo)
    if run:
        with records_of_run(run, directory, coordinator) as (source, run_id):
            reports = {run_id: source.records.verify(run_id, deep=deep)}
    else:
        with records_of(directory, coordinator) as source:
            run_id = ""
            reports = {each: source.records.verify(each, deep=deep) for each in run_ids(source)}
    found = {run_id: {"problems": each.problems, "facts": each.facts} for run_id, each in reports.items()}
    if as_json:
        print_json((found[run_id] if run_id else {"runs": found}) | ({"repaired": repaired} if repairs else {}))
    else:
        for each, report in reports.items():
            click.echo(render.verify_text(each, report.problems, report.facts))
    if any(report.problems for report in reports.values()):
        raise click.exceptions.Exit(1)


@ledger.command()
@click.argument("destination", type=FILE)
@files_option
@json_option
def backup(destination: Path, directory: Path, as_json: bool) -> None:
    """Write a consistent copy of the ledger to the file DESTINATION; the coordinator may keep running."""
    from paceline.services.coordinator.ledger.backup import back_up

    with opened_ledger(directory / LEDGER_NAME) as opened:
        size_bytes = back_up(opened, destination)
    if as_json:
        print_json({"path": str(destination), "size_bytes": size_bytes})
    else:
        click.echo(f"{destination}: {size_bytes:,} bytes")


@ledger.command()
@click.option(
    "--old-key-file",
    type=FILE,
    help="File with the ledger's present storage key. Leave it out for a ledger that is not encrypted yet.",
)
@files_option
def encrypt(old_key_file: Path | None, directory: Path) -> None:
    """Encrypt the ledger with the storage key from the environment. Stop the coordinator first; meanwhile the ledger's
    disk needs room for a second copy."""
    from paceline.services.coordinator.ledger.backup import encrypt_ledger

    new = storage_key()
    if new is None:
        raise InvalidInput(f"no storage key is given; name a file with the key in {FILE_VARIABLE}")
    encrypt_ledger(directory / LEDGER_NAME, _key_in(old_key_file) if old_key_file else None, new, click.echo)


def _key_in(path: Path) -> StorageKey | None:
    try:
        return storage_key({FILE_VARIABLE: str(path)})
    except InvalidInput as error:
        raise InvalidInput(str(error).replace(FILE_VARIABLE, "--old-key-file")) from None


@click.command()
@click.argument("run")
@click.argument("destination", metavar="[FOLDER|URL]", required=False)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Type of the weights. Default: the run's checkpointing.export_dtype; auto is float32 unless the spec has a precision.",
)
@click.option("--adapter", is_flag=True, help="Write only the LoRA adapter.")
@source_options
@json_option
def export(
    run: str,
    destination: str | None,
    dtype: str | None,
    adapter: bool,
    directory: Path,
    coordinator: str | None,
    as_json: bool,
) -> None:
    """Write a Hugging Face model folder from the newest complete checkpoint of RUN (its id or its folder), to a folder
    or an fsspec URL (s3://bucket/model).

    The default destination is `exports/step-N` beside the run's checkpoints, where `run:RUN` in a spec finds it. A LoRA
    adapter is merged into its base; with --adapter the folder has only the adapter, as peft reads it. With
    --coordinator the checkpoint has to be at a URL, or in a folder that this machine shares.
    """
    if adapter and dtype:
        raise click.UsageError("--dtype is for whole models; an adapter is always float32")
    from paceline.spec.reading import spec_of_run

    with records_of_run(run, directory, coordinator) as (source, run_id):
        found = source.get(run_id)
        chosen = _chosen(source, found)
    spec = spec_of_run(run_id, found.spec_yaml)[0]
    if destination is None:
        beside = chosen.path.rpartition("/checkpoints/")[0] if not spec.checkpointing.checkpoint_dir else ""
        destination = f"{beside or found.directory}/{EXPORTS}/step-{chosen.step}"
    import torch

    from paceline.learner.checkpoints.export import export_checkpoint
    from paceline.models.loading import resolved_dtype

    export_checkpoint(
        chosen.path,
        destination,
        expected_sha256=chosen.sha256,
        policy=spec.policy,
        dtype=getattr(torch, dtype or resolved_dtype(spec.export_precision, "cpu")),
        scoring=spec.has_scoring_head,
        adapter_only=adapter,
        origin=Origin(
            run_id=run_id,
            session=chosen.session,
            step=chosen.step,
            chain=chosen.chain,
            spec_sha256=hashlib.sha256(found.spec_yaml.encode()).hexdigest(),
        ),
    )
    facts = {"run_id": run_id, "step": chosen.step, "session": chosen.session, "path": destination}
    render.answer(as_json, facts, f"{destination}: the weights of {run_id} after {counted(chosen.step, 'step')}")


def _chosen(source: Source, run: Run) -> RecordedCheckpoint:
    newest = _newest(source.records, run)
    if newest is None:
        raise NotFound(
            f"run {run.run_id} has no complete checkpoint yet; checkpointing.save_period sets when the run writes a checkpoint"
        )
    if isinstance(source, Client) and "://" not in newest.path and not os.path.isdir(newest.path):
        raise NotFound(
            f"the checkpoint {newest.path} is not on this machine; export on the coordinator's host, or keep checkpoints in an "
            "object store (`--store`)"
        )
    return newest


def _newest(records: Records, run: Run) -> RecordedCheckpoint | None:
    """Return the loadable checkpoint of the highest trained step on the chain of the run's batches, or None."""
    found = [each for each in records.checkpoints(run.run_id) if not each.damaged and each.step <= run.step]
    for checkpoint in sorted(found, key=lambda each: (each.step, each.session), reverse=True):
        before = next(records.batches(run.run_id, checkpoint.step - 1), None) if checkpoint.step else None
        is_there = before is not None and before.step == checkpoint.step - 1
        if checkpoint.chain == (before.chain if before is not None and is_there else ""):
            return checkpoint
    return None
