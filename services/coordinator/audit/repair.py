"""`paceline ledger verify --repair`: gives up unreadable data, so that the runs continue, and reports each change.

Groups with unreadable arrays that no session has trained are generated again; samples with an unreadable turn begin
again; missing or damaged checkpoints are marked, so that no session begins from them. The coordinator must be stopped;
while it runs, it makes the same changes itself when it finds such damage. Other damage needs a backup, and `verify`
reports it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from paceline.errors import LedgerFault, NotFound
from paceline.services.coordinator.audit import side_records
from paceline.services.coordinator.exchange.batches import selection
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.ledger.file_check import UNREADABLE, VerifyReport, check_file, sentence
from paceline.services.coordinator.ledger.group_queries import OPEN_SQL
from paceline.services.coordinator.ledger.ledger import ACTIVE_STATES, Ledger
from paceline.services.coordinator.ledger.segments import DamagedRecord
from paceline.services.coordinator.sessions import mark_damaged
from paceline.spec.reading import spec_from_ledger

Say = Callable[[str], None]


def repair(path: Path, say: Say) -> None:
    """Repair the runs of the ledger at `path`; call `say` with a line for each change. Raises NotFound; Conflict if a
    coordinator uses the ledger; LedgerFault for a damaged SQLite file or row; InvalidInput for a wrong storage key."""
    if not path.is_file():
        raise NotFound(f"no ledger at {path}")
    with contextlib.closing(Ledger(path, read_only=True)) as ledger:
        report = VerifyReport()
        check_file(ledger.db, report)
        if report.found:  # writing to it would destroy more, and seal damaged rows anew
            raise LedgerFault(sentence(path, report.problems[0]))
    with contextlib.closing(Ledger(path)) as ledger:
        for run in ledger.runs():
            try:
                _repair_run(ledger, run["run_id"], say)
            except UNREADABLE as error:
                say(f"run {run['run_id']}: not repaired: {error}")


def _repair_run(ledger: Ledger, run_id: str, say: Say) -> None:
    row = ledger.run(run_id)
    spec, _ = spec_from_ledger(row["spec_yaml"])
    with ledger.transaction():
        if row["state"] in ACTIVE_STATES:
            exchange = Exchange(ledger)
            exchange.activate(run := ActiveRun(run_id, spec, None, None))
            _generate_again(exchange, run, say)
            _begin_again(exchange, run, say)
            for notice in exchange.notices.take():
                say(f"run {run_id}: {notice.content.get('message', notice.kind)}")
        _mark_checkpoints(ledger, run_id, say)


def _generate_again(exchange: Exchange, run: ActiveRun, say: Say) -> None:
    ledger = exchange.ledger
    rows = ledger.rows(
        "SELECT p.* FROM payloads p JOIN groups g USING (run_id, group_id)"
        f" WHERE p.run_id = ? AND g.state IN {OPEN_SQL} AND p.segment IS NOT NULL",
        (run.run_id,),
    )
    for row in rows:
        try:
            ledger.payloads.payload(row).read()
        except DamagedRecord as damaged:
            selection.handle_damaged(exchange, run, damaged)
            query = "SELECT state FROM groups WHERE run_id = ? AND group_id = ?"
            state = ledger.value(query, (run.run_id, row["group_id"]))
            say(f"group {row['group_id']}: {damaged}; the group is {state} now")


def _begin_again(exchange: Exchange, run: ActiveRun, say: Say) -> None:
    if not run.spec.environment.is_used:
        return
    ledger = exchange.ledger
    waiting = ledger.rows(
        "SELECT group_id FROM groups WHERE run_id = ? AND state IN ('admitted', 'leased')", (run.run_id,)
    )
    for (group_id,) in waiting:
        for turn in ledger.episodes.of_group(run.run_id, group_id):
            try:
                ledger.payloads.payload(turn).read()
            except DamagedRecord as damaged:
                selection.handle_damaged(exchange, run, damaged)
                say(f"group {group_id}: sample {turn['sample']} begins again: {damaged}")


def _mark_checkpoints(ledger: Ledger, run_id: str, say: Say) -> None:
    for checkpoint in ledger.checkpoints.kept(run_id):
        report = VerifyReport()
        if not checkpoint.damaged:
            side_records.compare_checkpoint(report, "it", checkpoint, contents=True)
        if report.found:
            reason = report.found[0].text
            mark_damaged(ledger, run_id, checkpoint.path, reason)
            say(f"checkpoint {checkpoint.path}: no session begins from it any more: {reason}")
