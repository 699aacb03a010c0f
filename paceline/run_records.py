"""The records of a run that a client reads afterwards: its events so far, its metrics, and its samples from the ledger beside it."""

from __future__ import annotations

import contextlib
import importlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from paceline.errors import NotFound
from paceline.files.names import LEDGER_NAME

CHECK_S = 0.05
T = TypeVar("T", covariant=True)


class Stream(Protocol[T]):
    """Answers that come one after the other until `cancel`."""

    def __iter__(self) -> Iterator[T]: ...

    def cancel(self) -> object:
        """End the stream."""


def until_quiet(stream: Stream[T], quiet_s: float, first_s: float) -> list[T]:
    """Return what a stream brings until it ends, or brings nothing for `quiet_s` seconds (`first_s` before its first
    answer); it is cancelled then. Raises the stream's error of any other cause."""
    found: list[T] = []
    due_s, done, cancelled = time.monotonic() + first_s, threading.Event(), threading.Event()

    def watch() -> None:
        while not done.wait(CHECK_S):
            if time.monotonic() > due_s:
                cancelled.set()
                stream.cancel()
                return

    watcher = threading.Thread(target=watch, name="until quiet", daemon=True)
    watcher.start()
    try:
        for answer in stream:
            found.append(answer)
            due_s = time.monotonic() + quiet_s
    except Exception:
        if not cancelled.is_set():
            raise
    finally:
        done.set()
        watcher.join()
    return found


def samples(directory: Path, run_id: str, step: int) -> list[dict[str, Any]]:
    """Return the groups that a step trained on, as `paceline samples --json` prints them, from the ledger beside the run's
    `directory`. Raises NotFound: no such step, samples that were not kept, a ledger that is on another machine."""
    path = directory.parent / LEDGER_NAME
    if not path.is_file():
        raise NotFound(
            f"the ledger {path} is not on this machine; read the samples on the coordinator's host with "
            f"`paceline samples {run_id} --step {step}`"
        )
    # By name, because this package imports none of the services.
    open_ledger: Callable[..., Any] = importlib.import_module("services.coordinator.ledger.ledger").Ledger
    read: Callable[..., list[dict[str, Any]]] = importlib.import_module(
        "services.coordinator.audit.samples"
    ).samples_of_step
    with contextlib.closing(open_ledger(path, read_only=True)) as ledger:
        return read(ledger, run_id, step)


def parsed(text: str) -> dict[str, Any]:
    """Return the content of an event."""
    content: dict[str, Any] = json.loads(text)
    return content
