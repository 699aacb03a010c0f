"""Where a model comes from, by the records of the run that trained it."""

from __future__ import annotations

import hashlib
import re

from paceline.apps.registry.statement import Lineage
from paceline.errors import InvalidInput
from paceline.models.export_origin import Origin, check_origin
from paceline.services.cli.recorded.source import Source
from paceline.spec.reading import spec_of_run, spec_to_yaml

EXPORT_OF_STEP = re.compile(r"step-(\d{1,9})")
"""Name that `paceline export` gives to a folder."""


def lineage_of(
    source: Source, run_id: str, step: int | None, export: str, origin: Origin | None = None
) -> tuple[Lineage, str]:
    """Return the lineage of a run's model after `step` steps, and the run's resolved spec.

    `origin` is what the exported files say themselves; the records have to agree. Without a step it is that of the origin, else that
    in the name of the `export` (step-N), else the run's last one. Raises NotFound, InvalidInput; Conflict where files and records
    say different things.
    """
    run = source.get(run_id)
    trained, spec_yaml = int(run.step), str(run.spec_yaml)
    if step is None and origin is not None and origin.run_id == run_id:
        step = origin.step
    if step is None:
        named = EXPORT_OF_STEP.fullmatch(export.rstrip("/").rpartition("/")[2])
        step = int(named[1]) if named else trained
    if not 0 < step <= trained:
        raise InvalidInput(
            f"--step is {step}, and run {run_id} has trained {trained}; name a step from 1 to {trained}"
        )
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
    """Return the digests that an export of the run may name: of the spec on record, and of the text that workers
    were given in its place because this version does not know a key of it."""
    given = spec_to_yaml(spec_of_run(run_id, spec_yaml)[0])
    return {hashlib.sha256(text.encode()).hexdigest() for text in (spec_yaml, given)}
