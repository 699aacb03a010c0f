"""One rank's client of the exchange: it fetches the rank's part of each batch, and sends the receipts. No request is
given up while the coordinator is unreachable. A rank that is stopping is the exception: it waits for a receipt no
longer than its grace, and for a batch not at all. `StepAgreement` keeps the ranks at one point of their collectives."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch

from paceline.errors import PacelineError, Unavailable, WireError
from paceline.groups import Group
from paceline.learner.collectives import any_over_ranks
from paceline.learner.step.sampler_check import Difference
from paceline.services.learner.context import RankContext
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import decode_group

log = logging.getLogger(__name__)
ATTEMPTS = 3
BATCH_WAIT_S = 5.0
REQUEST_TIMEOUT_S = math.inf
"""Seconds to wait for a reply: no limit. If the connection has given up, `BackgroundLoop.wait` raises."""


class RankBatch(NamedTuple):
    """This rank's part of a step's batch, or the answer that the run, or this session of it, has ended."""

    reply: pb.BatchReply
    groups: list[Group]
    """Groups with the log-probabilities of the reward pool's reference; empty if the learner reads the data set."""

    @property
    def is_end(self) -> bool:
        """Return whether the run, or this session of it, has ended."""
        return self.reply.state == pb.BATCH_STATE_END

    @property
    def is_last(self) -> bool:
        """Return whether the run ends normally before this step."""
        return self.reply.state == pb.BATCH_STATE_LAST

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of the groups, trained or not, as the token accounting counts them."""
        return sum(group.num_tokens for group in self.groups)

    @classmethod
    def end_of_run(cls) -> RankBatch:
        return cls(pb.BatchReply(state=pb.BATCH_STATE_LAST), [])

    @classmethod
    def decode(cls, reply: pb.BatchReply, payloads: Sequence[bytes]) -> RankBatch:
        """Return the batch of a reply. Raises WireError, also if a group's digest differs, because the receipt vouches
        for it."""
        groups = []
        for index, sent in enumerate(reply.groups):
            reference = payloads[sent.reference_frame - 1] if sent.reference_frame else None
            group = decode_group(sent.group_id, payloads[index], sent.rewards, reference)
            if group.digest(sent.digest) != sent.digest:
                raise WireError(
                    f"group {sent.group_id} of step {reply.step} arrived changed: its digest is not {sent.digest}"
                )
            if sent.scores_digest and group.scores_digest() != sent.scores_digest:
                raise WireError(
                    f"the scores of group {sent.group_id} of step {reply.step} arrived changed: their digest is not "
                    f"{sent.scores_digest}"
                )
            groups.append(group)
        return cls(reply, groups)


class BatchClient:
    """The client of one session. Its methods raise PacelineError if the exchange refuses a request."""

    def __init__(self, run_id: str, session: int, rank: RankContext):
        self.superseded = threading.Event()
        """Event that is set when this session is over, by this thread or by the control plane's thread."""
        self.receipted = 0
        """The last step whose receipt of this rank the coordinator has acknowledged, plus 1; 0 before the first receipt."""
        self.audit_head = pb.AuditHead()
        """Newest record of the coordinator's audit log at the time of this rank's newest receipt; empty before the
        first receipt."""
        self._run_id, self._session, self._rank = run_id, session, rank

    def fetch(self, step: int) -> RankBatch | None:
        """Return this rank's part of a step's batch; None if there is none yet or this rank stops. Refetch a damaged
        part."""
        rank = self._rank
        request = pb.BatchRequest(
            step=step, rank=rank.place.rank, world_size=rank.place.world_size, wait_s=BATCH_WAIT_S
        )
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                reply, payloads = self._request(0.0, batch=request)
            except Unavailable:
                if rank.stopping.is_set():
                    return None
                raise
            if reply.status == pb.REPLY_STATUS_STALE or self.superseded.is_set():
                return RankBatch(pb.BatchReply(state=pb.BATCH_STATE_END), [])
            if reply.status != pb.REPLY_STATUS_OK:
                raise PacelineError(f"the exchange refused the request for step {step}: {reply.message}")
            if reply.batch.state == pb.BATCH_STATE_WAIT:
                break
            try:
                return RankBatch.decode(reply.batch, payloads)
            except WireError as error:
                if not attempts_left:
                    raise
                log.error("%s; fetching the batch again", error)
        return None

    def send_receipt(
        self,
        batch: RankBatch,
        step: int,
        tokens: int,
        metrics: dict[str, float],
        comparisons: Sequence[Difference] = (),
    ) -> None:
        """Report that this rank has trained `batch`, with its comparisons; rank 0's metrics are the step's."""
        receipt = pb.Receipt(
            step=step,
            rank=self._rank.place.rank,
            world_size=self._rank.place.world_size,
            groups=[
                pb.BatchGroup(group_id=sent.group_id, digest=sent.digest, scores_digest=group.scores_digest())
                for sent, group in zip(batch.reply.groups, batch.groups, strict=True)
            ],
            tokens=tokens,
            metrics=metrics if self._rank.place.rank == 0 else {},
            comparisons=[pb.Comparison(**compared._asdict()) for compared in comparisons],
        )
        reply, _ = self._request(self._rank.grace_s, receipt=receipt)
        if reply.status == pb.REPLY_STATUS_INVALID:
            raise PacelineError(f"the receipt of step {step} was refused: {reply.message}")
        if reply.status == pb.REPLY_STATUS_STALE:
            self.superseded.set()
        else:
            self.receipted = step + 1
            self.audit_head = reply.receipt.audit_head

    def _request(self, grace_s: float, **content: Any) -> tuple[pb.ExchangeReply, list[bytes]]:
        """Return the reply to a request. Raises Unavailable `grace_s` after this rank has got the order to stop."""
        rank = self._rank
        request = pb.ExchangeRequest(run_id=self._run_id, session=self._session, **content)
        try:
            return rank.background.wait(rank.membership.request(request), REQUEST_TIMEOUT_S, rank.stopping, grace_s)
        except TimeoutError:
            raise Unavailable("the coordinator did not answer before this rank had to stop") from None


@dataclass(frozen=True)
class StepAgreement:
    """Facts that decide what happens before the next step, on one rank or on any rank."""

    batch_missing: bool
    """True if this rank's part of the batch is missing: no rank trains before every rank has its part."""
    run_ended: bool
    """True if the run, or this session of it, has ended."""
    run_complete: bool
    """True if the run ends normally before this step."""
    stopping: bool
    """True if the learner ends after this step."""
    checkpoint_ordered: bool
    export_ordered: bool
    checkpoint_unwritten: bool
    """True if a checkpoint is in progress, so that `SessionCheckpoints.finish` would wait."""
    snapshot_wanted: bool
    """True if a member needs the newest version in full from the object store."""

    def on_any_rank(self, device: torch.device) -> StepAgreement:
        """Return the facts that are true on at least one rank. A collective call."""
        return StepAgreement(*any_over_ranks(astuple(self), device))
