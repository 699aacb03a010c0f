"""`paceline ledger verify`: compares records that were written independently of each other.

Promise: groups are compared with the durable counters and the cursor, batches with the ranks' receipts, digests with
the stored arrays, rewards and reference, open groups with their turns, the hash chain with the batches, and checkpoints
with the chain and their files. The SQLite file itself is checked first. `verify` reads one consistent snapshot and
writes nothing, so it may run beside the coordinator; any damage is a problem in the report, never an exception.

`verify` reads every array of a run and takes minutes of processor time, so `verify_apart` runs it in a separate
process, at the lowest priority and until its parent ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click

from paceline.errors import NotFound, PacelineError
from paceline.services.common.processes.starting import STARTER_VARIABLE, die_with_starter
from paceline.services.coordinator.audit import evidence, side_records
from paceline.services.coordinator.audit.evidence import RunRows
from paceline.services.coordinator.audit_log.verification import check_end
from paceline.services.coordinator.ledger.file_check import LOST, REMEDY, VerifyReport, check_file, lost_runs, tolerant
from paceline.services.coordinator.ledger.groups import OPEN_STATES
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.tables.batches import batch_digest, extend_chain
from paceline.spec.reading import spec_from_ledger
from paceline.v1 import records_pb2 as pb

STATES_WITH_STEP = ("batched", "trained")


def verify(ledger: Ledger, run_id: str, *, deep: bool = False) -> VerifyReport:
    """Compare all records of a run. With `deep`, the files of every checkpoint are read, not only those of the newest.
    `ledger` should be opened read-only. Raises NotFound if an undamaged file does not have the run."""
    report = _compare_all(ledger, run_id, deep)
    if not report.found:
        return report
    # A coordinator may have pruned files that the snapshot still refers to; a real problem is in the next snapshot too.
    again = _compare_all(ledger, run_id, deep)
    subjects = {problem.subject for problem in report.found}
    again.found = [problem for problem in again.found if problem.subject in subjects]
    return again


def _compare_all(ledger: Ledger, run_id: str, deep: bool) -> VerifyReport:
    report = VerifyReport()
    with tolerant(ledger.db):
        try:
            with report.reading("the SQLite file"):
                ledger.db.execute("BEGIN")
            check_file(ledger.db, report)
            of_run = _read(ledger, run_id, deep, report)
            if of_run is not None:
                report.facts |= {"run_id": run_id, "state": of_run.run["state"], "steps": of_run.run["next_step"]}
                # A row that cannot be read ends one comparison, not the others.
                for name, comparison in COMPARISONS.items():
                    with report.reading(name, "a record"):
                        comparison(of_run, report)
        finally:
            if ledger.db.in_transaction:
                ledger.db.execute("ROLLBACK")
    return report


def _read(ledger: Ledger, run_id: str, deep: bool, report: VerifyReport) -> RunRows | None:
    """Return the run's rows. If they cannot be read, add a problem to the report and return None. Raises NotFound."""
    if not report.found:
        try:
            ledger.run(run_id)
        except NotFound:
            if run_id not in lost_runs(ledger.db):
                raise
            report.problem(f"run {run_id}", LOST)
            return None
    with report.reading(f"run {run_id}", f"the row of the table runs, column spec_yaml, ({REMEDY})"):
        run, db = ledger.run(run_id), ledger.db
        spec, _ = spec_from_ledger(run["spec_yaml"])
        groups = db.execute(
            "SELECT group_id, state, slot, tokens, sequence_tokens, oldest_step, digest, scores_digest, rewards, functions,"
            " reward, step, rank_order, reason FROM groups WHERE run_id = ? AND class = 'train' ORDER BY group_id",
            (run_id,),
        ).fetchall()
        batches = db.execute("SELECT * FROM batches WHERE run_id = ? ORDER BY step", (run_id,)).fetchall()
        of_step: dict[int, list[sqlite3.Row]] = {}
        for group in sorted(groups, key=lambda g: -1 if g["rank_order"] is None else int(g["rank_order"])):
            if group["step"] is not None:
                of_step.setdefault(group["step"], []).append(group)
        return RunRows(ledger, run, spec, ledger.counters(run_id), groups, batches, of_step, deep)
    return None


