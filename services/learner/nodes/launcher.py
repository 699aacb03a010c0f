"""Launches one node's ranks: it meets the other nodes, starts this node's part of the session, and repeats.

A session ends on all nodes if any rank or node is lost; the next one begins, from the coordinator's checkpoint, as soon
as there are enough nodes. The nodes meet in a rendezvous store that node 0 hosts: a node joins under a new number,
writes its position and its number of ranks, and gets its part in the next session from node 0 (`assembly.py`). During
the session a node writes a heartbeat each second and reads whether the session is over; a node that loses the store
ends its part.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from paceline.calls.backoff import ExponentialBackoff
from paceline.errors import Conflict, InvalidInput, Unavailable, first_line
from paceline.services.learner.launcher import EndAll, Ranks, at_signals
from paceline.services.learner.nodes.assembly import REVISION, Assembly, SessionEnd
from paceline.services.learner.nodes.settings import NodeSettings
from paceline.services.learner.nodes.store import FAULTS, NodeStore, connect, serve
from paceline.services.learner.rank_group import SESSION_VARIABLE, STORE_VARIABLE

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
BEAT_S, POLL_S = 1.0, 0.2
LONG_SESSION_S = 300.0
"""Seconds. If a session ran longer than this, its end does not count as a repeated failure."""
log = logging.getLogger(__name__)


class NodeLauncher:
    """Runs sessions of one node, one after the other, until a signal."""

    def __init__(self, settings: NodeSettings, rendezvous: Rendezvous, module: str, options: list[str]):
        self._settings, self._rendezvous = settings, rendezvous
        self._module, self._options = module, options
        self._stopping = threading.Event()
        self._ranks: Ranks | None = None
        self._backoff = ExponentialBackoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def run(self, ranks: int, grace_s: float) -> int:
        """Run sessions until a signal, and return the status of the last; 0 if the signal came between two sessions.
        Main thread only. Raises Unavailable if too few nodes come; Conflict if node 0 refuses this one."""
        with at_signals(self._stop):
            while True:
                log.info(
                    "node %d of %d waits for the other nodes at %s",
                    *(self._settings.node_rank, self._settings.most, self._settings.rendezvous),
                )
                part = self._rendezvous.meet(self._stopping.is_set)
                if part is None:
                    return 0
                began_s = time.monotonic()
                status = self._session(part, ranks, grace_s)
                if self._stopping.is_set():
                    return status
                if time.monotonic() - began_s > LONG_SESSION_S:
                    self._backoff.reset()
                if status:
                    self._stopping.wait(self._backoff.next_s())

    def _session(self, part: SessionPart, num_ranks: int, grace_s: float) -> int:
        last = part.first_rank + num_ranks - 1
        log.info(
            "node %d has ranks %d to %d of %d, on %d nodes",
            *(self._settings.node_rank, part.first_rank, last, part.world_size, part.nodes),
        )
        ranks = Ranks(first_rank=part.first_rank)
        ranks.on_loss = lambda how: self._rendezvous.leave(f"has lost {how}")
        variables = {
            "WORLD_SIZE": str(part.world_size),
            STORE_VARIABLE: self._settings.rendezvous,
            SESSION_VARIABLE: part.session,
        }

        def end_all(end: SessionEnd) -> None:
            ranks.events.put(EndAll(end.reason, end.orderly))

        watching = self._rendezvous.watch(part, end_all)
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

    def _stop(self) -> None:
        self._stopping.set()
        if self._ranks is not None:
            self._ranks.events.put(None)


@dataclass(frozen=True)
class SessionPart:
    """This node's part of a session."""

    session: str
    first_rank: int
    """Rank of this node's first process."""
    world_size: int
    nodes: int


