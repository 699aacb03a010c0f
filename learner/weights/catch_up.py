"""Catching up of members of the collective channel that join or fall behind: from the object store, before they get a link.

A member that joins a running run, or returns after its link failed, is offered the newest version in the run's store and
reads it while links and training go on; then the publisher gets it as a member that holds that version. The store is
written for this only, while a member has to catch up: a snapshot the first time, deltas later. A member that cannot read
the store, or is silent for `max_wait_s` while it reads, joins anyway and gets full weights over its link; the log says so.

A member whose link failed `PATIENCE` times in a row, or that refused the weights as often, is named in the run's events
with the reason. From then on it is offered every version from the store, and its link is tried again at growing
intervals.

It is called from the control plane's thread, from the trainer's (`stage`), from those of `StoreOffers` and the links, and
from timers; one lock guards its state.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from learner.weights.publish_result import PublishResult
from learner.weights.publisher import Publisher
from learner.weights.rank_board import LocalBoard
from learner.weights.shards import whole_slices
from learner.weights.store.offers import StoreOffers
from learner.weights.store.writer import StoreWriter
from paceline.errors import Conflict
from paceline.groups import Version
from paceline.weights.manifest import Algorithm, longest_s, slowest_s
from paceline.weights.object_store import WeightStore
from paceline.weights.offers import StoreOffer

log = logging.getLogger(__name__)

PATIENCE = 3
"""Failed attempts in a row after which a member gets its weights from the store."""

LONGEST_PAUSE = 10
"""Longest interval between two tries of such a member's link, in units of `max_wait_s`."""

MAX_HISTORIES = 4096
"""Members whose failures are remembered."""


@dataclass
class _CatchingUp:
    """A member that gets its weights from the store."""

    deadline_s: float
    """Monotonic time at which it gets a link at the latest."""
    last_s: float
    """Latest value of the deadline; reports cannot extend it further."""
    kept_from_link: bool
    """True when it stays here until the deadline, although it has caught up."""
    offered: bool = False
    """True after the first offer; the time before it is the writer's, not the member's."""
    held: Version | None = None
    timer: threading.Timer | None = None


