"""The checkpoint that a session begins from, and the check of reports on new ones.

The promise: a checkpoint that cannot be loaded ends no run. It is marked in the ledger with the reason, its files stay,
and the next session begins from the next older one, in the end from step 0. A person who resumes the run clears the
marks.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from paceline.errors import NotFound
from paceline.files.storage import Folder, checkpoint_folder
from paceline.services.coordinator.exchange.state import ActiveRun
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.sessions.session_numbers import session_of
from paceline.v1.worker_pb2 import CheckpointReport, RunReport

SHA256 = re.compile("[0-9a-f]{64}")


class Start(NamedTuple):
    """Start of a session. At step 0 there is no checkpoint: the weights are the model's."""

    step: int = 0
    path: str = ""
    sha256: str = ""
    chain: str = ""


def starting_point(ledger: Ledger, run: ActiveRun) -> Start:
    """Return the newest checkpoint that can be loaded, or step 0. Raises NotFound when the samples from there on are
    gone."""
    newest = ledger.checkpoints.newest(run.run_id)
    start = Start() if newest is None else Start(newest.step, newest.path, newest.sha256, newest.chain)
    gone = None if run.spec.logger.keep_samples else _first_step_without_samples(ledger, run, start.step)
    if gone is None:
        return start
    damaged = [
        checkpoint for checkpoint in reversed(ledger.checkpoints.kept(run.run_id)) if checkpoint.damaged
    ]
    reasons = (
        "; ".join(f"{checkpoint.path}: {checkpoint.damaged}" for checkpoint in damaged)
        or "none is registered"
    )
    raise NotFound(
        f"no checkpoint can be loaded from which training could go on ({reasons}), and the samples of step {gone} were "
        f"not kept (logger.keep_samples is false). Put a checkpoint back, then `paceline resume {run.run_id}`"
    )


def mark_damaged(ledger: Ledger, run_id: str, path: str, reason: str) -> bool:
    """Mark a checkpoint, so that no session begins from it until the marks are cleared; return False if it is not the
    run's. Inside a transaction."""
    marked = [checkpoint for checkpoint in ledger.checkpoints.kept(run_id) if checkpoint.path == path]
    ledger.checkpoints.mark_damaged(run_id, marked, reason)
    return bool(marked)


def clear_marks(ledger: Ledger, run_id: str) -> None:
    """Clear all marks, so that every checkpoint may be tried again. Inside a transaction."""
    ledger.checkpoints.clear_damage(run_id)


def refusal(ledger: Ledger, run: ActiveRun, report: CheckpointReport) -> str:
    """Return why a report of a checkpoint is refused; empty when it is accepted. The next session would open what it
    names."""
    expected = folder_of(ledger, run) / f"{report.session}-{report.step}"
    if report.path != str(expected):
        return f"path {report.path[:200]!r} is not {str(expected)!r}"
    if not SHA256.fullmatch(report.sha256):
        return f"{report.sha256[:80]!r} is no SHA-256"
    if not 0 <= report.step <= run.spec.max_num_steps:
        return f"step {report.step} is beyond the run's last, {run.spec.max_num_steps}"
    return ""


def folder_of(ledger: Ledger, run: ActiveRun) -> Folder:
    """Return the folder of the run's checkpoints."""
    return checkpoint_folder(run.spec.checkpointing, ledger.run_store(run.run_id), run.run_id)


def session_in_the_way(ledger: Ledger, run: ActiveRun | None, report: RunReport) -> int | None:
    """Return the session of the folder that a learner found in the place of its own checkpoint; None for another
    folder."""
    path, _, name = report.checkpoint_path.rpartition("/")
    session = session_of(name)
    if run is None or session is None or session < report.session or path != str(folder_of(ledger, run)):
        return None
    return session


def _first_step_without_samples(ledger: Ledger, run: ActiveRun, start: int) -> int | None:
    """Return the first step from `start` that was trained and whose groups are not kept any more."""
    end = ledger.run(run.run_id)["next_step"]
    return ledger.group_queries.first_step_without_payloads(run.run_id, start, end)