def _groups(of_run: RunRows, report: VerifyReport) -> None:
    """Check that no group is lost: ids have no gaps, each admitted group has a row, counters agree."""
    groups, counters = of_run.groups, of_run.counters
    admitted = counters.get("groups:ever_admitted", 0)
    report.compare("groups", "{} groups are in the ledger, but {} were admitted", len(groups), admitted)
    report.compare("groups", "{} prompts were drawn, but {} groups were admitted", of_run.run["cursor"], admitted)
    missing = sorted(set(range(admitted)) - {g["group_id"] for g in groups})
    if missing:
        report.problem("groups", f"groups {missing[:5]} of the {admitted} admitted groups are missing")
    states = Counter(str(g["state"]) for g in groups)
    report.compare(
        "groups", "{} groups are trained, but {} were counted", states["trained"], counters.get("groups:trained", 0)
    )
    reasons = Counter(str(g["reason"]) for g in groups if g["state"] == "dropped")
    counted = _by_reason(counters, "groups")
    report.compare("groups", "dropped groups by reason are {}, but {} were counted", dict(reasons), counted)
    live = sum(states[state] for state in OPEN_STATES)
    report.facts |= {"groups": dict(states), "dropped": dict(reasons), "open": live}


def _slots(of_run: RunRows, report: VerifyReport) -> None:
    """Check that a group has a step exactly if its state requires one, and that no two groups have the same slot.
    If a run with a fixed, untrained batch is cancelled, the groups of the batch are dropped, but keep their step."""
    fixed_last = of_run.run["next_step"]
    for group in of_run.groups:
        subject = f"group {group['group_id']}"
        if group["reason"] == "run_ended" and group["state"] == "dropped" and group["step"] == fixed_last:
            continue
        if group["state"] not in (*OPEN_STATES, "trained", "dropped"):
            report.problem(subject, f"the group's state {group['state']!r} is unknown")
        elif (group["step"] is not None) != (group["state"] in STATES_WITH_STEP):
            report.problem(subject, f"the group is {group['state']}, but its step is {group['step']}")
    holders = Counter(g["slot"] for g in of_run.groups if g["state"] != "dropped")
    for slot, number in holders.items():
        if number > 1 or slot >= of_run.run["next_slot"]:
            text = f"{number} groups hold this slot; the run has {of_run.run['next_slot']} slots"
            report.problem(f"slot {slot}", text)
    free = of_run.rows("SELECT slot FROM free_slots WHERE run_id = ?")
    slots = sorted([*holders, *(row["slot"] for row in free)])
    if slots != list(range(of_run.run["next_slot"])):
        odd = sorted(Counter(slots).keys() ^ set(range(of_run.run["next_slot"]))) or [
            slot for slot, number in Counter(slots).items() if number > 1
        ]
        report.problem("slots", f"slots {odd[:5]} are neither held nor free, or are held or free more than once")


def _tokens(of_run: RunRows, report: VerifyReport) -> None:
    """Check that generated = trained + dropped + live, each computed from the groups and the ended lives of samples."""
    counters, groups = of_run.counters, of_run.groups
    trained = sum(g["tokens"] for g in groups if g["state"] == "trained")
    live = sum(g["tokens"] for g in groups if g["state"] in OPEN_STATES)
    dropped = dict.fromkeys((str(g["reason"]) for g in groups if g["state"] == "dropped"), 0)
    for group in groups:
        if group["state"] == "dropped":
            dropped[str(group["reason"])] += group["tokens"]
    for reason, tokens in of_run.ledger.episodes.tokens_by_reason(of_run.run_id).items():
        dropped[reason] = dropped.get(reason, 0) + tokens
    generated, booked = counters.get("tokens:generated", 0), _by_reason(counters, "tokens")
    in_books = counters.get("tokens:trained", 0)
    report.compare("tokens", "trained groups have {} tokens, but the token accounting has {}", trained, in_books)
    report.compare("tokens", "dropped tokens by reason are {}, but the token accounting has {}", dropped, booked)
    total = in_books + sum(booked.values()) + live
    report.compare("tokens", "{} tokens were generated, but trained + dropped + live are {}", generated, total)
    report.facts["tokens"] = {
        "generated": generated,
        "trained": trained,
        "dropped": sum(dropped.values()),
        "live": live,
        "wasted": counters.get("tokens:wasted", 0),
    }


