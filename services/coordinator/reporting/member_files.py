"""Writes the members' reports that the ledger does not keep to files beside it. One kind of files has readings of the
members' gauges every five seconds, with the shares of time in which a member worked, waited, updated weights or was
away. The other kind has the learner's statistics of single tokens, a protobuf message for each step. A line of readings
is a JSON object: `time` in seconds since 1970 and `members` by id, each with its pool and its gauges. Nothing is
written while there is no member.

Promise: the files of each kind (for tokens: of each run) take 32 MB at most, the oldest are removed first, and a slow
or full disk delays nothing: a thread writes, and anything that arrives while it still writes is left out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from pathlib import Path

from paceline.files.whole_file import write_whole
from paceline.host.regular_file import fd_to_append
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.coordinator.members.registry import Member, Members
from paceline.v1 import common_pb2, worker_pb2

PERIOD_S = 5.0
FOLDER = "gauges"
MAX_FILE_BYTES = 4 << 20
MAX_FILES = 8
MAX_MEMBERS = 512
"""Largest number of members of a reading. If there are more, the first ones are written."""
KEPT = ("tokens_per_s", "memory_gb", "gpu_use", "gpu_power_w")
DIGITS = 4
log = logging.getLogger(__name__)
seldom = RateLimitedLog(log, interval_s=600.0)


class GaugeHistory:
    def __init__(
        self, directory: Path, members: Members, max_file_bytes: int = MAX_FILE_BYTES, max_files: int = MAX_FILES
    ):
        self._folder, self._members = directory / FOLDER, members
        self._max_file_bytes, self._max_files = max_file_bytes, max_files
        self._due_s = 0.0
        self._paused_s: dict[str, float] = {}
        """Seconds for which each member had paused for weights until the last reading. The key is the member id."""
        self._read_s = 0.0
        self.writing: asyncio.Future[None] | None = None
        """Task that writes the newest line; the coordinator waits for it before it ends."""

    def observe(self, now_s: float) -> None:
        """Take a reading if one is due, and write it in a thread."""
        if now_s < self._due_s:
            return
        elapsed_s, self._read_s, self._due_s = now_s - self._read_s, now_s, now_s + PERIOD_S
        members = self._members.all()[:MAX_MEMBERS]
        found = {member.member_id: self._reading(member, elapsed_s) for member in members}
        self._paused_s = {member.member_id: member.measures.paused_s for member in members}
        if not found or (self.writing is not None and not self.writing.done()):
            return
        line = json.dumps({"time": round(time.time(), 1), "members": found}, separators=(",", ":")) + "\n"
        self.writing = asyncio.get_running_loop().run_in_executor(None, self._write, line)

    def _reading(self, member: Member, elapsed_s: float) -> dict[str, str | float]:
        paused_s = member.measures.paused_s - self._paused_s.get(member.member_id, member.measures.paused_s)
        found: dict[str, str | float] = {"pool": member.role_name}
        found |= {name: round(value, DIGITS) for name, value in shares(member, paused_s, elapsed_s).items()}
        return found | {
            name: round(member.measures.gauges[name], DIGITS) for name in KEPT if name in member.measures.gauges
        }

    def _write(self, line: str) -> None:
        """Append a line to the newest file, or begin a new one; remove the oldest files."""
        try:
            self._folder.mkdir(exist_ok=True)
            files = files_of(self._folder)
            if not files or files[-1].stat().st_size + len(line) > self._max_file_bytes:
                files.append(self._folder / f"gauges-{time.time_ns():020d}.jsonl")
            with os.fdopen(fd_to_append(files[-1]), "a", encoding="utf-8") as file:
                file.write(line)
            for path in files[: -self._max_files]:
                path.unlink(missing_ok=True)
        except OSError as error:
            seldom.warning("gauges", "the members' gauges cannot be written to %s: %s", self._folder, error)


def shares(member: Member, paused_s: float, elapsed_s: float) -> dict[str, float]:
    """Return the share of a member's time for each activity; the shares add up to 1. Empty for a connected learner,
    because the metrics of its steps have the times."""
    if not member.connected or member.suspected:
        return {"working": 0.0, "waiting": 0.0, "updating": 0.0, "away": 1.0}
    if member.role == common_pb2.ROLE_LEARNER:
        return {}
    updating = min(1.0, max(0.0, paused_s) / elapsed_s) if elapsed_s > 0 else 0.0
    if member.role == common_pb2.ROLE_ROLLOUT:
        idle = member.measures.gauges.get("wait_fraction", 1.0)
    else:
        idle = 1.0 - member.measures.gauges.get("occupied", 0.0)
    waiting = min(max(idle, 0.0), 1.0 - updating)
    return {"working": 1.0 - updating - waiting, "waiting": waiting, "updating": updating, "away": 0.0}


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("gauges-*.jsonl"))


TOKEN_FOLDER = "token_stats"
MAX_TOKEN_BYTES = 32 << 20
MAX_REPORT_BYTES = 2 << 20
MAX_COMPLETIONS = 4096


class TokenFiles:
    def __init__(self, directory: Path, max_bytes: int = MAX_TOKEN_BYTES):
        self._folder, self._max_bytes = directory / TOKEN_FOLDER, max_bytes
        self.writing: asyncio.Future[None] | None = None
        """Task that writes the newest report; the coordinator waits for it before it ends."""

    def keep(self, report: worker_pb2.TokenStatistics) -> None:
        """Write a report in a thread."""
        if not report.completions or (self.writing is not None and not self.writing.done()):
            return
        data = report.SerializeToString()
        path = path_of(self._folder.parent, report.run_id, report.step)
        self.writing = asyncio.get_running_loop().run_in_executor(None, self._write, path, data)

    def _write(self, path: Path, data: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
            total = 0
            for each in sorted(path.parent.glob("*.bin"), reverse=True):
                total += each.stat().st_size
                if total > self._max_bytes:
                    each.unlink(missing_ok=True)
        except OSError as error:
            seldom.warning("token statistics", "token statistics cannot be written to %s: %s", path.parent, error)


def path_of(directory: Path, run_id: str, step: int) -> Path:
    """Return the file of a step below `directory`, the ledger's folder."""
    return directory / TOKEN_FOLDER / run_id / f"{step:020d}.bin"


def fault_of(report: worker_pb2.TokenStatistics, max_bytes: int = MAX_REPORT_BYTES) -> str:
    """Return why token statistics are refused; empty if they are kept."""
    if len(report.completions) > MAX_COMPLETIONS or report.ByteSize() > max_bytes:
        return f"the report has {len(report.completions)} completions and {report.ByteSize()} bytes, more than allowed"
    if any(len(each.logprobs) != len(each.entropies) for each in report.completions):
        return "a completion has different numbers of log-probabilities and of entropies"
    return ""
