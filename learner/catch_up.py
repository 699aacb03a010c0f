"""How a joiner or a straggler of the collective channel catches up: from the store, before it enters the epoch.

A member that joins a running run, or comes back after its link failed, is told of the newest version in the run's store
and reads it by itself, while links and training go on; then it is handed to the publisher as one that holds that
version. The store is written for this only: what is staged, when somebody has to catch up and while he does, as an anchor
the first time and as deltas later. Who cannot read the store within `max_wait_s` enters as he is, and gets full
weights over his link; the log says so.

Called from the control plane's thread, from the trainer's (`stage`) and from those of `StoreOffers`; one lock guards it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from learner.member_link import PublishResult
from learner.publisher import Publisher
from learner.rank_board import LocalBoard
from learner.shards import whole_slices
from learner.store_offers import StoreOffers
from learner.store_writer import StoreWriter
from paceline.errors import Conflict
from paceline.groups import Version
from paceline.stored_weights import StoreOffer
from paceline.weight_store import WeightStore
from paceline.weights import Algorithm

log = logging.getLogger(__name__)


class CatchUp:
    """Stands in front of a publisher's `set_members`. `on_result` hears how each catching-up ended."""

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
    ) -> None:
        self._publisher = publisher
        self._max_wait_s = max_wait_s
        self._on_result = on_result
        self._lock = threading.RLock()
        self._epoch = 0
        self._members: tuple[str, ...] = ()
        self._entered: set[str] = set()
        """Members whose weights come over links."""
        self._failed: set[str] = set()
        """Members whose link failed since they entered."""
        self._waiting: dict[str, threading.Timer] = {}
        """Members that are catching up, with their deadlines."""
        self._staged: tuple[Version, Mapping[str, torch.Tensor]] | None = None
        self._put: Version | None = None
        self._offers = StoreOffers(
            run_id=run_id,
            url=store.url,
            algorithm=algorithm,
            max_wait_s=max_wait_s,
            send=send,
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
            on_stored=self._offers.tell,
            oldest_held=self._offers.oldest_held,
        )

    def set_members(self, epoch: int, member_ids: Sequence[str]) -> None:
        """As for a publisher: who was there before, or came before anybody had weights, gets them over a link."""
        with self._lock:
            returned = set(member_ids) - set(self._members)
            self._epoch, self._members = epoch, tuple(member_ids)
            self._entered -= self._failed & returned
            self._failed -= returned
            if not any(self._publisher.held().values()):
                self._entered |= set(member_ids)  # the first ones: nothing runs yet that they would disturb
            for member_id in self._waiting.keys() - set(member_ids):
                self._waiting.pop(member_id).cancel()
            for member_id in set(member_ids) - self._entered - self._waiting.keys():
                timer = threading.Timer(self._max_wait_s, self._out_of_time, [member_id])
                timer.daemon = True
                self._waiting[member_id] = timer
                timer.start()
            self._pass_on({})
            self._store()

    def stage(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> None:
        """The newest version, whose tensors do not change any more."""
        with self._lock:
            self._staged = (version, tensors)
            self._store()

    def answer(self, member_id: str, version: Version, ok: bool, message: str, damaged: bool) -> None:
        """A member's answer, to whichever offer."""
        self._offers.answer(member_id, version, ok, message, damaged)

    def link_failed(self, member_id: str) -> None:
        """A member's link broke or was too slow: when it is named again, it catches up first."""
        with self._lock:
            self._failed.add(member_id)

    def interrupt(self) -> None:
        """The control plane was away."""
        self._offers.interrupt()

    def close(self) -> None:
        """Ends the threads."""
        with self._lock:
            for timer in self._waiting.values():
                timer.cancel()
            self._waiting.clear()
        self._offers.close()
        self._writer.close()

    def _store(self) -> None:
        """Puts what is staged into the store, if somebody needs it there."""
        if self._waiting and self._staged is not None and self._put != self._staged[0]:
            self._put = self._staged[0]
            self._writer.put(self._put, *whole_slices(self._staged[1]))

    def _caught_up(self, result: PublishResult) -> None:
        if not result.ok:
            log.warning(
                "%s cannot catch up from the store, it gets full weights over its link: %s",
                result.member_id,
                result.error,
            )
        self._on_result(result)
        self._enter(result.member_id, result.version if result.ok else None)

    def _out_of_time(self, member_id: str) -> None:
        with contextlib.suppress(Conflict):  # the run ends at this very moment
            if not self._enter(member_id, None):
                return
            log.warning(
                "%s has not caught up from the store within %.0f s, it gets full weights over its link",
                member_id,
                self._max_wait_s,
            )

    def _enter(self, member_id: str, held: Version | None) -> bool:
        with self._lock:
            timer = self._waiting.pop(member_id, None)
            if timer is None:
                return False
            timer.cancel()
            self._entered.add(member_id)
            self._pass_on({member_id: held} if held is not None else {})
            return True

    def _pass_on(self, held: Mapping[str, Version]) -> None:
        entered = [member_id for member_id in self._members if member_id in self._entered]
        self._publisher.set_members(self._epoch, entered, held)
        self._offers.set_members(self._epoch, list(self._waiting))
