"""The queue of one rank's checkpoints that wait on this machine's disk for upload to the object store, oldest first,
with the thread that uploads them. Promise: a checkpoint is complete in the store once its manifest is there. Rank 0
writes the manifest after the files of all ranks. A store that does not answer delays only the queue. The training
thread adds and drops; the upload thread takes the oldest, and a checkpoint stays in the queue until it is whole in the
store."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.calls.backoff import ExponentialBackoff
from paceline.errors import Unavailable
from paceline.files.bounded_cache import spool_folder
from paceline.files.names import CHECKPOINT_MANIFEST
from paceline.files.storage import Folder
from paceline.learner.checkpoints.checkpoint import Checkpoint

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Seconds between retries of a store that does not answer."""
OTHER_RANKS_PAUSE_S = 0.5
"""Seconds between checks for the files of other ranks."""
CLOSE_S = 5.0
"""Longest time in seconds for which `close` waits for an upload in progress."""
log = logging.getLogger(__name__)


class _Dropped(Exception):
    """The checkpoint that is being uploaded was dropped, or the queue was closed."""


@dataclass
class Queued:
    """A checkpoint in the spool."""

    folder: Folder
    """Folder with the checkpoint's files on this machine."""
    size_bytes: int
    whole: Checkpoint | None
    """On rank 0, the checkpoint with the files of all ranks; None on other ranks."""
    dropped: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        return self.folder.name


class UploadQueue:
    """The queue of one session's rank. `on_stored` gets each checkpoint that is whole in the store, on rank 0; `warn`
    gets a sentence when the store stops answering and when it resumes. The upload thread calls both."""

    def __init__(
        self,
        store: Folder,
        rank: int,
        on_stored: Callable[[Checkpoint], None],
        warn: Callable[[str], None],
        pauses_s: tuple[float, float] = (FIRST_PAUSE_S, LONGEST_PAUSE_S),
    ):
        self.spool = _empty_spool(store, rank)
        self._store, self._on_stored, self._warn, self._pauses_s = store, on_stored, warn, pauses_s
        self._queue: list[Queued] = []
        self._changed = threading.Condition()
        self._closed = False
        self._away_since_s: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def names(self) -> list[str]:
        with self._changed:
            return [queued.name for queued in self._queue]

    @property
    def size_bytes(self) -> int:
        with self._changed:
            return sum(queued.size_bytes for queued in self._queue)

    @property
    def away_s(self) -> float:
        """Seconds since the store stopped answering; 0 while it answers."""
        since_s = self._away_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def add(self, folder: Folder, whole: Checkpoint | None) -> None:
        """Queue a checkpoint whose files are in `folder`, a folder in the spool."""
        queued = Queued(folder, sum(folder.files().values()), whole)
        with self._changed:
            self._queue.append(queued)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="upload checkpoints", daemon=True)
                self._thread.start()

    def fitting(self, quota_bytes: int) -> int:
        """Return how many of the newest checkpoints fit `quota_bytes`, counted by this rank's files; the newest one
        always fits."""
        with self._changed:
            sizes = [queued.size_bytes for queued in self._queue]
        number = 1
        while number < len(sizes) and sum(sizes[-number - 1 :]) <= quota_bytes:
            number += 1
        return number

    def drop(self, names: Sequence[str]) -> None:
        """Remove checkpoints from the queue, with their files."""
        with self._changed:
            dropped = [queued for queued in self._queue if queued.name in names]
            self._queue = [queued for queued in self._queue if queued.name not in names]
            for queued in dropped:
                queued.dropped.set()
            self._changed.notify_all()
        for queued in dropped:
            _remove(queued)

    def wait_stored(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for an empty queue; return whether it is empty."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout_s)

    def close(self) -> None:
        """End the thread; remove the files that are still queued."""
        with self._changed:
            self._closed = True
            for queued in self._queue:
                queued.dropped.set()
            left = [queued.name for queued in self._queue]
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        if left:
            log.warning("checkpoints %s were not uploaded to %s", ", ".join(left), self._store)
        shutil.rmtree(self.spool, ignore_errors=True)

    def _run(self) -> None:
        backoff = ExponentialBackoff(*self._pauses_s)
        while (queued := self._next()) is not None:
            try:
                stored = self._upload(queued)
            except _Dropped:
                continue
            except Exception as error:  # the clients of object stores raise errors without a common base
                self._note_away(error)
                queued.dropped.wait(backoff.next_s())
                continue
            backoff.reset()
            if stored is not None:
                self._on_stored(stored)
            with self._changed:
                self._queue = [other for other in self._queue if other is not queued]
                self._changed.notify_all()
            self._note_back()
            _remove(queued)

    def _next(self) -> Queued | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queue)
            return None if self._closed else self._queue[0]

    def _upload(self, queued: Queued) -> Checkpoint | None:
        """Upload a rank's files and, on rank 0, wait for the other ranks' files and write the manifest."""
        target = self._store / queued.name
        present = _files(target)
        for name, size_bytes in sorted(queued.folder.files().items()):
            _check(queued)
            if name != CHECKPOINT_MANIFEST and present.get(name) != size_bytes:
                assert queued.folder.local is not None
                target.put(name, queued.folder.local / name)
        if queued.whole is None:
            return None
        listed = {file.path: file.size_bytes for file in queued.whole.manifest.files}
        while {name: size for name, size in _files(target).items() if name in listed} != listed:
            _check(queued)
            queued.dropped.wait(OTHER_RANKS_PAUSE_S)
        _check(queued)
        manifest = queued.folder.read(CHECKPOINT_MANIFEST)
        if hashlib.sha256(manifest).hexdigest() != queued.whole.manifest_sha256:
            raise Unavailable(f"{queued.folder}: its manifest was changed on this machine's disk")
        target.write(CHECKPOINT_MANIFEST, manifest)
        return queued.whole._replace(path=target)

    def _note_away(self, error: Exception) -> None:
        if self._away_since_s is not None:
            return
        self._away_since_s = time.monotonic()
        self._warn(
            f"the store {self._store} cannot be written now ({type(error).__name__}: {error}): training goes on, and checkpoints "
            f"wait in {self.spool} until the store answers again"
        )

    def _note_back(self) -> None:
        if self._away_since_s is not None:
            self._warn(
                f"the store {self._store} answers again after {self.away_s:.0f} s; {len(self.names)} checkpoints are "
                "still queued"
            )
            self._away_since_s = None


def _check(queued: Queued) -> None:
    if queued.dropped.is_set():
        raise _Dropped


def _files(folder: Folder) -> dict[str, int]:
    try:
        return folder.files()
    except FileNotFoundError:
        return {}


def _remove(queued: Queued) -> None:
    with contextlib.suppress(OSError):
        queued.folder.remove()


def _empty_spool(store: Folder, rank: int) -> Path:
    """Return this rank's folder in the spool, emptied, because steps after the store's newest checkpoint train
    again."""
    digest = hashlib.sha256(store.url.encode()).hexdigest()[:16]
    folder = spool_folder() / "checkpoints" / digest / f"rank-{rank}"
    shutil.rmtree(folder, ignore_errors=True)
    return folder