def _batches(of_run: RunRows, report: VerifyReport) -> None:
    """Check that every step has one batch of B groups, and that digests and chain follow from the groups."""
    if not of_run.has_batches:
        report.compare("batches", "{} batches are in the ledger, expected {}", len(of_run.batches), 0)
        return
    run, chain, trained_chain = of_run.run, "", ""
    steps = [int(batch["step"]) for batch in of_run.batches]
    report.compare("batches", "the batches have the steps {}, expected {}", steps, list(range(run["next_batch"])))
    if not 0 <= run["next_batch"] - run["next_step"] <= 1:
        report.problem(
            "batches", f"{run['next_batch']} batches are fixed, but only {run['next_step']} steps are trained"
        )
    for step in sorted(of_run.of_step.keys() - set(steps)):
        report.problem(f"step {step}", "the step has groups, but no batch")
    for batch in of_run.batches:
        step, trained = int(batch["step"]), batch["step"] < run["next_step"]
        groups, subject = of_run.of_step.get(step, []), f"step {step}"
        report.compare(
            subject, "the batch has {} groups, but B is {}", len(groups), of_run.spec.grpo.num_prompts_per_step
        )
        order = [g["rank_order"] for g in groups]
        report.compare(subject, "the step's groups have the order {}, expected {}", order, list(range(len(groups))))
        digest = batch_digest(groups)
        report.compare(subject, "the step's groups have the digest {}, but its batch has {}", digest, batch["digest"])
        chain = extend_chain(_replaced(of_run, report, chain, batch), step, digest)
        report.compare(
            subject, "the batches up to this step have the chain {}, but the ledger has {}", chain, batch["chain"]
        )
        report.compare(subject, "the batch must have trained = {}, but has {}", trained, bool(batch["trained"]))
        wrong = [g["group_id"] for g in groups if (g["state"] == "trained") != trained]
        if wrong:
            report.problem(subject, f"groups {wrong[:5]} have states that contradict trained = {trained}")
        trained_chain = chain if trained else trained_chain
    report.compare("chain", "trained batches have the chain {}, but the run has {}", trained_chain, run["chain"])
    report.facts |= {"batches": len(steps), "chain": trained_chain}


def _replaced(of_run: RunRows, report: VerifyReport, chain: str, batch: sqlite3.Row) -> str:
    """Return the hash that the chain had before a batch: the hash of the previous step, extended by the batches of the
    same step that this batch replaced."""
    rows = of_run.rows("SELECT * FROM replaced_batches WHERE run_id = ? AND step = ? ORDER BY revision", batch["step"])
    subject = f"step {batch['step']}"
    revisions = [row["revision"] for row in rows]
    report.compare(subject, "the replaced batches are {}, expected {}", revisions, list(range(batch["revision"])))
    for row in rows:
        chain = extend_chain(chain, row["step"], row["digest"])
        text = f"the replaced batch {row['revision']} has the chain {{}}, but the ledger has {{}}"
        report.compare(subject, text, chain, row["chain"])
    return chain


def _by_reason(counters: dict[str, int], what: str) -> dict[str, int]:
    prefix = f"{what}:dropped:"
    return {name.removeprefix(prefix): n for name, n in counters.items() if name.startswith(prefix)}


COMPARISONS: dict[str, Callable[[RunRows, VerifyReport], None]] = {
    "groups": _groups,
    "slots": _slots,
    "tokens": _tokens,
    "batches": _batches,
    "receipts": evidence.receipts,
    "payloads": evidence.payloads,
    "episodes": evidence.episodes,
    "references": evidence.references,
    "prompts": side_records.prompts,
    "events": side_records.events,
    "evaluations": side_records.evaluations,
    "workers": side_records.deaths_and_faults,
    "models": side_records.models,
    "checkpoints": side_records.checkpoints,
    "export": side_records.export,
    "audit log": lambda of_run, report: check_end(of_run.ledger, report),
}
"""The comparisons. The key is the subject of the problem that is reported if the comparison cannot continue."""


NICENESS = 19
VERIFY_S = 3600.0


async def verify_apart(ledger: Path, request: pb.VerifyRunRequest) -> pb.VerifyRunResponse:
    """Return a run's report from a separate process, which ends if the caller is cancelled. Raises PacelineError."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, str(ledger), request.run_id),
        *(["--deep"] if request.deep else []),
        env=os.environ | {STARTER_VARIABLE: str(os.getpid())},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(VERIFY_S):
            output, errors = await process.communicate()
    except TimeoutError:
        raise PacelineError(f"the comparison of the records was ended after {VERIFY_S:g} s") from None
    finally:
        if process.returncode is None:  # the caller was cancelled
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        raise PacelineError(f"the comparison failed: {errors.decode(errors='replace')[-1000:]}")
    found = json.loads(output)
    return pb.VerifyRunResponse(problems=found["problems"], facts_json=json.dumps(found["facts"]))


@click.command()
@click.argument("ledger", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("run_id")
@click.option("--deep", is_flag=True)
def main(ledger: Path, run_id: str, deep: bool) -> None:
    """Print the report of RUN_ID as a JSON object."""
    die_with_starter()
    os.nice(NICENESS)
    try:
        opened = Ledger(ledger, read_only=True)
        report = verify(opened, run_id, deep=deep)
    except PacelineError as error:
        raise click.ClickException(str(error)) from None
    click.echo(json.dumps({"problems": report.problems, "facts": report.facts}))


if __name__ == "__main__":
    main()
