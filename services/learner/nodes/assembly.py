"""Makes node 0's decisions: which nodes take part in the next session, and when a session ends. A node is present from
its first heartbeat until it leaves or is silent. It joins again for each session, and as a new life if its process was
started again. Of two lives of one position on one host, the one that was started last counts. Of two lives on two
hosts, the second counts if the first has no more heartbeats; otherwise the second is refused, because two hosts were
given one position."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from paceline.services.learner.nodes.settings import NodeSettings
from paceline.services.learner.nodes.store import NodeStore

REVISION = 1
"""Revision of the entries that nodes write; nodes with another revision are refused."""
SILENT_S = 15.0
"""Seconds without a heartbeat after which a node counts as dead."""
ALIVE_S, DEAD_S = 1.5, 3.0
"""Seconds. If two hosts have lives of one position, the first life is alive if it has a heartbeat ALIVE_S or more after
the second has joined, and dead if it has none by DEAD_S."""
LAST_CALL_S = 10.0
"""Seconds for which a session that could begin waits for further nodes."""
MAX_RANKS = 1024
MAX_NEW = 256
"""Largest number of nodes that are introduced at the same time."""


@dataclass
class Node:
    """One life of a node."""

    number: int
    joined_s: float
    heard_s: float
    node_rank: int = -1
    """Position of the node; -1 until the node has written its position."""
    ranks: int = 0
    host: str = ""
    life: str = ""
    """Random id of the node's process."""
    started_s: float = 0.0
    """Start of the node's process in seconds, by its host's clock."""
    beat: Any = None
    contested: bool = False
    """True while nobody knows which of two lives of the node's position counts."""
    has_part: bool = False
    """True once this life has a part in a session; the node joins again for the next session."""


@dataclass(frozen=True)
class SessionEnd:
    """The end of a session for all its nodes."""

    reason: str
    orderly: bool = False
    """True if all ranks are alive and may end with a checkpoint."""


@dataclass
class Session:
    """The nodes of a session, by number."""

    name: str
    nodes: dict[int, Node] = field(default_factory=dict)


