"""Reads weights from the object store in the rollout process, while it samples with its current weights.

Promise: new weights reach the engine whole and verified, or not at all. If several versions are offered during a read,
only the newest is read afterwards. One thread waits for offers, then for the store, then for `on_weights`. `offer`
never waits. If the store has blocked the thread for `STUCK_S` plus the time that the bytes may take, the thread is
abandoned when the next offer comes; the bytes that it still reads are discarded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.errors import Conflict, PacelineError, first_line
from paceline.groups import Version
from paceline.rate_limited_log import unforeseen
from paceline.weights.progress import Phase, WeightProgress, slowest_s
from paceline.weights.store.object_store import WeightStore
from paceline.weights.store.reader import Damaged, StoreReader
from paceline.weights.store.store_format import StoreOffer

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

STUCK_S = 300.0

OnAck = Callable[[Version, bool, str, bool], None]


class StoreReceiver:
    """Reads the stored versions of one run for one member. `on_weights(version, tensors)` returns when the engine
    samples with a copy of the tensors, or raises; then the tensors belong to this object again. `on_ack(version, ok,
    message, damaged)` sends the answer to the learner. Both are called from the reading thread."""

    def __init__(
        self, *, run_id: str, on_weights: Callable[[Version, dict[str, torch.Tensor]], None], on_ack: OnAck
    ) -> None:
        self._run_id = run_id
        self._on_weights = on_weights
        self._on_ack = on_ack
        self._lock = threading.Lock()
        self._thread: _Reading | None = None
        self._closed = False

    def offer(self, offer: StoreOffer) -> None:
        """Accept an offer; the newest wins. Return at once. Raises Conflict after `close` or for another run."""
        if offer.run_id != self._run_id:
            raise Conflict(f"offer is of run {offer.run_id!r}, but this member serves {self._run_id!r}")
        with self._lock:
            if self._closed:
                raise Conflict("this receiver is closed")
            if self._thread is None or self._thread.is_stuck():
                if self._thread is not None:
                    log.warning("reading from %s is stuck; another thread reads the newest offer", offer.url)
                    self._thread.leave()
                self._thread = _Reading(self._run_id, self._on_weights, self._on_ack)
            self._thread.put(offer)

    @property
    def at_work(self) -> list[WeightProgress]:
        with self._lock:
            progress = self._thread.progress() if self._thread is not None else None
        return [progress] if progress is not None else []

    def close(self) -> None:
        """Accept no more offers, without waiting."""
        with self._lock:
            self._closed = True
            if self._thread is not None:
                self._thread.leave()


class _Reading:
    """A reading thread, its newest offer, and the copy of the weights that deltas change."""

    def __init__(
        self, run_id: str, on_weights: Callable[[Version, dict[str, torch.Tensor]], None], on_ack: OnAck
    ) -> None:
        self._run_id = run_id
        self._on_weights = on_weights
        self._on_ack = on_ack
        self._changed = threading.Condition()
        self._waiting: StoreOffer | None = None
        self._current: StoreOffer | None = None
        self._began_s = 0.0
        self._phase: Phase = "receiving"
        self._left = False
        self._serving: Version | None = None
        self._reader: tuple[str, StoreReader] | None = None
        threading.Thread(target=self._run, name="weights-store", daemon=True).start()

    def put(self, offer: StoreOffer) -> None:
        with self._changed:
            current = self._current
            if current is not None and (current.version, current.snapshot) == (offer.version, offer.snapshot):
                return  # the offer that is being read, again
            if self._waiting is None or offer.version >= self._waiting.version:
                self._waiting = offer
                self._changed.notify_all()

    def leave(self) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def is_stuck(self) -> bool:
        with self._changed:
            current, busy_s = self._current, time.monotonic() - self._began_s
            return current is not None and busy_s > STUCK_S + slowest_s(current.snapshot_bytes)

    def progress(self) -> WeightProgress | None:
        with self._changed:
            current, reader = self._current, self._reader
            if current is None or self._left:
                return None
            return WeightProgress(current.version, self._phase, reader[1].read_bytes if reader else 0)

    def _run(self) -> None:
        while (offer := self._next()) is not None:
            ok, message, damaged = self._take(offer)
            with self._changed:
                if self._left:
                    return
                self._current = None
            if not ok:
                log.warning("weights %s refused: %s", tuple(offer.version), message)
            try:
                self._on_ack(offer.version, ok, message, damaged)
            except Exception as error:  # raised by the listener; this thread has to receive further versions
                # Without an answer the learner offers again; then this member answers that it has the version.
                unforeseen.note("acknowledging stored weights", error)

    def _next(self) -> StoreOffer | None:
        with self._changed:
            # No deadline: the learner decides when the next version comes. `leave` ends the wait.
            self._changed.wait_for(lambda: self._left or self._waiting is not None)
            self._current, self._waiting = self._waiting, None
            self._began_s, self._phase = time.monotonic(), "receiving"
            return None if self._left else self._current

    def _take(self, offer: StoreOffer) -> tuple[bool, str, bool]:
        """Return (whether the version was loaded, the reason why not, whether a snapshot would help)."""
        if self._serving is not None and offer.version <= self._serving:
            held = offer.version == self._serving
            return held, "already held" if held else f"version {tuple(self._serving)} is held", False
        try:
            tensors = self._reader_of(offer).fetch(offer)
            if self._left:
                return False, "left behind", False
            self._phase = "loading"
            self._on_weights(offer.version, tensors)
        except Damaged as error:
            return False, first_line(error), True
        except PacelineError as error:
            return False, first_line(error), False
        except Exception as error:  # raised by the store's client or the engine
            unforeseen.note("loading stored weights", error)
            self._reader = None
            return False, first_line(error), False
        self._serving = offer.version
        return True, "", False

    def _reader_of(self, offer: StoreOffer) -> StoreReader:
        if self._reader is None or self._reader[0] != offer.url:
            self._reader = (offer.url, StoreReader(WeightStore(offer.url), self._run_id))
        return self._reader[1]
