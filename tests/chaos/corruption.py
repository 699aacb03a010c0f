"""Single bits that the disk changes: in a segment, a checkpoint, its manifest, the SQLite file or an exported model.

Each is noticed by `paceline ledger verify`, which is asked before the bit is put right. A bit of the SQLite file is met
and put right as a person would: with the coordinator stopped, by the copy from before, unless verify finds nothing. The
others stay until their time is over; then the bit is put back, because some of what it has changed
exists only once (a group that was trained), and a run that was paused for it is resumed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from chaos_watch import coordinator_address, progress

from paceline.client import Client
from paceline.errors import Conflict, PacelineError
from paceline.files.names import CHECKPOINT_MANIFEST, EXPORT_MANIFEST
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.connection import lock_ledger
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster

STOP_S = 60.0
"""Longest time until the coordinator has released its ledger."""

RESUME_S = 60.0
HELD_STATES = ("paused", "failed")

ResultT = TypeVar("ResultT")
log = logging.getLogger(__name__)


@dataclass
class Bit:
    """One changed bit of a file."""

    target: str
    path: Path
    place: int
    was: int

    def __str__(self) -> str:
        return f"a bit of byte {self.place} of {self.path.name}"

    def put_back(self) -> None:
        """Unless the file has gone, or is another one by now."""
        with contextlib.suppress(FileNotFoundError), self.path.open("r+b") as file:
            file.seek(self.place)
            (now,) = file.read(1) or b"\0"
            if (now ^ self.was).bit_count() == 1:
                file.seek(self.place)
                file.write(bytes([self.was]))


class Corruption:
    """Changes bits of a cluster's files, and puts them right."""

    def __init__(self, cluster: LocalCluster, seed: int):
        self._cluster = cluster
        self._path = cluster.directory / "ledger.sqlite"
        self._rng = random.Random(seed)
        self._bits: list[Bit] = []
        self._copy = cluster.directory / "ledger.sqlite.before-the-bit"
        self.not_found: list[str] = []
        """Changed bits that verify did not find."""

    def strike(self, target: str, run_id: str) -> bool:
        """Changes a bit and sees to it that somebody reads it; False when there is nothing of the kind now, or one of its bits
        is changed already."""
        if target in {bit.target for bit in self._bits}:
            return False
        if target == "sqlite":
            with self._stopped():
                self._copy.write_bytes(self._path.read_bytes())
                self._bits.append(self._flip("sqlite", self._path, 0, self._path.stat().st_size))
            return True
        chosen = None
        with (
            contextlib.suppress(PacelineError, sqlite3.Error),  # the SQLite file may be damaged at the time
            contextlib.closing(Ledger(self._path, read_only=True)) as ledger,
        ):
            chosen = self._choose(ledger, target, run_id)
        if chosen is None:
            return False
        self._bits.append(self._flip(target, *chosen))
        if target in ("checkpoint", "manifest"):
            self._cluster.kill("learner")
        elif target == "segment":
            self._cluster.kill("coordinator")  # which has the newest in memory
        return True

    def repair(self, target: str, run_id: str) -> None:
        """Puts right what a fault of this kind has changed, and resumes a run that waits for it."""
        for bit in [bit for bit in self._bits if bit.target == target]:
            self._bits.remove(bit)
            if target == "sqlite":
                self._repair(bit, run_id)
            else:
                try:
                    self._compare(bit, run_id)
                except (PacelineError, sqlite3.Error) as error:
                    log.info("%s cannot be looked for: %s", bit, error)
                bit.put_back()
        self._resume(run_id)

    def _choose(self, ledger: Ledger, target: str, run_id: str) -> tuple[Path, int, int] | None:
        """File, first byte and number of bytes."""
        if target == "segment":
            rows = ledger.db.execute(
                "SELECT segment, start, header_size + arrays_size AS size FROM payloads WHERE run_id = ?"
                " AND kind = 'result' AND segment IS NOT NULL ORDER BY segment, start",
                (run_id,),
            ).fetchall()
            if not rows:
                return None
            row = self._rng.choice(rows[-64:])
            return ledger.payloads.folder / f"{row['segment']:08d}.seg", row["start"], row["size"]
        if target == "export":
            folders = [ledger.export_path(row["run_id"]) for row in ledger.runs() if row["export_path"]]
            files = [path for folder in folders for path in Path(folder).glob("*.safetensors")]
        else:
            newest = ledger.checkpoints.newest(run_id)
            folder = Path(newest.path) if newest else Path("none")
            names = [folder / CHECKPOINT_MANIFEST] if target == "manifest" else sorted(folder.glob("*.distcp"))
            files = [path for path in names if path.is_file()]
        if not files:
            return None
        path = self._rng.choice(files)
        return path, 0, path.stat().st_size

    def _flip(self, target: str, path: Path, start: int, size: int) -> Bit:
        place = start + self._rng.randrange(size)
        with path.open("r+b") as file:
            file.seek(place)
            (was,) = file.read(1)
            file.seek(place)
            file.write(bytes([was ^ (1 << self._rng.randrange(8))]))
            os.fsync(file.fileno())
        bit = Bit(target, path, place, was)
        log.info("%s: %s has changed", target, bit)
        return bit

    def _compare(self, bit: Bit, run_id: str) -> None:
        """Return whether verify finds the bit, if anything still refers to it."""
        if not bit.path.exists():
            return
        owner = run_id
        with contextlib.closing(Ledger(self._path, read_only=True)) as ledger:
            if bit.target == "export":
                owner = next(
                    r["run_id"] for r in ledger.runs() if ledger.export_path(r["run_id"]) == str(bit.path.parent)
                )
                if not (bit.path.parent / EXPORT_MANIFEST).exists():
                    self.not_found.append(f"{bit}: the export has no {EXPORT_MANIFEST}")
                    return
            report = verify(ledger, owner, deep=True)
            usable = [known.path for known in ledger.checkpoints.kept(owner) if not known.damaged]
        if bit.target in ("checkpoint", "manifest") and str(bit.path.parent) not in usable:
            return  # pruned, or marked: no session begins from it
        named = bit.path.parent.name if bit.target != "segment" else "cannot be read"
        found = [problem for problem in report.problems if named in problem or bit.path.name in problem]
        log.info("verify says of %s: %s", bit, found or "nothing")
        if not found and bit.target != "segment":  # a group may have been generated again, and its record be nobody's
            self.not_found.append(f"{bit}: verify finds {report.problems or 'nothing'}")

    def _repair(self, bit: Bit, run_id: str) -> None:
        with self._stopped():
            left = self._problems(run_id)
            if left:
                log.info("%s: verify finds %s; the copy from before is put back", bit, left)
                for suffix in ("-wal", "-shm"):
                    self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
                self._path.write_bytes(self._copy.read_bytes())

    def _problems(self, run_id: str) -> list[str]:
        try:
            with contextlib.closing(Ledger(self._path, read_only=True)) as ledger:
                return verify(ledger, run_id).problems
        except (PacelineError, sqlite3.Error) as error:
            return [str(error)]

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        """No coordinator has the ledger; what SQLite's log held is in the file."""
        locks = self._while_stopped(lambda: lock_ledger(self._path))
        try:
            with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(self._path)) as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            yield
        finally:
            for lock in locks:
                lock.close()

    def _while_stopped(self, work: Callable[[], ResultT]) -> ResultT:
        """Kills the coordinator until the work, which needs the ledger's lock, comes before the next one."""
        end_s = time.monotonic() + STOP_S
        while True:
            self._cluster.kill("coordinator")
            try:
                return work()
            except Conflict as error:
                if "another coordinator" not in str(error) or time.monotonic() > end_s:
                    raise
            time.sleep(0.02)

    def _resume(self, run_id: str) -> None:
        """A person who has put right what was wrong goes on with the run, if it waits."""
        end_s = time.monotonic() + RESUME_S
        while progress(self._cluster, run_id)[0] in HELD_STATES and time.monotonic() < end_s:
            with (
                contextlib.suppress(PacelineError),
                Client(coordinator_address(self._cluster), timeout_s=2.0) as client,
            ):
                client.resume(run_id)
                log.info("%s waited and goes on", run_id)
                return
            time.sleep(0.2)
