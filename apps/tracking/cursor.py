"""How far a tracker has got, in a file that is on the disk before the next entry is sent.

Promise: one process at a time sends a run to a tracker, and after any death it goes on at the first entry that may be missing.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from pathlib import Path
from typing import IO, Any

from paceline.errors import Conflict, Unreadable
from paceline.files.whole_file import write_whole


class Cursor:
    """The position of one run at one tracker."""

    def __init__(self, folder: Path, kind: str):
        """Read the file of a tracker, or begin it. Raises Conflict while another process has it, Unreadable, OSError."""
        path = _path(folder, kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock: IO[str] = path.with_suffix(".lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise Conflict(
                f"another process sends this run to the tracker ({path} is locked); stop it first"
            ) from None
        try:
            content = self._read()
        except BaseException:
            self._lock.close()
            raise
        self.identity = str(content.get("identity") or uuid.uuid4().hex)
        self.sequence = int(content.get("sequence", 0))
        """Sequence number of the newest entry that was sent."""
        self.time_s = float(content.get("time_s", 0.0))
        """Time of that entry, which those without a time get."""
        self.ended = str(content.get("ended", ""))
        """State of the run if it had ended by that entry."""
        self.done = bool(content.get("done"))
        """All of a run that has ended was sent, and the tracker knows its end."""
        self.url = str(content.get("url", ""))
        self.refused = int(content.get("refused", 0))
        """Entries that the tracker refused."""
        self.save()

    def save(self) -> None:
        """Write the file; it is on the disk afterwards. Raises OSError."""
        content = {
            "identity": self.identity,
            "sequence": self.sequence,
            "time_s": self.time_s,
            "ended": self.ended,
            "done": self.done,
            "url": self.url,
            "refused": self.refused,
        }
        write_whole(self._path, json.dumps(content) + "\n", durable=True)

    def close(self) -> None:
        """Let another process have the run."""
        self._lock.close()

    def _read(self) -> dict[str, Any]:
        if not os.path.exists(self._path):
            return {}
        try:
            content: dict[str, Any] = json.loads(self._path.read_text())
            if not isinstance(content, dict) or int(content["sequence"]) < 0 or not content["identity"]:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise Unreadable(
                f"{self._path} is damaged; remove it to send the run again from its beginning, as a new run of the tracker"
            ) from None
        return content


def is_done(folder: Path, kind: str) -> bool:
    """Return whether the cursor of a tracker says that all of an ended run was sent."""
    try:
        return bool(json.loads(_path(folder, kind).read_text())["done"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _path(folder: Path, kind: str) -> Path:
    return folder / f"{kind}.json"
