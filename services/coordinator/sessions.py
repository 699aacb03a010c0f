"""Numbers the learner's sessions, and decides which checkpoint a session begins from and which checkpoints are kept.

A checkpoint that cannot be loaded ends no run. It is marked in the ledger with the reason, its files stay, and the next
session begins from the next older one, or from step 0 if there is none. A person who resumes the run clears the marks.

Versions and checkpoints are named by session and step. A ledger that was restored from a backup may lack sessions that
the disk and the workers have, and a number that is assigned twice would name two sets of weights. So the number of a
new session is always larger than every number that the ledger, the disk or a worker has.

The newest checkpoints are kept, or the newest and the best by a metric. The ledger deletes its rows first, then the
learner deletes the files, so a restart never gets a deleted checkpoint if a process dies in between.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from paceline.errors import NotFound
from paceline.files.names import CHECKPOINT_MANIFEST
from paceline.files.storage import Folder, checkpoint_folder
from paceline.services.coordinator.exchange.state import ActiveRun
from paceline.services.coordinator.ledger.database import free_name
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.spec import CheckpointingSection
from paceline.v1.worker_pb2 import CheckpointReport, RunReport

SHA256 = re.compile("[0-9a-f]{64}")


class Start(NamedTuple):
    """Step and checkpoint from which a session begins. Step 0 has no checkpoint: the weights are the model's."""

    step: int = 0
    path: str = ""
    sha256: str = ""
    chain: str = ""


def starting_point(ledger: Ledger, run: ActiveRun) -> Start:
    """Return the newest loadable checkpoint, or step 0. Raises NotFound if the steps after it cannot be trained again,
    because their samples were not kept."""
    newest = ledger.checkpoints.newest(run.run_id)
    start = Start() if newest is None else Start(newest.step, newest.path, newest.sha256, newest.chain)
    if run.spec.logger.keep_samples:
        return start
    end = ledger.run(run.run_id)["next_step"]
    gone = ledger.group_queries.first_step_without_payloads(run.run_id, start.step, end)
    if gone is None:
        return start
    damaged = [each for each in reversed(ledger.checkpoints.kept(run.run_id)) if each.damaged]
    reasons = "; ".join(f"{each.path}: {each.damaged}" for each in damaged) or "no checkpoint is registered"
    raise NotFound(
        f"training cannot continue from any checkpoint that can be loaded ({reasons}), because the samples of step "
        f"{gone} were not kept (logger.keep_samples is false). Restore a checkpoint, then `paceline resume "
        f"{run.run_id}`"
    )


def mark_damaged(ledger: Ledger, run_id: str, path: str, reason: str) -> bool:
    """Mark a checkpoint, so that no session begins from it until the marks are cleared; return False if the run has no
    such checkpoint. Call it inside a transaction."""
    marked = [checkpoint for checkpoint in ledger.checkpoints.kept(run_id) if checkpoint.path == path]
    ledger.checkpoints.mark_damaged(run_id, marked, reason)
    return bool(marked)


def refusal(ledger: Ledger, run: ActiveRun, report: CheckpointReport) -> str:
    """Return why a report of a checkpoint is refused; empty if accepted. The next session opens an accepted path."""
    expected = folder_of(ledger, run) / f"{report.session}-{report.step}"
    if report.path != str(expected):
        return f"path is {report.path[:200]!r}, but must be {str(expected)!r}"
    if not SHA256.fullmatch(report.sha256):
        return f"sha256 {report.sha256[:80]!r} is not a SHA-256"
    if not 0 <= report.step <= run.spec.max_num_steps:
        return f"step is {report.step}, but must be from 0 to the run's last step, {run.spec.max_num_steps}"
    return ""


def folder_of(ledger: Ledger, run: ActiveRun) -> Folder:
    return checkpoint_folder(run.spec.checkpointing, ledger.run_store(run.run_id), run.run_id)


def session_in_the_way(ledger: Ledger, run: ActiveRun | None, report: RunReport) -> int | None:
    """Return the session of the folder that a learner found at its new checkpoint's path; None for another path."""
    path, _, name = report.checkpoint_path.rpartition("/")
    session = session_of(name)
    if run is None or session is None or session < report.session or path != str(folder_of(ledger, run)):
        return None
    return session


NAME = re.compile(r"(\d{1,18})-(\d{1,18})")
MOST_LOST = 10_000
"""Largest number of sessions by which a ledger may be behind; larger session numbers are ignored."""

log = logging.getLogger(__name__)


class OnDisk(NamedTuple):
    session: int = 0
    """Largest session in the names of the checkpoints."""
    moved: tuple[str, ...] = ()
    """Checkpoints ahead of the ledger that were set aside."""
    place: str = ""


