"""The launcher of one node's ranks: it meets the other nodes, starts this node's part of the session, and meets them again
after the session's end.

A session ends on all nodes when any rank or node is lost; the nodes that are left meet again, and the next session begins as
soon as there are enough. It ends with the checkpoint that the coordinator has, like every session of the learner.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.calls.backoff import ExponentialBackoff
from paceline.services.learner.launcher import SIGNALS, EndAll, Ranks
from paceline.services.learner.nodes.assembly import SessionEnd
from paceline.services.learner.nodes.rendezvous import Place, Rendezvous
from paceline.services.learner.nodes.settings import NodeSettings
from paceline.services.learner.rank_group import SESSION_VARIABLE, STORE_VARIABLE

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
LONG_SESSION_S = 300.0
"""Seconds after which a session's end is no repetition of the one before."""
log = logging.getLogger(__name__)


class NodeLauncher:
    """Sessions of one node, one after the other, until a signal."""

    def __init__(self, settings: NodeSettings, rendezvous: Rendezvous, module: str, options: list[str]):
        self._settings, self._rendezvous = settings, rendezvous
        self._module, self._options = module, options
        self._stopping = threading.Event()
        self._ranks: Ranks | None = None
        self._backoff = ExponentialBackoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def run(self, ranks: int, grace_s: float) -> int:
        """Run sessions until a signal; return the status of the last, 0 between two. Main thread only.

        Raises Unavailable when too few nodes come; Conflict when node 0 refuses this one.
        """
        with self._signals():
            while True:
                log.info(
                    "node %d of %d waits for the others at %s",
                    *(self._settings.node_rank, self._settings.most, self._settings.rendezvous),
                )
                place = self._rendezvous.meet(self._stopping.is_set)
                if place is None:
                    return 0
                began_s = time.monotonic()
                status = self._session(place, ranks, grace_s)
                if self._stopping.is_set():
                    return status
                if time.monotonic() - began_s > LONG_SESSION_S:
                    self._backoff.reset()
                if status:
                    self._stopping.wait(self._backoff.next_s())

    def _session(self, place: Place, num_ranks: int, grace_s: float) -> int:
        """Run this node's part of a session and return its status."""
        last = place.first_rank + num_ranks - 1
        log.info(
            "node %d has ranks %d to %d of %d, on %d nodes",
            *(self._settings.node_rank, place.first_rank, last, place.world_size, place.nodes),
        )
        ranks = Ranks(first_rank=place.first_rank)
        ranks.on_loss = lambda how: self._rendezvous.leave(f"has lost {how}")
        variables = {
            "WORLD_SIZE": str(place.world_size),
            STORE_VARIABLE: self._settings.rendezvous,
            SESSION_VARIABLE: place.session,
        }

        def end_all(end: SessionEnd) -> None:
            ranks.events.put(EndAll(end.reason, end.orderly))

        watching = self._rendezvous.watch(place, end_all)
        self._ranks = ranks
        try:
            if self._stopping.is_set():
                return 0
            ranks.start_with(variables, self._module, self._options, num_ranks)
            ranks.see_through(grace_s)
        finally:
            self._ranks = None
            watching.set()
            ranks.kill()
            self._rendezvous.leave("has left")
        return ranks.status

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, lambda *_: self._stop()) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self) -> None:
        self._stopping.set()
        if self._ranks is not None:
            self._ranks.events.put(None)


def run_node(
    settings: NodeSettings,
    module: str,
    options: list[str],
    ranks: int,
    host: str,
    grace_s: float,
    wait_s: float,
) -> int:
    """Run this node's ranks in session after session; return the status of the last. Main thread only.

    Raises InvalidInput when node 0 cannot listen on `host`; Unavailable when too few nodes come within `wait_s`; Conflict.
    """
    rendezvous = Rendezvous(settings, ranks, host, wait_s)
    return NodeLauncher(settings, rendezvous, module, options).run(ranks, grace_s)
