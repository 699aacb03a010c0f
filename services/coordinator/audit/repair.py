"""`paceline ledger verify --repair`: repairs what can be repaired, reports each change, and leaves a copy of the file
as it was.

The coordinator must be stopped: the ledger's lock is taken. From the file up: a SQLite file that is broken is made anew
of the rows that can be read; a row in which one bit has changed gets it back from its checksum; counters are counted
again; groups whose arrays cannot be read and that no session has trained are generated again; samples with a turn that is
lost begin again, or go on from the turn before; checkpoints that are
missing or damaged are marked, so that no session begins from them. The rest needs a backup, and `verify` reports it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from paceline.encryption.storage_key import StorageKey, storage_key
from paceline.errors import Conflict, LedgerFault, NotFound
from paceline.registry.folder import SPEC
from paceline.spec.reading import spec_from_ledger
from services.coordinator.audit import artifacts, journals
from services.coordinator.audit.rescue import rescue
from services.coordinator.exchange.batches import damaged_groups
from services.coordinator.exchange.state import ActiveRun, Exchange
from services.coordinator.ledger import database
from services.coordinator.ledger.connection import lock_ledger
from services.coordinator.ledger.folders import resolved
from services.coordinator.ledger.group_queries import OPEN_SQL
from services.coordinator.ledger.integrity import row_checksums
from services.coordinator.ledger.integrity.file_check import DamagedRow, damaged_rows
from services.coordinator.ledger.integrity.lost_runs import LOST, lost_runs
from services.coordinator.ledger.integrity.report import UNREADABLE, VerifyReport
from services.coordinator.ledger.ledger import ACTIVE_STATES, Ledger
from services.coordinator.ledger.segments import DamagedRecord
from services.coordinator.sessions.starting_point import mark_damaged

Say = Callable[[str], None]


def repair(path: Path, say: Say) -> None:
    """Repair the ledger at `path`; `say` is called with a line for each change, and for each problem that cannot be
    repaired.

    Raises NotFound, Conflict when a coordinator has it, LedgerFault when nothing can be read, InvalidInput for another
    storage key.
    """
    if not path.is_file():
        raise NotFound(f"no ledger at {path}")
    key = storage_key()
    locks = lock_ledger(path)
    try:
        database.check_key(path, key)
        _keep_copy(path, say)
        _repair_file(path, key, say)
        _repair_rows(path, key, say)
    finally:
        for lock in locks:
            lock.close()
    try:
        ledger = Ledger(path)
    except Conflict as error:
        say(f"what the runs refer to was not looked at: {error}")
        return
    with contextlib.closing(ledger):
        for run in ledger.runs():
            try:
                _repair_run(ledger, run["run_id"], say)
            except UNREADABLE as error:
                say(f"run {run['run_id']}: not repaired: {error}")


def _keep_copy(path: Path, say: Say) -> None:
    number = 1
    while (copy := path.with_name(f"{path.name}.before-repair-{number}")).exists():
        number += 1
    shutil.copyfile(path, copy)
    log = path.with_name(path.name + "-wal")
    if log.exists():
        shutil.copyfile(log, copy.with_name(copy.name + "-wal"))
    say(f"{copy} is a copy of the SQLite file as it was")


def _repair_file(path: Path, key: StorageKey | None, say: Say) -> None:
    """Repair the SQLite file, so that SQLite's own check passes."""
    if _check(path, key) == []:
        return
    with contextlib.suppress(sqlite3.Error), contextlib.closing(database.connect(path, key)) as db:
        db.execute("REINDEX")
    if _check(path, key) == []:
        say("the SQLite file: its indexes were made anew")
        return
    rescue(path, key, say)
    say("the SQLite file was made anew of the rows that could be read")
    if problems := _check(path, key):
        raise LedgerFault(f"the ledger {path} cannot be repaired: {problems[0]}; restore a backup")


def _check(path: Path, key: StorageKey | None) -> list[str]:
    try:
        with contextlib.closing(database.connect(path, key, read_only=True)) as db:
            if db.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'runs'").fetchone()[0] != 1:
                return ["it shows no tables"]
            return [line for (line,) in db.execute("PRAGMA integrity_check(5)").fetchall() if line != "ok"]
    except sqlite3.Error as error:
        return [str(error)]


