"""The third part of `verify`: compares prompts, events, evaluations, models and deaths with a run's groups, and the
files of checkpoints and of the export with their manifests."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from paceline.errors import counted
from paceline.files.names import CHECKPOINT_MANIFEST, EXPORT_MANIFEST
from paceline.files.storage import Folder
from paceline.models.evaluation_results import check_evidence, has_passed
from paceline.models.export_origin import Origin, origin_of
from paceline.services.coordinator.audit.evidence import RunRows
from paceline.services.coordinator.ledger.file_check import VerifyReport
from paceline.services.coordinator.ledger.tables.checkpoints import Checkpoint


def prompts(of_run: RunRows, report: VerifyReport) -> None:
    rows = of_run.rows(
        "SELECT p.group_id, prompt_json, columns_json, class FROM prompts p"
        " LEFT JOIN groups g ON g.run_id = p.run_id AND g.group_id = p.group_id WHERE p.run_id = ?"
    )
    for row in rows:
        subject = f"group {row['group_id']}"
        for column in ("prompt_json", "columns_json"):
            with report.reading(subject, f"the prompt (table prompts, column {column})"):
                json.loads(row[column])
        if row["class"] is None:
            report.problem(subject, "the group has a row in the table prompts, but not in the table groups")
    missing = {g["group_id"] for g in of_run.groups} - {row["group_id"] for row in rows}
    if missing:
        report.problem("groups", f"groups {sorted(missing)[:5]} have no prompt (table prompts)")


def events(of_run: RunRows, report: VerifyReport) -> None:
    """Check that events are numbered without a gap, and that each event can be read."""
    rows = of_run.rows("SELECT sequence, kind, json FROM events WHERE run_id = ? ORDER BY sequence")
    for expected, row in enumerate(rows, 1):
        subject = f"event {row['sequence']}"
        if row["sequence"] != expected:
            report.problem(subject, f"the event follows event {expected - 1}; the events between are missing")
            break
        with report.reading(subject, f"the content (table events, column json, kind {row['kind']!r})"):
            if not isinstance(json.loads(row["json"]), dict):
                report.problem(subject, "the event's content (table events, column json) is not an object")
    report.facts["events"] = len(rows)


def evaluations(of_run: RunRows, report: VerifyReport) -> None:
    """Check that the results of evaluations can be read, and that each group outside training belongs to an evaluation.
    When that evaluation has ended, the group must be scored or dropped."""
    rows = of_run.rows("SELECT * FROM evaluations WHERE run_id = ? ORDER BY step")
    for row in rows:
        subject = f"evaluation of step {row['step']}"
        with report.reading(subject, "the result (table evaluations, column result_json)"):
            json.loads(row["result_json"])
        if row["done"] not in (0, 1) or row["step"] > of_run.run["next_step"]:
            report.problem(
                subject,
                f"column done is {row['done']}, but must be 0 or 1; the step must be at most {of_run.run['next_step']}",
            )
    done = {f"eval:{row['step']}": bool(row["done"]) for row in rows}
    classes = of_run.rows("SELECT DISTINCT class, state FROM groups WHERE run_id = ? AND class != 'train'")
    for kind, state in classes:
        if kind not in done:
            report.problem(f"groups of the class {kind!r}", "the evaluation of these groups is not recorded")
        elif done[kind] and state not in ("scored", "dropped"):
            report.problem(f"groups of the class {kind!r}", f"the evaluation has ended, but some groups are {state}")


def models(of_run: RunRows, report: VerifyReport) -> None:
    """Compare registered models with batches and spec. A promoted model must have passed its gates or have a reason."""
    chains = {batch["step"] + 1: batch["chain"] for batch in of_run.batches}
    spec_sha256 = hashlib.sha256(of_run.run["spec_yaml"].encode()).hexdigest()
    found = of_run.ledger.models.of_run(of_run.run_id)
    for model in found:
        subject = f"model {model.name}:{model.version}"
        report.compare(subject, "the chain is {}, but the ledger has {}", model.chain, chains.get(model.step, ""))
        report.compare(
            subject, "the model's spec has the SHA-256 {}, but the run's spec has {}", model.spec_sha256, spec_sha256
        )
        if model.step > of_run.run["next_step"]:
            report.problem(
                subject, f"the model is of step {model.step}, but the run has trained {of_run.run['next_step']} steps"
            )
        with report.reading(subject, "its evidence"):
            check_evidence(
                model.export_sha256,
                {f"evaluation {index}": each for index, each in enumerate(model.evaluations)},
                {f"verdict {index}": each for index, each in enumerate(model.verdicts)},
            )
        for change in of_run.ledger.models.changes(model.name):
            is_unexplained = not (has_passed(model.verdicts) or change.reason)
            if change.kind == "promote" and change.version == model.version and is_unexplained:
                report.problem(subject, "the model was promoted without a passed gate, and no reason is recorded")
    if found:
        report.facts["registered_models"] = [f"{each.name}:{each.version}" for each in found]


def deaths_and_faults(of_run: RunRows, report: VerifyReport) -> None:
    """Check that deaths belong to open groups, and faults to sessions that have begun."""
    rows = of_run.rows(
        "SELECT d.group_id, state FROM deaths d LEFT JOIN groups g ON g.run_id = d.run_id AND g.group_id = d.group_id"
        " WHERE d.run_id = ? AND (state IS NULL OR state IN ('trained', 'dropped'))"
    )
    for row in rows:
        report.problem(
            f"group {row['group_id']}", f"workers died with this group (table deaths), but the group is {row['state']}"
        )
    for row in of_run.rows("SELECT session FROM session_faults WHERE run_id = ?"):
        if not 0 < row["session"] <= of_run.run["session"]:
            report.problem(f"session {row['session']}", "the session has a recorded fault, but has not begun")


def checkpoints(of_run: RunRows, report: VerifyReport) -> None:
    """Compare checkpoints with the chain, and their manifests with the registered digests. Compare the size of every
    file of a checkpoint with the manifest; for the newest checkpoint (with `deep`: for each) also the SHA-256."""
    chains = {batch["step"] + 1: batch["chain"] for batch in of_run.batches} | {0: ""}
    rows = of_run.rows("SELECT * FROM checkpoints WHERE run_id = ? ORDER BY step, session")
    usable = [row for row in rows if not row["removed"] and not row["damaged"]]
    on_disk = 0
    for row in rows:
        subject = f"checkpoint {row['path']} of step {row['step']}"
        last = of_run.run["next_batch" if of_run.has_batches else "next_step"]
        if row["step"] > last:
            report.problem(subject, f"the checkpoint is ahead of the ledger, which is at step {last}")
        elif of_run.has_batches:
            chain = chains.get(row["step"])
            report.compare(subject, "the chain is {}, but the ledger has {}", row["chain"], chain)
        if row["removed"] or row["damaged"]:
            continue
        with report.reading(subject):
            checkpoint = of_run.ledger.checkpoints.from_row(row)
            on_disk += compare_checkpoint(report, subject, checkpoint, of_run.deep or row is usable[-1])
    report.facts |= {"checkpoints": len(rows), "manifests_on_disk": on_disk}
    damaged = {str(row["path"]): str(row["damaged"]) for row in rows if row["damaged"] and not row["removed"]}
    if damaged:
        report.facts["checkpoints_marked_damaged"] = damaged


def compare_checkpoint(report: VerifyReport, subject: str, checkpoint: Checkpoint, contents: bool) -> bool:
    """Compare a checkpoint's manifest and files with the registered digest. Return whether its folder has a
    manifest."""
    folder = Folder(checkpoint.path)
    if not folder.exists():
        report.problem(subject, "the folder is missing; restore it, or mark it by `paceline ledger verify --repair`")
        return False
    if not folder.exists(CHECKPOINT_MANIFEST):
        report.problem(subject, f"the checkpoint has no {CHECKPOINT_MANIFEST}")
        return False
    digest = folder.sha256(CHECKPOINT_MANIFEST)
    report.compare(subject, "the manifest has the SHA-256 {}, but the ledger has {}", digest, checkpoint.sha256)
    if digest == checkpoint.sha256:
        compare_files(report, subject, folder, json.loads(folder.read(CHECKPOINT_MANIFEST))["files"], contents)
    return True


def compare_files(
    report: VerifyReport, subject: str, folder: Folder, listed: list[dict[str, Any]], contents: bool
) -> None:
    """Compare the files of a manifest by size and, with `contents`, by SHA-256."""
    present = folder.files()
    for file in listed:
        name, size_bytes = file["path"], file["size_bytes"]
        if name not in present:
            report.problem(subject, f"the file {name} is missing")
        elif present[name] != size_bytes:
            report.problem(subject, f"the file {name} has {present[name]} bytes, but the manifest says {size_bytes}")
        elif contents and (digest := folder.sha256(name)) != file["sha256"]:
            report.problem(subject, f"the file {name} has the SHA-256 {digest}, but the manifest says {file['sha256']}")


def export(of_run: RunRows, report: VerifyReport) -> None:
    """Compare the files of the exported model, if they are still in their folder, with the manifest and the run."""
    path = of_run.ledger.export_path(of_run.run_id)
    if not path:
        return
    folder = Folder(path)
    subject = f"export {folder}"
    if not folder.exists():
        report.facts["export"] = f"{folder} does not exist any more"
    elif not folder.exists(EXPORT_MANIFEST):
        report.facts["export"] = f"{folder} has no manifest"
    else:
        with report.reading(subject):
            listed = json.loads(folder.read(EXPORT_MANIFEST))["files"]
            compare_files(report, subject, folder, listed, contents=True)
            _compare_origin(of_run, report, subject, origin_of(folder))
            report.facts["export"] = f"{folder}: {counted(len(listed), 'file')}"


def _compare_origin(of_run: RunRows, report: VerifyReport, subject: str, origin: Origin | None) -> None:
    if origin is None:
        report.problem(subject, "the files of the export name no run")
        return
    report.compare(subject, "the files name the run {}, but the export is of run {}", origin.run_id, of_run.run_id)
    chains = {batch["step"] + 1: batch["chain"] for batch in of_run.batches} | {0: ""}
    if of_run.has_batches:
        report.compare(subject, "the chain is {}, but the ledger has {}", origin.chain, chains.get(origin.step))