class CatchUp:
    """Filter before a publisher's `set_members`. `on_result` is called with the result of each catching-up, `warn` puts a
    sentence into the run's events."""

    def __init__(
        self,
        *,
        publisher: Publisher,
        store: WeightStore,
        run_id: str,
        algorithm: Algorithm,
        anchor_interval: int,
        max_wait_s: float,
        send: Callable[[StoreOffer], None],
        on_result: Callable[[PublishResult], None],
        warn: Callable[[str], None],
    ) -> None:
        self._publisher = publisher
        self._max_wait_s = max_wait_s
        self._on_result = on_result
        self._send = send
        self._warn = warn
        self._url = store.url
        self._lock = threading.RLock()
        self._epoch = 0
        self._members: tuple[str, ...] = ()
        self._entered: set[str] = set()
        """Members whose weights come over links."""
        self._failed: set[str] = set()
        """Members whose link failed since they entered."""
        self._failures: dict[str, int] = {}
        """Attempts in a row that failed over a member's link."""
        self._waiting: dict[str, _CatchingUp] = {}
        self._staged: tuple[Version, Mapping[str, torch.Tensor]] | None = None
        self._put: Version | None = None
        self._offers = StoreOffers(
            run_id=run_id,
            url=store.url,
            algorithm=algorithm,
            max_wait_s=max_wait_s,
            send=self._offer,
            on_result=self._caught_up,
        )
        self._writer = StoreWriter(
            store=store,
            board=LocalBoard(),
            run_id=run_id,
            rank=0,
            world_size=1,
            algorithm=algorithm,
            anchor_interval=anchor_interval,
            any_rank=lambda fact: fact,
            on_stored=self._offers.announce,
            oldest_held=self._offers.oldest_held,
        )

    def set_members(self, epoch: int, member_ids: Sequence[str]) -> None:
        """Set the members, as of a publisher. A member keeps its link; before the first
        version every member gets one."""
        with self._lock:
            returned = set(member_ids) - set(self._members)
            self._epoch, self._members = epoch, tuple(member_ids)
            self._entered -= self._failed & returned
            self._failed -= returned
            if not any(self._publisher.acknowledged().values()):
                # The first members get links at once: they disturb no running transfer.
                self._entered |= {m for m in member_ids if self._failures.get(m, 0) < PATIENCE}
                self._entered -= self._waiting.keys()
            for member_id in self._waiting.keys() - set(member_ids):
                self._stop_waiting(member_id)
            for member_id in set(member_ids) - self._entered - self._waiting.keys():
                self._begin_waiting(member_id)
            self._pass_on({})
            self._store()

    def stage(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set the newest version, whose tensors do not change any more."""
        with self._lock:
            self._staged = (version, tensors)
            self._store()

    def answer(self, member_id: str, version: Version, ok: bool, message: str, damaged: bool) -> None:
        """Take a member's answer to an offer of either kind."""
        self._offers.answer(member_id, version, ok, message, damaged)

    def progress(self, member_id: str) -> None:
        """Note that a member still works on an offered version."""
        with self._lock:
            self._heard_of(member_id)
        self._offers.progress(member_id)

    def link_ended(self, result: PublishResult) -> None:
        """Take the result of an attempt over a member's link. A member whose link broke or was too slow is expelled, and
        catches up when it is in the roster again; a member that refuses catches up from its third refusal on.
        """
        member_id = result.member_id
        with self._lock:
            if result.ok:
                self._failures.pop(member_id, None)
            if result.ok or result.failure == "interrupted" or result.fallback:
                return
            failures = self._failures.pop(member_id, 0) + 1
            self._failures[member_id] = failures
            if len(self._failures) > MAX_HISTORIES:
                del self._failures[next(iter(self._failures))]
            if result.failure != "refused":
                self._failed.add(member_id)
            elif failures >= PATIENCE and member_id in self._entered:
                self._entered.discard(member_id)
                self._begin_waiting(member_id)
                with contextlib.suppress(Conflict):  # the run ends at this very moment
                    self._pass_on({})
                self._store()
        if failures == PATIENCE:
            self._warn(
                f"{failures} attempts in a row to bring weights to {member_id} failed, the last with version "
                f"{result.version.step}: {result.error}. It is offered the versions in {self._url} from now on, and its "
                f"link is tried again at least every {LONGEST_PAUSE * self._max_wait_s:.0f} s"
            )

    def interrupt(self) -> None:
        """Offer again what may have been lost while the control plane was away."""
        self._offers.interrupt()

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            for member_id in list(self._waiting):
                self._stop_waiting(member_id)
        self._offers.close()
        self._writer.close()

    def _begin_waiting(self, member_id: str) -> None:
        """Wait until the member has caught up; longer where its link failed several times."""
        extra = self._failures.get(member_id, 0) - PATIENCE
        size_bytes = sum(tensor.nbytes for tensor in self._staged[1].values()) if self._staged else 0
        seconds = self._max_wait_s + slowest_s(size_bytes)  # to be written
        if extra >= 0:
            seconds = self._max_wait_s * min(2 ** min(extra, 20), LONGEST_PAUSE)
        ends_s = time.monotonic() + seconds
        self._waiting[member_id] = waiting = _CatchingUp(ends_s, ends_s, kept_from_link=extra >= 0)
        self._start_timer(member_id, waiting)

    def _start_timer(self, member_id: str, waiting: _CatchingUp) -> None:
        left_s = max(0.0, waiting.deadline_s - time.monotonic())
        waiting.timer = threading.Timer(left_s, self._out_of_time, [member_id, waiting])
        waiting.timer.daemon = True
        waiting.timer.start()

    def _stop_waiting(self, member_id: str) -> _CatchingUp | None:
        waiting = self._waiting.pop(member_id, None)
        if waiting is not None and waiting.timer is not None:
            waiting.timer.cancel()
        return waiting

    def _offer(self, offer: StoreOffer) -> None:
        with self._lock:
            waiting = self._waiting.get(offer.member_id)
            if waiting is not None and not waiting.kept_from_link and not waiting.offered:
                waiting.offered = True
                waiting.last_s = time.monotonic() + longest_s(self._max_wait_s, offer.snapshot_bytes)
                waiting.deadline_s = math.inf
                self._heard_of(offer.member_id)
        self._send(offer)

    def _heard_of(self, member_id: str) -> None:
        waiting = self._waiting.get(member_id)
        if waiting is not None and waiting.offered and not waiting.kept_from_link:
            later = min(time.monotonic() + self._max_wait_s, waiting.last_s)
            must_restart_timer = later < waiting.deadline_s
            waiting.deadline_s = later
            if must_restart_timer and waiting.timer is not None:
                waiting.timer.cancel()
                self._start_timer(member_id, waiting)

    def _store(self) -> None:
        """Put the staged version into the store, if a member needs it there."""
        if self._waiting and self._staged is not None and self._put != self._staged[0]:
            self._put = self._staged[0]
            self._writer.put(self._put, *whole_slices(self._staged[1]))

    def _caught_up(self, result: PublishResult) -> None:
        self._on_result(result)
        with self._lock:
            waiting = self._waiting.get(result.member_id)
            if waiting is not None and waiting.kept_from_link:
                waiting.held = result.version if result.ok else waiting.held
                return
        if not result.ok:
            log.warning(
                "%s cannot catch up from the store, it gets full weights over its link: %s",
                result.member_id,
                result.error,
            )
        self._enter(result.member_id, result.version if result.ok else None)

    def _out_of_time(self, member_id: str, waiting: _CatchingUp) -> None:
        with self._lock, contextlib.suppress(Conflict):  # the run ends at this very moment
            if self._waiting.get(member_id) is not waiting:
                return
            if waiting.deadline_s > time.monotonic():
                self._start_timer(member_id, waiting)
                return
            if not waiting.kept_from_link:
                log.warning(
                    "%s was silent for %.0f s, or too slow, while it read the store; it gets full weights over its link",
                    member_id,
                    self._max_wait_s,
                )
            self._enter(member_id, waiting.held)

    def _enter(self, member_id: str, held: Version | None) -> None:
        with self._lock:
            if self._stop_waiting(member_id) is None:
                return
            self._entered.add(member_id)
            self._pass_on({member_id: held} if held is not None else {})

    def _pass_on(self, held: Mapping[str, Version]) -> None:
        entered = [member_id for member_id in self._members if member_id in self._entered]
        self._publisher.set_members(self._epoch, entered, held)
        self._offers.set_members(self._epoch, list(self._waiting))
