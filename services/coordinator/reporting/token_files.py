"""What the learner computed of single tokens, in files beside the ledger: one for each step, the protobuf message that came.

Promise: the files of a run take 32 MB at most, those of the oldest steps go first, and neither the disk nor a report holds anything up:
a thread writes, and a report that comes while it still writes is left out.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from paceline.files.whole_file import write_whole
from paceline.rate_limited_log import RateLimitedLog
from paceline.v1 import worker_pb2

FOLDER = "token_stats"
MAX_BYTES = 32 << 20
MAX_REPORT_BYTES = 2 << 20
MAX_COMPLETIONS = 4096
log = logging.getLogger(__name__)
seldom = RateLimitedLog(log, interval_s=600.0)


class TokenFiles:
    """The files of one coordinator's runs."""

    def __init__(self, directory: Path):
        self._folder = directory / FOLDER
        self._writing: asyncio.Future[None] | None = None
        """The last report's, which the loop's end waits for."""

    def keep(self, report: worker_pb2.TokenStatistics) -> None:
        """Write a report in a thread."""
        if not report.completions or (self._writing is not None and not self._writing.done()):
            return
        data = report.SerializeToString()
        path = path_of(self._folder.parent, report.run_id, report.step)
        self._writing = asyncio.get_running_loop().run_in_executor(None, self._write, path, data)

    def _write(self, path: Path, data: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
            total = 0
            for each in sorted(path.parent.glob("*.bin"), reverse=True):
                total += each.stat().st_size
                if total > MAX_BYTES:
                    each.unlink(missing_ok=True)
        except OSError as error:
            seldom.warning(
                "token statistics", "token statistics cannot be written into %s: %s", path.parent, error
            )


def path_of(directory: Path, run_id: str, step: int) -> Path:
    """Return the file of a step; `directory` is the ledger's."""
    return directory / FOLDER / run_id / f"{step:020d}.bin"


def fault_of(report: worker_pb2.TokenStatistics) -> str:
    """Return why a report is not kept; empty if it is."""
    if len(report.completions) > MAX_COMPLETIONS or report.ByteSize() > MAX_REPORT_BYTES:
        return f"it has {len(report.completions)} completions and {report.ByteSize()} bytes"
    if any(len(each.logprobs) != len(each.entropies) for each in report.completions):
        return "a completion has more log-probabilities than entropies, or fewer"
    return ""
