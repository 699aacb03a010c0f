"""The logs of services that died by themselves, for the report of a test that failed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.services.common.processes.supervisor import reason_in
from paceline.services.local.cluster import LocalCluster

SHOWN_LINES = 30
SHOWN_DEATHS = 2
MAX_CHARS = 400
END = re.compile(r"WARNING services\.common\.processes\.supervisor: \S+ (ended with|was killed by)")
KILLED = "was killed by SIGKILL"


def last_words(clusters: Iterable[LocalCluster]) -> str:
    """Return the reason and the last lines of the SHOWN_DEATHS last lives of each service that ended by themselves; "" without
    any. One that was killed has no last words."""
    paths = [path for cluster in clusters for path in sorted((cluster.directory / "logs").glob("*.log"))]
    return "\n\n".join(words for path in paths for words in list(_lives(path))[-SHOWN_DEATHS:])


def _lives(path: Path) -> Iterator[str]:
    begin, lines = 0, path.read_text(errors="replace").splitlines()
    for end, line in enumerate(lines):
        if END.search(line):
            if KILLED not in line:
                last = lines[max(begin, end - SHOWN_LINES) : end]
                shown = [line, reason_in(lines[begin:end]), "...", *last]
                yield "\n".join(text[:MAX_CHARS] for text in shown)
            begin = end + 1
