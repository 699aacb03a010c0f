"""Comparison of a run's checkpoints and exported model with their manifests. A part of `verify`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.files.names import CHECKPOINT_MANIFEST, EXPORT_MANIFEST
from paceline.files.storage import Folder
from paceline.models.export_origin import Origin, origin_of
from paceline.services.coordinator.ledger.integrity.report import VerifyReport

if TYPE_CHECKING:
    from paceline.services.coordinator.audit.record import Record
    from paceline.services.coordinator.ledger.tables.checkpoints import Checkpoint


def checkpoints(record: Record, report: VerifyReport) -> None:
    """Compare checkpoints with the chain, and their manifests with those that were registered; of the newest one (with
    `deep`: of each) also the files of its manifest.
    """
    chains = {batch["step"] + 1: batch["chain"] for batch in record.batches} | {0: ""}
    rows = record.db.execute(
        "SELECT * FROM checkpoints WHERE run_id = ? ORDER BY step, session", (record.run_id,)
    ).fetchall()
    usable = [row for row in rows if not row["removed"] and not row["damaged"]]
    on_disk = 0
    for row in rows:
        subject = f"checkpoint {row['path']} of step {row['step']}"
        last = record.run["next_batch" if record.has_batches else "next_step"]
        if row["step"] > last:
            report.problem(subject, f"it is ahead of the ledger, which is at step {last}")
        elif record.has_batches:
            chain = chains.get(row["step"])
            report.compare(subject, "its chain is {}, the ledger's {}", row["chain"], chain)
        if row["removed"] or row["damaged"]:
            continue
        with report.reading(subject):
            checkpoint = record.ledger.checkpoints.from_row(row)
            on_disk += compare_checkpoint(report, subject, checkpoint, record.deep or row is usable[-1])
    report.facts |= {"checkpoints": len(rows), "manifests_on_disk": on_disk}
    damaged = {str(row["path"]): str(row["damaged"]) for row in rows if row["damaged"] and not row["removed"]}
    if damaged:
        report.facts["checkpoints_marked_damaged"] = damaged


def compare_checkpoint(report: VerifyReport, subject: str, checkpoint: Checkpoint, contents: bool) -> bool:
    """Compare a checkpoint's folder with the manifest that was registered, and with the manifest's files; return
    whether a manifest is there.
    """
    folder = Folder(checkpoint.path)
    if not folder.exists():
        report.problem(
            subject, "its folder is missing; put it back, or `paceline ledger verify --repair` marks it"
        )
        return False
    if not folder.exists(CHECKPOINT_MANIFEST):
        report.problem(subject, f"it has no {CHECKPOINT_MANIFEST}")
        return False
    digest = folder.sha256(CHECKPOINT_MANIFEST)
    report.compare(subject, "its manifest has the SHA-256 {}, registered is {}", digest, checkpoint.sha256)
    if digest == checkpoint.sha256:
        compare_files(
            report, subject, folder, json.loads(folder.read(CHECKPOINT_MANIFEST))["files"], contents
        )
    return True


def compare_files(
    report: VerifyReport, subject: str, folder: Folder, listed: list[dict[str, Any]], contents: bool
) -> None:
    """Compare the files of a manifest by size and, with `contents`, by SHA-256."""
    present = folder.files()
    for file in listed:
        name, size_bytes = file["path"], file["size_bytes"]
        if name not in present:
            report.problem(subject, f"its file {name} is missing")
        elif present[name] != size_bytes:
            report.problem(
                subject, f"its file {name} has {present[name]} bytes, its manifest says {size_bytes}"
            )
        elif contents and (digest := folder.sha256(name)) != file["sha256"]:
            report.problem(
                subject, f"its file {name} has the SHA-256 {digest}, its manifest says {file['sha256']}"
            )


def export(record: Record, report: VerifyReport) -> None:
    """Compare the files of the exported model, where it is still in its place, and what they say of their run."""
    path = record.ledger.export_path(record.run_id)
    if not path:
        return
    folder = Folder(path)
    subject = f"export {folder}"
    if not folder.exists():
        report.facts["export"] = f"{folder} is not there any more"
    elif not folder.exists(EXPORT_MANIFEST):
        report.facts["export"] = f"{folder} has no manifest"
    else:
        with report.reading(subject):
            listed = json.loads(folder.read(EXPORT_MANIFEST))["files"]
            compare_files(report, subject, folder, listed, contents=True)
            _compare_origin(record, report, subject, origin_of(folder))
            report.facts["export"] = f"{folder}: {len(listed)} files"


def _compare_origin(record: Record, report: VerifyReport, subject: str, origin: Origin | None) -> None:
    """Compare what an export says of its run."""
    if origin is None:
        report.problem(subject, "its files name no run")
        return
    report.compare(subject, "its files say run {}, this one is {}", origin.run_id, record.run_id)
    chains = {batch["step"] + 1: batch["chain"] for batch in record.batches} | {0: ""}
    if record.has_batches:
        report.compare(subject, "its chain is {}, the ledger's {}", origin.chain, chains.get(origin.step))
