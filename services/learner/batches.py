"""One rank's parts of a run's batches, as it asks the exchange for them and receipts them.

Nothing is given up because the coordinator is away: the learner has nothing else to do. Only a rank that was told to stop
waits no longer than its grace.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

from paceline.errors import PacelineError, Unavailable, WireError
from paceline.groups import Group
from paceline.wire import decode_group
from protos.paceline.v1 import exchange_pb2 as pb
from services.learner.context import RankContext

log = logging.getLogger(__name__)

ATTEMPTS = 3
BATCH_WAIT_S = 5.0
REQUEST_TIMEOUT_S = math.inf
"""The connection tries for as long as this rank lives; `check` in `BackgroundLoop.wait` notices one that has given up."""


class Part(NamedTuple):
    """What the exchange said of a step: this rank's part of its batch, or that there is none any more."""

    batch: pb.BatchReply
    groups: list[Group]
    """With what the reward pool's reference said; none where the learner reads the data set itself."""

    @property
    def is_end(self) -> bool:
        """Whether the run, or this session of it, has ended."""
        return self.batch.state == pb.BATCH_STATE_END

    @classmethod
    def of(cls, batch: pb.BatchReply, payloads: Sequence[bytes]) -> Part:
        """As it came. Raises WireError, also for a group that is not what the exchange says that it is: a receipt by its digest is
        a rank's own word."""
        groups = []
        for place, said in enumerate(batch.groups):
            reference = payloads[said.reference_frame - 1] if said.reference_frame else None
            group = decode_group(said.group_id, payloads[place], said.rewards, reference)
            if group.digest(said.digest) != said.digest:
                raise WireError(
                    f"group {said.group_id} of step {batch.step} arrived changed: its digest is not {said.digest}"
                )
            if said.scores_digest and group.scores_digest() != said.scores_digest:
                raise WireError(
                    f"the scores of group {said.group_id} of step {batch.step} arrived changed: their digest is not "
                    f"{said.scores_digest}"
                )
            groups.append(group)
        return cls(batch, groups)


class Parts:
    """Those of one session. Its methods raise PacelineError for what the exchange refuses."""

    def __init__(self, run_id: str, session: int, rank: RankContext):
        self.superseded = threading.Event()
        """Set when this session is over, by whoever hears of it."""
        self.receipted = 0
        """Steps up to which the coordinator has acknowledged this rank's receipts; 0 before the first."""
        self._run_id, self._session, self._rank = run_id, session, rank

    def ask(self, step: int) -> Part | None:
        """This rank's part of a step; None while there is no batch yet. One that arrives damaged is asked for again."""
        for _ in range(ATTEMPTS - 1):
            try:
                return self._ask(step)
            except WireError as error:
                log.error("%s; the part is asked for again", error)
        return self._ask(step)

    def _ask(self, step: int) -> Part | None:
        rank = self._rank
        asked = pb.BatchRequest(step=step, rank=rank.rank, world_size=rank.world_size, wait_s=BATCH_WAIT_S)
        reply, payloads = self._request(
            pb.ExchangeRequest(run_id=self._run_id, session=self._session, batch=asked)
        )
        if reply.status == pb.REPLY_STATUS_STALE or self.superseded.is_set():
            return Part.of(pb.BatchReply(state=pb.BATCH_STATE_END), [])
        if reply.status != pb.REPLY_STATUS_OK:
            raise PacelineError(f"the exchange refused the request for step {step}: {reply.message}")
        return None if reply.batch.state == pb.BATCH_STATE_WAIT else Part.of(reply.batch, payloads)

    def send_receipt(self, part: Part, step: int, tokens: int, metrics: dict[str, float]) -> None:
        """Says that this part is trained; rank 0's metrics are the step's."""
        receipt = pb.Receipt(
            step=step,
            rank=self._rank.rank,
            world_size=self._rank.world_size,
            groups=[
                pb.BatchGroup(group_id=said.group_id, digest=said.digest, scores_digest=group.scores_digest())
                for said, group in zip(part.batch.groups, part.groups, strict=True)
            ],
            tokens=tokens,
            metrics=metrics if self._rank.rank == 0 else {},
        )
        reply, _ = self._request(
            pb.ExchangeRequest(run_id=self._run_id, session=self._session, receipt=receipt)
        )
        if reply.status == pb.REPLY_STATUS_INVALID:
            raise PacelineError(f"the receipt of step {step} was refused: {reply.message}")
        if reply.status == pb.REPLY_STATUS_STALE:
            self.superseded.set()
        else:
            self.receipted = step + 1

    def _request(self, request: pb.ExchangeRequest) -> tuple[pb.ExchangeReply, list[bytes]]:
        rank = self._rank
        try:
            return rank.background.wait(
                rank.membership.request(request), REQUEST_TIMEOUT_S, rank.stopping, rank.grace_s
            )
        except TimeoutError:
            raise Unavailable("the coordinator did not answer before this rank had to go") from None