def _repair_rows(path: Path, key: StorageKey | None, say: Say) -> None:
    """Restore single bits, and remove events that cannot be read."""
    with contextlib.closing(database.connect(path, key)) as db:
        db.text_factory = lambda content: content.decode(errors="surrogateescape")
        row_checksums.install(db)
        db.execute("BEGIN")
        for name in row_checksums.SEALED:
            for damaged in list(damaged_rows(db, name)):
                if damaged.change is None and name == "runs":
                    damaged = _with_spec_of_folder(path, damaged)
                if damaged.change is not None:
                    _put_back(db, damaged, say)
                elif name == "runs" and not _has_spec(damaged):
                    say(
                        f"{damaged.name}: its spec is damaged, and {_spec_file(path, damaged)} has no copy of it (with a storage key none "
                        f"is written); restore a backup, or copy {SPEC} of a model that was registered from the run there and repair again"
                    )
                elif name in ("events", "episodes"):
                    _delete(db, damaged)
                    say(f"{damaged.name}: it could not be read and was taken out")
                elif name != "counters":
                    say(f"{damaged.name}: it cannot be repaired; only a backup has it")
        _find_payloads(db, say)
        for run_id in lost_runs(db):
            say(f"run {run_id}: {LOST}")
        _fill_gaps(db, say)
        db.execute("COMMIT")


def _with_spec_of_folder(path: Path, damaged: DamagedRow) -> DamagedRow:
    """Take a damaged spec from the run's folder, which has it too; where the row with it matches the checksum, that is
    what was written.
    """
    with contextlib.suppress(*UNREADABLE):
        spec = _spec_file(path, damaged).read_text()
        if row_checksums.of("runs", {**damaged.values, "spec_yaml": spec}) == damaged.seal:
            return damaged._replace(change=row_checksums.Change("spec_yaml", spec))
    return damaged


def _spec_file(path: Path, damaged: DamagedRow) -> Path:
    return Path(resolved(path.parent, damaged.values["directory"]), "spec.yaml")


def _has_spec(damaged: DamagedRow) -> bool:
    """Return whether the spec in a damaged row can still be read, so that something else in the row has changed."""
    try:
        spec_from_ledger(damaged.values["spec_yaml"])
    except UNREADABLE:
        return False
    return True


def _put_back(db: sqlite3.Connection, damaged: DamagedRow, say: Say) -> None:
    assert damaged.change is not None
    table, column = damaged.table, damaged.change.column
    values = {**damaged.values, column: damaged.change.was}
    seal = row_checksums.of(table.name, values)
    try:
        changed = db.execute(
            f"UPDATE {table.name} SET {column} = ?, seal = ? WHERE {_of_key(damaged)}",
            (damaged.change.was, seal, *map(_raw, damaged.key)),
        ).rowcount
    except sqlite3.IntegrityError as error:
        say(f"{damaged.name}: it cannot be repaired: {error}")
        return
    say(f"{damaged.name}: its column {column} {'was put back' if changed else 'could not be put back'}")


def _delete(db: sqlite3.Connection, damaged: DamagedRow) -> None:
    db.execute(
        f"DELETE FROM {damaged.table.name} WHERE {_of_key(damaged)}", [_raw(cell) for cell in damaged.key]
    )


def _of_key(damaged: DamagedRow) -> str:
    """Return the condition for a row's key. It compares bytes, because a damaged text may not be text any more."""
    return " AND ".join(f"CAST({column} AS BLOB) = CAST(? AS BLOB)" for column in damaged.table.key)


def _raw(cell: object) -> object:
    return cell.encode(errors="surrogateescape") if isinstance(cell, str) else cell


def _find_payloads(db: sqlite3.Connection, say: Say) -> None:
    """Correct the keys of payloads, whose rows carry no checksum. A row that names no group or no known kind belongs to
    a group without arrays, if their keys differ in one bit.
    """
    strays = db.execute(
        "SELECT p.rowid, p.run_id, p.group_id, p.kind FROM payloads p LEFT JOIN groups g USING (run_id, group_id)"
        " WHERE g.group_id IS NULL OR p.kind NOT IN ('result', 'prefix')"
    ).fetchall()
    if not strays:
        return
    without = db.execute(
        "SELECT run_id, group_id, 'result' FROM groups g WHERE state IN ('generated', 'scored', 'batched', 'trained')"
        " AND NOT EXISTS (SELECT 1 FROM payloads p WHERE p.run_id = g.run_id AND p.group_id = g.group_id"
        " AND p.kind = 'result')"
    ).fetchall()
    for row_id, *key in strays:
        owners = [owner for owner in without if sum(map(_changed_bits, key, owner)) == 1]
        if len(owners) == 1:
            db.execute(
                "UPDATE payloads SET run_id = ?, group_id = ?, kind = ? WHERE rowid = ?", (*owners[0], row_id)
            )
            say(f"table payloads: the arrays of group {owners[0][1]} of run {owners[0][0]} were found again")


def _changed_bits(found: object, written: object) -> int:
    """Return the number of bits in which two values of a key differ; many where type or length differ."""
    if isinstance(found, int) and isinstance(written, int):
        return (found ^ written).bit_count()
    if isinstance(found, str) and isinstance(written, str):
        pair = [text.encode(errors="surrogateescape") for text in (found, written)]
        if len(pair[0]) == len(pair[1]):
            return sum((left ^ right).bit_count() for left, right in zip(*pair, strict=True))
    return 64


