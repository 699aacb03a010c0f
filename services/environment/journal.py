"""The journal of a leased group's turns, over the exchange: each call returns when the record is committed.

A request is sent again until it is answered (`services/common/membership.py`), also through a restart of the coordinator, and
a record that is there already is answered `duplicate`. So a call ends with the record in the ledger, or the lease is lost.
"""

from __future__ import annotations

from paceline.environment.protocols import LeaseLost
from paceline.episodes import TurnArrays
from paceline.services.common.membership import Membership
from paceline.v1 import exchange_pb2 as pb

RECORDED = (pb.REPLY_STATUS_COMMITTED, pb.REPLY_STATUS_DUPLICATE)
MAX_ERROR_CHARS = 2000


class LeaseRefused(LeaseLost):
    """The exchange refuses a record of this lease for good: it is returned with the reason."""


class LeasedJournal:
    """`Journal` of one leased group."""

    def __init__(self, membership: Membership, run_id: str, group_id: int, attempt: int):
        self._membership, self._run_id = membership, run_id
        self._group_id, self._attempt = group_id, attempt
        self.num_turns = self.num_tokens = 0
        """Turns and sampled tokens that this lease has recorded."""

    async def turn(
        self, sample: int, life: int, index: int, arrays: TurnArrays, note: pb.TurnNote, last: bool
    ) -> None:
        """Record a finished turn. Raises LeaseLost."""
        turn = pb.EpisodeTurn(
            group_id=self._group_id, attempt=self._attempt, sample=sample, life=life, index=index, last=last
        )
        frames = [arrays.encode(), note.SerializeToString()]
        await self._record(pb.ExchangeRequest(run_id=self._run_id, turn=turn), frames)
        self.num_turns += 1
        self.num_tokens += len(arrays.token_ids)

    async def end(self, sample: int, life: int, reason: str, error: str, give_up: bool) -> None:
        """Record that a life of a sample has ended. Raises LeaseLost."""
        end = pb.EpisodeEnd(
            group_id=self._group_id,
            attempt=self._attempt,
            sample=sample,
            life=life,
            reason=reason,
            error=error[:MAX_ERROR_CHARS],
            give_up=give_up,
        )
        await self._record(pb.ExchangeRequest(run_id=self._run_id, episode_end=end), [])

    async def _record(self, request: pb.ExchangeRequest, frames: list[bytes]) -> None:
        reply, _ = await self._membership.request(request, frames)
        if reply.status in RECORDED:
            return
        group = f"group {self._group_id}, attempt {self._attempt}"
        if reply.status == pb.REPLY_STATUS_STALE:
            raise LeaseLost(f"{group}: {reply.message or 'another worker holds the lease'}")
        raise LeaseRefused(f"{group}: the exchange refuses the record: {reply.message}")
