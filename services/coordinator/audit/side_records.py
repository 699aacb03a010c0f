"""Comparison of the records beside a run's groups: prompts, events, evaluations, deaths, faults, registered models. A part of
`verify`."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from paceline.models.evaluation_results import check_evidence, has_passed
from paceline.services.coordinator.ledger.integrity.report import VerifyReport

if TYPE_CHECKING:
    from paceline.services.coordinator.audit.record import Record


def prompts(record: Record, report: VerifyReport) -> None:
    """Check that every group has its prompt, and that both of its columns can be read."""
    rows = record.db.execute(
        "SELECT p.group_id, prompt_json, columns_json, class FROM prompts p"
        " LEFT JOIN groups g ON g.run_id = p.run_id AND g.group_id = p.group_id WHERE p.run_id = ?",
        (record.run_id,),
    ).fetchall()
    for row in rows:
        subject = f"group {row['group_id']}"
        for column in ("prompt_json", "columns_json"):
            with report.reading(subject, f"its prompt (table prompts, column {column})"):
                json.loads(row[column])
        if row["class"] is None:
            report.problem(subject, "it has a prompt (table prompts), but is not on record itself")
    missing = {g["group_id"] for g in record.groups} - {row["group_id"] for row in rows}
    if missing:
        report.problem("groups", f"{sorted(missing)[:5]} have no prompt (table prompts)")


def events(record: Record, report: VerifyReport) -> None:
    """Check that events are numbered without a gap, and that each can be read."""
    rows = record.db.execute(
        "SELECT sequence, kind, json FROM events WHERE run_id = ? ORDER BY sequence", (record.run_id,)
    ).fetchall()
    for expected, row in enumerate(rows, 1):
        subject = f"event {row['sequence']}"
        if row["sequence"] != expected:
            report.problem(subject, f"it follows event {expected - 1}; those between them are missing")
            break
        with report.reading(subject, f"its content (table events, column json, kind {row['kind']!r})"):
            if not isinstance(json.loads(row["json"]), dict):
                report.problem(subject, "its content (table events, column json) is no object")
    report.facts["events"] = len(rows)


def evaluations(record: Record, report: VerifyReport) -> None:
    """Check that results of evaluations can be read, and that each group that is only measured belongs to an
    evaluation; to one that has ended only as a scored or dropped group.
    """
    rows = record.db.execute(
        "SELECT * FROM evaluations WHERE run_id = ? ORDER BY step", (record.run_id,)
    ).fetchall()
    for row in rows:
        subject = f"evaluation of step {row['step']}"
        with report.reading(subject, "its result (table evaluations, column result_json)"):
            json.loads(row["result_json"])
        if row["done"] not in (0, 1) or row["step"] > record.run["next_step"]:
            report.problem(subject, f"the run is at step {record.run['next_step']}, done is {row['done']}")
    done = {f"eval:{row['step']}": bool(row["done"]) for row in rows}
    classes = record.db.execute(
        "SELECT DISTINCT class, state FROM groups WHERE run_id = ? AND class != 'train'", (record.run_id,)
    ).fetchall()
    for kind, state in classes:
        if kind not in done:
            report.problem(f"groups of the class {kind!r}", "there is no such evaluation")
        elif done[kind] and state not in ("scored", "dropped"):
            report.problem(f"groups of the class {kind!r}", f"the evaluation has ended, and some are {state}")


def models(record: Record, report: VerifyReport) -> None:
    """Compare the registered models of the run with its batches and its spec, and check that a promoted one has passed its gates
    or has a reason on record.
    """
    chains = {batch["step"] + 1: batch["chain"] for batch in record.batches}
    spec_sha256 = hashlib.sha256(record.run["spec_yaml"].encode()).hexdigest()
    found = record.ledger.models.of_run(record.run_id)
    for model in found:
        subject = f"model {model.name}:{model.version}"
        report.compare(subject, "its chain is {}, the ledger's {}", model.chain, chains.get(model.step, ""))
        report.compare(subject, "its spec has the SHA-256 {}, the run's {}", model.spec_sha256, spec_sha256)
        if model.step > record.run["next_step"]:
            report.problem(subject, f"it is of step {model.step}, the run has {record.run['next_step']}")
        with report.reading(subject, "its evidence"):
            check_evidence(
                model.export_sha256,
                {f"evaluation {index}": each for index, each in enumerate(model.evaluations)},
                {f"verdict {index}": each for index, each in enumerate(model.verdicts)},
            )
        for change in record.ledger.models.changes(model.name):
            is_unexplained = not (has_passed(model.verdicts) or change.reason)
            if change.kind == "promote" and change.version == model.version and is_unexplained:
                report.problem(
                    subject, "it was promoted, but has not passed its gate and no reason is on record"
                )
    if found:
        report.facts["registered_models"] = [f"{each.name}:{each.version}" for each in found]


def deaths_and_faults(record: Record, report: VerifyReport) -> None:
    """Check that deaths belong to open groups, and faults to sessions that have begun."""
    rows = record.db.execute(
        "SELECT d.group_id, state FROM deaths d LEFT JOIN groups g ON g.run_id = d.run_id AND g.group_id = d.group_id"
        " WHERE d.run_id = ? AND (state IS NULL OR state IN ('trained', 'dropped'))",
        (record.run_id,),
    ).fetchall()
    for row in rows:
        report.problem(
            f"group {row['group_id']}", f"workers died with it (table deaths), but it is {row['state']}"
        )
    for row in record.db.execute("SELECT session FROM session_faults WHERE run_id = ?", (record.run_id,)):
        if not 0 < row["session"] <= record.run["session"]:
            report.problem(f"session {row['session']}", "it has a fault on record, but has not begun")
