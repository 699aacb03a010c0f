"""`paceline models register`: make a version's folder with its lineage, sign it, store it and record it."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.apps.registry.facts import model_facts
from paceline.apps.registry.statement import Lineage
from paceline.errors import AccessDenied, Busy, Conflict, InvalidInput, NotFound, NotPermitted, counted
from paceline.files.storage import Folder
from paceline.models.export_origin import Origin, check_origin, origin_of
from paceline.models.registered import check_name
from paceline.services.cli import render
from paceline.services.cli.recorded.source import Source, changing_models_of, models_of, records_of_run, source_options
from paceline.services.cli.render import FILE
from paceline.services.common.options import json_option
from paceline.spec.reading import spec_of_run, spec_to_yaml

if TYPE_CHECKING:
    from paceline.apps.registry.folder import Contents
    from paceline.v1.registry_pb2 import RegisteredModel

NOT_RECORDED = (AccessDenied, Busy, Conflict, InvalidInput, NotFound, NotPermitted)
"""Errors after which the version is certainly not recorded. After any other error its files stay."""
NAMELESS = (
    "these files name no run: they were converted after their export, or Paceline did not export them; their lineage "
    "rests on --run and --step alone"
)


@click.command()
@click.argument("name")
@click.argument("export", metavar="FOLDER|URL")
@click.option(
    "--signing-key",
    required=True,
    envvar="PACELINE_SIGNING_KEY",
    show_envvar=True,
    type=FILE,
    help="Private key (PEM), as `paceline models key` makes it.",
)
@click.option("--run", help="Run that trained the model, its id or its folder. Default: none, a model from elsewhere.")
@click.option(
    "--step",
    type=click.IntRange(1),
    help="Steps trained; default: from the files or the folder's name, else all of the run.",
)
@click.option("--parent", default="", metavar="NAME:VERSION", help="Version from which this version is derived.")
@click.option(
    "--evaluation",
    "evaluations",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="Folder that `paceline eval` has written for this model; repeatable.",
)
@click.option(
    "--verdict",
    "verdicts",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File that `paceline gate --output` has written for one of the evaluations; repeatable.",
)
@click.option("--store", metavar="FOLDER|URL", help="Root of registered models; default: `models` in --directory.")
@source_options
@json_option
def register(
    name: str,
    export: str,
    signing_key: Path,
    run: str | None,
    step: int | None,
    parent: str,
    evaluations: tuple[Path, ...],
    verdicts: tuple[Path, ...],
    store: str | None,
    directory: Path,
    coordinator: str | None,
    as_json: bool,
) -> None:
    """Register the exported model in a folder or at a URL as the next version of NAME.

    The folder is copied to the store with a model card, evaluations, verdicts, an in-toto statement on every file, and
    a signature. The version is `passed` if all of its verdicts are, else `registered`.
    """
    from paceline.apps.registry.folder import Sources, make_folder
    from paceline.learner.checkpoints.export_folder import written_beside
    from paceline.spec.reading import spec_from_ledger

    check_name(name)
    if step is not None and run is None:
        raise click.UsageError("--step belongs to a run; name the run with --run")
    if store is None and coordinator:
        raise click.UsageError("--coordinator may be on another host; name a --store that its readers can reach")
    origin = origin_of(Folder(export))
    lineage, spec_yaml = _lineage(run, step, export, origin, directory, coordinator)
    if note := _note(run, origin):
        click.echo(note, err=True)
    with models_of(directory, coordinator) as models:
        version = max((each.version for each in models.list(name)), default=0) + 1
    base_model = spec_from_ledger(spec_yaml)[0].policy.model_name if spec_yaml else ""
    sources = Sources(Folder(export), evaluations, verdicts, spec_yaml, base_model)
    root = store or str((directory / "models").resolve())
    # A name that no other registration has, because two may be under way for one version.
    place = Folder(f"{root.rstrip('/')}/{name}/{version}-{uuid.uuid4().hex[:8]}")
    with written_beside(place) as folder:
        contents = make_folder(folder, sources, name, version, lineage, parent, signing_key)
    try:
        with changing_models_of(directory, coordinator) as models:
            model = models.register(_message(name, version, lineage, parent, str(place), contents))
    except NOT_RECORDED:
        place.remove()
        raise
    render.answer(as_json, model_facts(model), f"{name}:{version} is {model.stage}; its files are in {place}")


def _lineage(
    run: str | None, step: int | None, export: str, origin: Origin | None, directory: Path, coordinator: str | None
) -> tuple[Lineage, str]:
    if run is None:
        return Lineage(), ""
    with records_of_run(run, directory, coordinator) as (source, run_id):
        return lineage_of(source, run_id, step, export, origin)


def _note(run: str | None, origin: Origin | None) -> str:
    """Return a remark on what the files say about their run; empty if they agree with --run."""
    if origin is None:
        return f"warning: {NAMELESS}" if run is not None else ""
    if run is None:
        return (
            f"warning: these files say that run {origin.run_id} exported them after {counted(origin.step, 'step')}, but they are registered "
            f"without a lineage; --run {origin.run_id} records it"
        )
    return ""


def _message(name: str, version: int, lineage: Lineage, parent: str, path: str, contents: Contents) -> RegisteredModel:
    from paceline.v1.common_pb2 import PolicyVersion
    from paceline.v1.registry_pb2 import RegisteredModel

    return RegisteredModel(
        name=name,
        version=version,
        run_id=lineage.run_id,
        policy=PolicyVersion(session=lineage.session, step=lineage.step),
        chain=lineage.chain,
        path=path,
        export_sha256=contents.export_sha256,
        statement_sha256=contents.statement_sha256,
        spec_sha256=lineage.spec_sha256,
        data=lineage.data,
        code=lineage.code,
        parent=parent,
        evaluations_json=[json.dumps(each) for each in contents.evaluations],
        verdicts_json=[json.dumps(each) for each in contents.verdicts],
    )


EXPORT_OF_STEP = re.compile(r"step-(\d{1,9})")
"""Name that `paceline export` gives the folder of a step."""


def lineage_of(
    source: Source, run_id: str, step: int | None, export: str, origin: Origin | None = None
) -> tuple[Lineage, str]:
    """Return the lineage of a run's model after `step` steps, and the run's resolved spec.

    `origin` is what the exported files say. `step` defaults to the origin's, else that in the name of the `export`
    (step-N), else the run's last one. Raises NotFound, InvalidInput, or Conflict if files and records disagree.
    """
    run = source.get(run_id)
    trained, spec_yaml = int(run.step), str(run.spec_yaml)
    if step is None and origin is not None and origin.run_id == run_id:
        step = origin.step
    if step is None:
        named = EXPORT_OF_STEP.fullmatch(export.rstrip("/").rpartition("/")[2])
        step = int(named[1]) if named else trained
    if not 0 < step <= trained:
        raise InvalidInput(f"--step is {step}, but run {run_id} has trained {trained}; name a step from 1 to {trained}")
    facts: dict[str, str] = {}
    for event in source.records.events(run_id, kinds=["state"]):
        facts |= {name: str(value) for name, value in event.content.items() if value is not None}
    batches = [
        {"step": int(batch.step), "digest": batch.digest, "chain": batch.chain}
        for batch in source.records.batches(run_id)
        if batch.step < step
    ]
    sessions = [each.session for each in source.records.checkpoints(run_id) if each.step == step]
    chain = str(batches[-1]["chain"]) if batches else ""
    if origin is not None:
        check_origin(origin, run_id, step, chain, _spec_digests(run_id, spec_yaml))
    lineage = Lineage(
        run_id=run_id,
        session=max(sessions, default=0) if origin is None else origin.session,
        step=step,
        chain=chain,
        spec_sha256=hashlib.sha256(spec_yaml.encode()).hexdigest(),
        data=facts.get("data", ""),
        code=facts.get("bundle") or facts.get("functions", ""),
        batches=tuple(batches),
        named_by_files=origin is not None,
    )
    return lineage, spec_yaml


def _spec_digests(run_id: str, spec_yaml: str) -> set[str]:
    """Return the digests that an export of the run may name: of the recorded spec, and of the text that workers got
    instead if this version does not know one of the spec's keys."""
    given = spec_to_yaml(spec_of_run(run_id, spec_yaml)[0])
    return {hashlib.sha256(text.encode()).hexdigest() for text in (spec_yaml, given)}