def _fill_gaps(db: sqlite3.Connection, say: Say) -> None:
    """Fill gaps between events, because a client asks for the events after the last one that it has."""
    for (run_id,) in db.execute("SELECT run_id FROM runs").fetchall():
        rows = db.execute(
            "SELECT sequence FROM events WHERE run_id = ? ORDER BY sequence", (run_id,)
        ).fetchall()
        there = [row[0] for row in rows]
        lost = sorted(set(range(1, max(there, default=0) + 1)) - set(there))
        for sequence in lost:
            row = {
                "run_id": run_id,
                "sequence": sequence,
                "kind": "warning",
                "json": json.dumps({"message": "the event that was here could not be read any more"}),
            }
            db.execute(
                "INSERT INTO events (run_id, sequence, kind, json, seal) VALUES (?, ?, ?, ?, ?)",
                (*row.values(), row_checksums.of("events", row)),
            )
        if lost:
            say(f"run {run_id}: {len(lost)} events are lost; a warning is in the place of each")


def _repair_run(ledger: Ledger, run_id: str, say: Say) -> None:
    row = ledger.run(run_id)
    spec, _ = spec_from_ledger(row["spec_yaml"])
    with ledger.transaction():
        if row["state"] in ACTIVE_STATES:
            exchange = Exchange(ledger)
            exchange.active = run = ActiveRun(run_id, spec, None, None)
            _generate_again(exchange, run, say)
            journals.repair(exchange, run, say)
            for notice in exchange.take_notices():
                say(f"run {run_id}: {notice.content.get('message', notice.kind)}")
        _count_again(ledger, run_id, say)
        _mark_checkpoints(ledger, run_id, say)


def _generate_again(exchange: Exchange, run: ActiveRun, say: Say) -> None:
    """Admit the groups again whose arrays cannot be read any more, if no session has trained them."""
    ledger = exchange.ledger
    rows = exchange.ledger.db.execute(
        "SELECT p.* FROM payloads p JOIN groups g USING (run_id, group_id)"
        f" WHERE p.run_id = ? AND g.state IN {OPEN_SQL} AND p.segment IS NOT NULL",
        (run.run_id,),
    ).fetchall()
    for row in rows:
        try:
            ledger.payloads.payload(row).read()
        except DamagedRecord as damaged:
            damaged_groups.handle_damaged(exchange, run, damaged)
            state = ledger.db.execute(
                "SELECT state FROM groups WHERE run_id = ? AND group_id = ?", (run.run_id, row["group_id"])
            ).fetchone()["state"]
            say(f"group {row['group_id']}: {damaged}; it is {state} now")


def _count_again(ledger: Ledger, run_id: str, say: Say) -> None:
    """Count again from the groups; counters that no group shows (tokens that no commit took) stay as they are."""
    groups = ledger.db.execute(
        "SELECT state, reason, tokens FROM groups WHERE run_id = ? AND class = 'train'", (run_id,)
    ).fetchall()
    ended = ledger.episodes.tokens_by_reason(run_id)
    counted: Counter[str] = Counter(
        {"groups:ever_admitted": len(groups), "groups:trained": 0, "tokens:trained": 0}
    )
    for group in groups:
        if group["state"] == "dropped":
            counted[f"groups:dropped:{group['reason']}"] += 1
            counted[f"tokens:dropped:{group['reason']}"] += group["tokens"]
        elif group["state"] == "trained":
            counted["groups:trained"] += 1
            counted["tokens:trained"] += group["tokens"]
        counted["tokens:generated"] += group["tokens"]
    for reason, tokens in ended.items():
        counted[f"tokens:dropped:{reason}"] += tokens
        counted["tokens:generated"] += tokens
    on_record = ledger.counters(run_id)
    counters = {name: on_record.get(name, 0) for name in on_record if name.startswith(("groups:", "tokens:"))}
    counters.pop("tokens:wasted", None)
    for name in sorted(counted.keys() | counters.keys()):
        if counted[name] != counters.get(name, 0):
            ledger.count(run_id, name, counted[name] - counters.get(name, 0))
            say(
                f"run {run_id}: the counter {name} is {counted[name]} by its groups, was {counters.get(name, 0)}"
            )
    if ledger.run(run_id)["cursor"] != len(groups):
        say(
            f"run {run_id}: {len(groups)} prompts were drawn by its groups, on record were {ledger.run(run_id)['cursor']}"
        )
        ledger.update_run(run_id, cursor=len(groups))


def _mark_checkpoints(ledger: Ledger, run_id: str, say: Say) -> None:
    for checkpoint in ledger.checkpoints.kept(run_id):
        report = VerifyReport()
        if not checkpoint.damaged:
            artifacts.compare_checkpoint(report, "it", checkpoint, contents=True)
        if report.found:
            reason = report.found[0].text
            mark_damaged(ledger, run_id, checkpoint.path, reason)
            say(f"checkpoint {checkpoint.path}: no session begins from it any more: {reason}")
