"""What can be said of a generated group without the ledger, and where its bytes go: the costly part of a commit.

`take_in` runs on a thread beside the event loop. It decodes, checks and hashes the groups that have arrived and stores
the good ones with one sync, before the transaction that may refer to them. A group that the transaction then does not
want (a duplicate) leaves bytes behind that go with their segment.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import WireError
from paceline.groups import Group
from paceline.wire import Buffer, decode_completions
from protos.paceline.v1 import exchange_pb2 as pb
from services.coordinator.payloads import PayloadStore, Place

log = logging.getLogger(__name__)


@dataclass
class Arrived:
    """A request with its payload frames. For a group result also what `take_in` made of it."""

    request: pb.ExchangeRequest
    frames: Sequence[Buffer] = field(default_factory=list)
    group: Group | None = None
    """The group, if its bytes make sense; its arrays are views into the frame."""
    place: Place | None = None
    """Where it is on the disk."""
    fault: str = ""
    """Why it can never be accepted."""


def take_in(payloads: PayloadStore, results: Sequence[Arrived]) -> None:
    """Checks group results and stores the good ones; they are durable when it returns. Raises LedgerFault."""
    for arrived in results:
        try:
            arrived.group = _decode(arrived)
        except WireError as error:
            arrived.fault = str(error)
        except Exception as error:  # whatever bytes come, the other groups are stored
            log.exception("group %d cannot be looked at", arrived.request.group.group_id)
            arrived.fault = f"the coordinator failed on it: {error!r}"
    good = [arrived for arrived in results if arrived.group is not None]
    if good:
        records = [(arrived.request.group.SerializeToString(), arrived.frames[0]) for arrived in good]
        for arrived, place in zip(good, payloads.append(records), strict=True):
            arrived.place = place


def _decode(arrived: Arrived) -> Group:
    """The group of a result. Raises WireError for what no state of the ledger could make acceptable."""
    result, frames = arrived.request.group, arrived.frames
    if len(frames) != 1:
        raise WireError(f"a group result has one payload frame, not {len(frames)}")
    prompt_ids, completions = decode_completions(frames[0], result.finish_reasons, result.texts)
    group = Group(result.group_id, prompt_ids, completions)
    if group.digest() != result.digest:
        raise WireError(f"the digest of group {result.group_id} does not match its arrays")
    if any(completion.finish_reason not in ("stop", "length") for completion in completions):
        raise WireError(f"group {result.group_id} has unfinished completions; hand the lease back")
    if group.num_tokens == 0:
        raise WireError(f"group {result.group_id} has no tokens")
    return group