class Assembly:
    """Holds the nodes that have joined node 0; `now_s` is a monotonic time in all methods."""

    def __init__(self, store: NodeStore, settings: NodeSettings):
        self._store, self._settings = store, settings
        self._nodes: dict[int, Node] = {}
        self._num_joined = 0
        self._gathered: tuple[int, ...] = ()
        self._gathered_s = 0.0
        self._session: Session | None = None

    def assemble(self, now_s: float) -> str:
        """Begin a session as soon as enough nodes wait; return the waiting nodes as text for messages."""
        self._session = None
        self._refresh(now_s)
        waiting = self._waiting()
        numbers = tuple(sorted(node.number for node in waiting.values()))
        if numbers != self._gathered:
            self._gathered, self._gathered_s = numbers, now_s
        present = _named(sorted(waiting))
        self._store.write("present", nodes=present)
        is_complete = len(waiting) == self._settings.most
        is_enough = len(waiting) >= self._settings.least and now_s - self._gathered_s >= LAST_CALL_S
        if 0 in waiting and (is_complete or is_enough):
            self._begin(waiting)
        return present

    def check(self, now_s: float) -> SessionEnd | None:
        """Return the end of the session, which is also written for all nodes; None while the session continues."""
        assert self._session is not None
        session, before = self._session, dict(self._session.nodes)
        self._refresh(now_s)
        end = None
        for number, node in before.items():
            if number not in self._nodes:
                left = self._store.read(f"left/{number}")
                why = str(left.get("reason", ""))[:500] if left is not None else self._missing_because(node)
                end = SessionEnd(f"node {node.node_rank} {why or 'has left'}")
        waiting = self._waiting()
        waited_s = max((now_s - node.joined_s for node in waiting.values()), default=0.0)
        if waited_s >= LAST_CALL_S and len(before) < self._settings.most:
            end = end or SessionEnd(f"{_named(sorted(waiting))} joins", orderly=True)
        if end is not None:
            self._store.write(f"over/{session.name}", reason=end.reason, orderly=end.orderly)
        return end

    def end(self, reason: str) -> None:
        """Write at once that node 0 ends the session, because no other node decides that."""
        if self._session is not None:
            self._store.write(f"over/{self._session.name}", reason=reason, orderly=False)

    def _begin(self, waiting: dict[int, Node]) -> None:
        first, session = 0, Session(uuid.uuid4().hex)
        world_size = sum(node.ranks for node in waiting.values())
        for node_rank in sorted(waiting):
            node = waiting[node_rank]
            session.nodes[node.number], node.has_part = node, True
            facts = {"session": session.name, "world_size": world_size, "nodes": len(waiting)}
            self._store.write(f"place/{node.number}", first_rank=first, **facts)
            first += node.ranks
        self._session, self._gathered = session, ()

    def _waiting(self) -> dict[int, Node]:
        """Return the newest life of each position that has no part in a session yet."""
        newest = {}
        for number in sorted(self._nodes):
            node = self._nodes[number]
            if node.node_rank >= 0 and not node.has_part and not node.contested:
                newest[node.node_rank] = node
        return newest

    def _refresh(self, now_s: float) -> None:
        joined = min(self._store.number("joined", 0), self._num_joined + MAX_NEW)
        for number in range(self._num_joined + 1, joined + 1):
            self._nodes[number] = Node(number, now_s, now_s)
        self._num_joined = max(self._num_joined, joined)
        for number, node in list(self._nodes.items()):
            if node.node_rank < 0 and not self._introduce(node):
                del self._nodes[number]
                continue
            beat = self._store.read(f"beat/{number}")
            if beat is not None and beat != node.beat:
                node.beat, node.heard_s = beat, now_s
            if now_s - node.heard_s > SILENT_S or self._store.read(f"left/{number}") is not None:
                del self._nodes[number]
        self._keep_one_life(now_s)

    def _keep_one_life(self, now_s: float) -> None:
        """Of two lives of a position keep the life that counts; while this is undecided, mark both lives as contested."""
        counting: dict[int, Node] = {}
        for number in sorted(self._nodes):
            newer = self._nodes[number]
            newer.contested = False
            older = counting.setdefault(newer.node_rank, newer)
            if newer.node_rank < 0 or older is newer:
                continue
            loser = _loser(older, newer, now_s)
            if loser is None:
                older.contested = newer.contested = True
                continue
            del self._nodes[loser.number]
            if loser is older:
                counting[newer.node_rank] = newer
            else:
                why = f"--node-rank {newer.node_rank} belongs to a node that runs on {older.host!r}; give each node its own number"
                self._store.write(f"place/{newer.number}", refusal=why)

    def _missing_because(self, node: Node) -> str:
        is_replaced = any(other.node_rank == node.node_rank for other in self._nodes.values())
        return "was started again" if is_replaced else f"is silent for {SILENT_S:g} s"

    def _introduce(self, node: Node) -> bool:
        """Read a node's entry about itself, if there is an entry; return False for a node that is refused."""
        entry = self._store.read(f"node/{node.number}")
        if entry is None:
            return True
        node_rank, ranks = entry.get("node_rank"), entry.get("ranks")
        if entry.get("revision") != REVISION:
            why = f"the node's rendezvous has revision {entry.get('revision')!r:.20}, not {REVISION}: use one version on all nodes"
        elif not isinstance(node_rank, int) or not 0 <= node_rank < self._settings.most:
            why = f"--node-rank {node_rank!r:.20} is none of the {self._settings.most} nodes in node 0's --nodes"
        elif not isinstance(ranks, int) or not 1 <= ranks <= MAX_RANKS:
            why = f"--ranks {ranks!r:.20} is not between 1 and {MAX_RANKS}"
        else:
            node.node_rank, node.ranks = node_rank, ranks
            node.host, node.life = str(entry.get("host", ""))[:200], str(entry.get("life", ""))[:200]
            started_s = entry.get("started_s")
            node.started_s = float(started_s) if isinstance(started_s, int | float) else 0.0
            return True
        self._store.write(f"place/{node.number}", refusal=why)
        return False


def _loser(older: Node, newer: Node, now_s: float) -> Node | None:
    """Return which of two lives of a position does not count; None while that is undecided."""
    if older.life == newer.life:
        return older
    if older.host == newer.host:
        return newer if newer.started_s < older.started_s else older
    if older.heard_s - newer.joined_s >= ALIVE_S:
        return newer
    return older if now_s - newer.joined_s >= DEAD_S else None


def _named(node_ranks: list[int]) -> str:
    return ("node " if len(node_ranks) == 1 else "nodes ") + (", ".join(map(str, node_ranks)) or "none")