class Rendezvous:
    """This node's side of the rendezvous; on node 0 also the store and the decisions."""

    def __init__(self, settings: NodeSettings, ranks: int, host: str, wait_s: float):
        """`host` is the address that node 0 listens on; `wait_s` is the longest wait for the other nodes. Raises
        InvalidInput if node 0 cannot listen there."""
        self._settings, self._ranks, self._wait_s = settings, ranks, wait_s
        name, _, port = settings.rendezvous.rpartition(":")
        self._host, self._port = name.strip("[]"), int(port)
        self._is_first = settings.node_rank == 0
        if self._is_first and _is_loopback(host) and not _is_loopback(self._host):
            raise InvalidInput(
                f"--host {host} can be reached only from this host, so the other nodes cannot come to --rendezvous "
                f"{settings.rendezvous}; give as --host the address that --rendezvous names, or 0.0.0.0"
            )
        self._store: NodeStore | None = serve(host, self._port) if self._is_first else None
        self._assembly = Assembly(self._store, settings) if self._store is not None else None
        self._number = 0
        self._life, self._started_s = uuid.uuid4().hex, time.time()
        self._last_beat_s = 0.0
        self._watching: threading.Thread | None = None

    def meet(self, is_stopping: Callable[[], bool]) -> SessionPart | None:
        """Return this node's part in the next session; None if this node must stop earlier. Raises Unavailable if too
        few nodes have come within the wait; Conflict if node 0 refuses this one."""
        if self._watching is not None:
            self._watching.join()  # each operation of the store has a deadline
        began_s, present = time.monotonic(), ""
        self.leave("has joined anew")
        while not is_stopping():
            try:
                store = self._store = self._store or connect(self._host, self._port)
                self._number = self._number or self._join(store)
                self._beat(store)
                if self._assembly is not None:
                    present = self._assembly.assemble(time.monotonic())
                else:
                    present = str((store.read("present") or {}).get("nodes", ""))[:500]
                if (part := self._part(store)) is not None:
                    return part
            except FAULTS as fault:
                if self._is_first:
                    raise Unavailable(f"the rendezvous of this node has failed: {first_line(fault)}") from None
                self._store, self._number, present = None, 0, ""
            if time.monotonic() - began_s > self._wait_s:
                raise Unavailable(self._too_late(present))
            time.sleep(POLL_S)
        return None

    def watch(self, part: SessionPart, take: Callable[[SessionEnd], None]) -> threading.Event:
        """Call `take` once, from a thread, if another node ends the session; set the returned event to end the watch."""
        ended = threading.Event()
        self._watching = threading.Thread(target=self._watch, args=(part, take, ended), daemon=True)
        self._watching.start()
        return ended

    def leave(self, reason: str) -> None:
        """Tell the other nodes that this node's part is over. `reason` follows its name, as in "node 3 has left"."""
        if self._store is not None and self._number:
            try:
                self._store.write(f"left/{self._number}", reason=reason)
                if self._assembly is not None:
                    self._assembly.end(f"node 0 {reason}")
            except FAULTS:  # node 0 is gone, so nobody needs the reason
                self._store = None
        self._number = 0

    def _watch(self, part: SessionPart, take: Callable[[SessionEnd], None], ended: threading.Event) -> None:
        store = self._store
        assert store is not None
        while not ended.wait(POLL_S):
            try:
                self._beat(store)
                if self._assembly is not None:
                    end = self._assembly.check(time.monotonic())
                else:
                    over = store.read(f"over/{part.session}")
                    end = None if over is None else _end_of(over)
            except FAULTS as fault:
                end = SessionEnd(f"node 0, which hosts the rendezvous, does not answer ({first_line(fault)})")
            if end is not None:
                if not ended.is_set():
                    take(end)
                return

    def _join(self, store: NodeStore) -> int:
        number = store.number("joined", 1)
        entry = {"revision": REVISION, "node_rank": self._settings.node_rank, "ranks": self._ranks}
        store.write(f"node/{number}", **entry, host=socket.gethostname(), life=self._life, started_s=self._started_s)
        self._last_beat_s = 0.0
        return number

    def _beat(self, store: NodeStore) -> None:
        if time.monotonic() - self._last_beat_s >= BEAT_S:
            self._last_beat_s = time.monotonic()
            store.write(f"beat/{self._number}", beat=uuid.uuid4().hex)

    def _part(self, store: NodeStore) -> SessionPart | None:
        entry = store.read(f"place/{self._number}")
        if entry is None:
            return None
        if "refusal" in entry:
            raise Conflict(f"node 0 refuses this node: {str(entry['refusal'])[:500]}")
        try:
            numbers = (int(entry["first_rank"]), int(entry["world_size"]), int(entry["nodes"]))
            return SessionPart(str(entry["session"]), *numbers)
        except (KeyError, TypeError, ValueError):
            raise Conflict("node 0 has written a malformed part of a session; use one version on all nodes") from None

    def _too_late(self, present: str) -> str:
        settings = self._settings
        expected = str(settings.most) if settings.least == settings.most else f"{settings.least} to {settings.most}"
        if not present:
            return (
                f"no rendezvous answers at {settings.rendezvous} after {self._wait_s:g} s; start node 0 at this address, correct "
                "--rendezvous, or wait longer with --node-wait"
            )
        return (
            f"the rendezvous {settings.rendezvous} has {present} of {expected} nodes after {self._wait_s:g} s; start the other nodes with "
            "the same --nodes and --rendezvous, or wait longer with --node-wait"
        )


def _is_loopback(host: str) -> bool:
    """Return whether a name or address leads only to this host; False for a name without an address."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def _end_of(over: dict[str, object]) -> SessionEnd:
    return SessionEnd(str(over.get("reason") or "a node has left")[:500], over.get("orderly") is True)