class SessionNumbers:
    """The largest session that workers or folders of checkpoints have reported. The key is the run."""

    def __init__(self) -> None:
        self._heard: dict[str, int] = {}

    def note_session(self, run_id: str, newest: int, session: int) -> bool:
        """Note a used session number of the run; `newest` is the ledger's. Return False for an impossible number."""
        if not 0 <= session <= newest + MOST_LOST:
            log.warning("ignoring session %d of run %s: too far from the newest session, %d", session, run_id, newest)
            return False
        self._heard[run_id] = max(self._heard.get(run_id, 0), session)
        return True

    def next(self, run_id: str, newest: int) -> int:
        return max(newest, self._heard.get(run_id, 0)) + 1


def session_of(name: str) -> int | None:
    """Return the session in the name of a checkpoint's folder; None for another name."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match else None


def scan_checkpoints(
    checkpoints: Path, position: tuple[int, int], known_paths: Collection[str], *, move: bool
) -> OnDisk:
    """Return the content of the folder of a run's checkpoints; `position` is the ledger's newest session and next step.
    With `move`, complete checkpoints that are ahead of the ledger are moved to a folder beside them, where retention
    does not delete them; checkpoints of `known_paths` stay."""
    if not checkpoints.is_dir():
        return OnDisk()
    found = [
        (int(match[1]), int(match[2]), each)
        for each in checkpoints.iterdir()
        if (match := NAME.fullmatch(each.name)) and each.is_dir()
    ]
    largest = max((session for session, _, _ in found), default=0)
    ahead = [
        each
        for session, step, each in sorted(found)
        if (session > position[0] or (session == position[0] and step > position[1]))
        and str(each) not in known_paths
        and (each / CHECKPOINT_MANIFEST).exists()
    ]
    if not ahead or not move:
        return OnDisk(largest)
    place = free_name(checkpoints / "set-aside")
    place.mkdir()
    for each in ahead:
        each.rename(place / each.name)
    return OnDisk(largest, tuple(each.name for each in ahead), str(place))


class Candidate(NamedTuple):
    path: str
    value: float | None
    """Value of the metric; None if the step has none."""
    pending: bool = False
    """True until the evaluation that gives the value has ended."""


def choose(candidates: list[Candidate], settings: CheckpointingSection) -> list[str]:
    """Return the paths to keep; `candidates` are checkpoints, the oldest first. Without a metric: the newest
    `keep_top_k`. With a metric: the newest, which a restart needs, the `keep_top_k` best (the newer of equal ones),
    and those whose value is pending."""
    if settings.metric_name is None:
        return [candidate.path for candidate in candidates[-settings.keep_top_k :]]
    sign = 1.0 if settings.higher_is_better else -1.0
    valued = [(sign * c.value, age, c.path) for age, c in enumerate(candidates) if c.value is not None]
    best = {path for _, _, path in sorted(valued)[-settings.keep_top_k :]}
    return [c.path for c in candidates if c.path in best or c.pending or c is candidates[-1]]


def mark_surplus_removed(ledger: Ledger, run_id: str, settings: CheckpointingSection) -> None:
    """Mark the surplus checkpoints as removed; call it inside a transaction. A checkpoint that could not be loaded
    is counted, and it stays while it is newer than the oldest kept checkpoint."""
    kept = ledger.checkpoints.kept(run_id)
    sound = [checkpoint for checkpoint in kept if not checkpoint.damaged]
    candidates = [
        Candidate(checkpoint.path, *_value(ledger, run_id, checkpoint.step, settings)) for checkpoint in sound
    ]
    keep = set(choose(candidates, settings))
    resumable = ledger.checkpoints.newest(
        run_id
    )  # the newest checkpoint may be ahead of the receipts, and cannot be used before they arrive
    if resumable is not None:
        keep.add(resumable.path)
    oldest = min((checkpoint.step for checkpoint in sound if checkpoint.path in keep), default=0)
    keep |= {checkpoint.path for checkpoint in kept if checkpoint.damaged and checkpoint.step > oldest}
    ledger.checkpoints.mark_removed(run_id, [checkpoint for checkpoint in kept if checkpoint.path not in keep])


def kept_paths(ledger: Ledger, run_id: str) -> list[str]:
    """Return the kept checkpoints' paths, oldest first, also unloadable ones, because a person may repair them."""
    return [checkpoint.path for checkpoint in ledger.checkpoints.kept(run_id)]


def _value(ledger: Ledger, run_id: str, step: int, settings: CheckpointingSection) -> tuple[float | None, bool]:
    """Return the metric of the weights after `step` steps, and whether it is pending."""
    if settings.metric_name is None:
        return None, False
    kind, _, name = settings.metric_name.partition(":")
    if kind == "val":
        evaluation = ledger.evaluations.get(run_id, step)
        if evaluation is not None and not evaluation["done"]:
            return None, True
        metrics = None if evaluation is None else json.loads(evaluation["result_json"])
    else:
        metrics = ledger.metrics_of_step(run_id, step - 1)
    value = None if metrics is None else metrics.get(name)
    return (None if value is None else float(value)), False
