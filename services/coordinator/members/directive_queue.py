"""Directives that wait for one member to read them. The queue is bounded by their kinds, so that few slow members are
cut off.

A newer directive replaces a waiting one of the same kind, and waiting acknowledgements are sent together. Few others
remain: a member that does not read even those is cut off and has to reconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

from paceline.v1 import worker_pb2

MAX_WAITING = 256
"""Maximum of waiting directives that replace nothing."""

ACKS_AT_ONCE = 1000
"""Acknowledgements in one directive."""

MAX_ACKS = 64 * ACKS_AT_ONCE
REPLACING = frozenset(
    {"epoch", "keep_checkpoints", "checkpoint", "drain", "expelled", "host_plan", "engines"}
)
"""Kinds of which the newest directive replaces the earlier ones."""


class DirectiveQueue:
    """Queue with one reader; all writers are on its event loop."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, worker_pb2.ConnectResponse] = {}
        """Directives in the order in which they leave."""
        self._acks: dict[tuple[str, int, int], worker_pb2.WeightAck] = {}
        """Acknowledgements by member and version; they leave after `_waiting`."""
        self._numbers = 0
        self._plain = 0
        self._ended = False
        self._bell = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of directives that `get` would return."""
        return len(self._waiting) + -(-len(self._acks) // ACKS_AT_ONCE)

    def put(self, directive: worker_pb2.ConnectResponse) -> bool:
        """Queue a directive; return False when the member reads nothing."""
        kind = directive.WhichOneof("directive") or ""
        if kind == "weight_ack":
            return self.put_ack(directive.weight_ack)
        key: Hashable
        if kind in REPLACING:
            key = kind
        elif kind == "weight_progress":
            progress = directive.weight_progress
            key = (kind, progress.member_id, progress.version.session, progress.version.step)
        else:
            self._numbers += 1
            self._plain += 1
            key = self._numbers
            if self._plain > MAX_WAITING:
                return False
        self._waiting.pop(key, None)
        self._waiting[key] = directive
        self._bell.set()
        return True

    def put_ack(self, ack: worker_pb2.WeightAck) -> bool:
        """Queue an acknowledgement; return False when the member reads nothing."""
        self._acks[ack.member_id, ack.version.session, ack.version.step] = ack
        self._bell.set()
        return len(self._acks) <= MAX_ACKS

    def end(self) -> None:
        """End the queue: waiting directives are not sent, and no further ones are taken."""
        self._ended = True
        self._waiting.clear()
        self._acks.clear()
        self._bell.set()

    async def get(self) -> worker_pb2.ConnectResponse | None:
        """Return the next directive; None when the stream is to end."""
        while not self._ended and not self._waiting and not self._acks:
            self._bell.clear()
            await self._bell.wait()
        if self._ended:
            return None
        if self._waiting:
            key = next(iter(self._waiting))
            self._plain -= isinstance(key, int)
            return self._waiting.pop(key)
        first = list(self._acks)[:ACKS_AT_ONCE]
        acks = worker_pb2.WeightAcks(acks=[self._acks.pop(key) for key in first])
        return worker_pb2.ConnectResponse(weight_acks=acks)
