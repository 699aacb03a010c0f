"""Validates uploaded groups and writes their bytes, off the event loop and before the transaction; likewise the turns of
episodes, and a reference's log-probabilities, which come with the scores.

Both run on threads: `validate_upload` decodes, checks and hashes an upload, `store` stores the valid ones with one
sync, before the transaction that may refer to them. A group that the transaction then refuses (a duplicate) leaves
bytes behind that are removed with their segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.array_frames import Buffer
from paceline.errors import WireError
from paceline.groups import FloatArray, Group
from paceline.rate_limited_log import unforeseen
from paceline.services.coordinator.exchange.uploads.upload_checks import (
    ABORTED,
    FINISHED,
    GroupTurn,
    Limits,
    UploadedTurn,
    check_arrays,
    check_logprobs,
    check_rows,
    check_samples,
    check_texts,
    check_turn,
    turns_of,
)
from paceline.services.coordinator.ledger.segments import Location, PayloadStore, Record
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import (
    CompletionArrays,
    decode_reference,
    parse_message,
    split_completions,
    split_rows,
)


@dataclass
class Arrived:
    """A request with its payload frames; a result with bulk also has the results of `validate_upload` and `store`."""

    request: pb.ExchangeRequest
    frames: Sequence[Buffer] = field(default_factory=list)
    limits: Limits | None = None
    """Limits of the run; None when there is no run."""
    kind: str = field(init=False)
    """Name of the request's body; empty without one."""
    group: Group | None = None
    """The group, or the prefix of one, without its texts, if its bytes are valid; its arrays are views into the
    frame."""
    turns: list[GroupTurn] = field(default_factory=list)
    """Turns of a group with rows."""
    turn: UploadedTurn | None = None
    """What the ledger keeps of an episode's turn, if its bytes are valid."""
    max_id: int = 0
    """Largest token id of the group or turn."""
    reference: FloatArray | None = None
    """[ΣT] log-probabilities of the reference that came with a score, if its bytes are valid."""
    record: Record | None = None
    """Its bytes in the ledger's form."""
    location: Location | None = None
    """Its location on the disk."""
    fault: str = ""
    """Reason why it can never be accepted; empty while there is none."""
    is_decided: bool = False
    """True when it was sent again and is decided in the ledger: its frames were not kept."""

    def __post_init__(self) -> None:
        self.kind = self.request.WhichOneof("body") or ""

    @property
    def has_bulk(self) -> bool:
        """Return whether it has arrays that the ledger keeps, so that they are stored before its transaction."""
        if self.is_decided:
            return False
        return self.kind in ("group", "turn") or (
            self.kind in ("score", "lease_return") and bool(self.frames)
        )


def validate_upload(arrived: Arrived) -> None:
    """Decode and check a result with bulk; `fault` says what no state of the ledger could make acceptable."""
    try:
        if arrived.kind == "group":
            arrived.group = _decode(arrived)
            arrays, texts = arrived.frames
            arrived.record = Record.of(texts, arrays)
        elif arrived.kind == "lease_return":
            arrived.group = _decode_begun(arrived)
            returned = arrived.request.lease_return
            header = pb.LeaseReturn(
                group_id=returned.group_id, attempt=returned.attempt, finish_reasons=returned.finish_reasons
            )
            arrived.record = Record.of(header.SerializeToString(), arrived.frames[0])
        elif arrived.kind == "turn":
            arrived.turn = check_turn(arrived.request.turn, arrived.frames, arrived.limits)
            arrived.max_id = arrived.turn.max_id
            arrived.record = Record.of(arrived.frames[1], arrived.frames[0])
        elif len(arrived.frames) != 1:
            raise WireError(f"a score has one payload frame at most, not {len(arrived.frames)}")
        else:
            reference = decode_reference(arrived.frames[0])
            check_logprobs("reference_logprobs", reference)
            arrived.reference = reference
            arrived.record = Record.of(b"", arrived.frames[0])
    except WireError as error:
        arrived.fault = str(error)
    except Exception as error:  # whatever bytes come, the other groups are stored
        logged = unforeseen.note(f"the check of a {arrived.kind}", error)
        arrived.fault = f"the coordinator failed on it: {logged}"


def store(payloads: PayloadStore, results: Sequence[Arrived]) -> None:
    """Store the valid ones of the uploads that were checked; they are durable when it returns. Raises LedgerFault."""
    good = [arrived for arrived in results if arrived.record is not None]
    if good:
        records = [arrived.record for arrived in good if arrived.record is not None]
        for arrived, location in zip(good, payloads.append(records), strict=True):
            arrived.location = location


def _decode(arrived: Arrived) -> Group:
    """Return the group of a result. Raises WireError for what no state of the ledger could make acceptable."""
    result, frames = arrived.request.group, arrived.frames
    if len(frames) != 2:
        raise WireError(f"a group result has two payload frames, not {len(frames)}")
    texts, arrays = parse_message(pb.Texts, frames[1]), CompletionArrays.of(frames[0])
    arrived.max_id = check_arrays(arrays, arrived.limits)
    if arrays.rows is None:
        check_texts(len(frames[1]), len(arrays.token_ids), texts.finish_reasons, FINISHED)
    else:
        check_rows(arrays.rows, arrays.lengths.tolist(), len(arrays.prompt_ids), arrived.limits)
        num_tokens = len(arrays.prompt_ids) + len(arrays.token_ids)
        check_texts(0, num_tokens, texts.finish_reasons, FINISHED)
        check_samples(texts, arrays.rows.num_samples, num_tokens, len(frames[1]))
    unread = [""] * len(texts.texts)  # no check here needs the texts
    prompt_ids, completions = split_completions(arrays, texts.finish_reasons, unread)
    group = Group(result.group_id, prompt_ids, completions, rows=split_rows(arrays, completions))
    if group.rows is not None:
        arrived.turns = turns_of(group)
    if group.digest(like=result.digest) != result.digest:
        raise WireError(f"the digest of group {result.group_id} does not match its arrays")
    if group.num_tokens == 0:
        raise WireError(f"group {result.group_id} has no tokens")
    return group


def _decode_begun(arrived: Arrived) -> Group:
    """Return the unfinished samples of a returned lease. Raises WireError."""
    returned, frames = arrived.request.lease_return, arrived.frames
    if len(frames) != 1:
        raise WireError(f"a lease is returned with one payload frame at most, not {len(frames)}")
    arrays, reasons = CompletionArrays.of(frames[0]), returned.finish_reasons
    arrived.max_id = check_arrays(arrays, arrived.limits)
    size_bytes = sum(map(len, returned.texts))
    check_texts(size_bytes, len(arrays.token_ids), reasons, FINISHED + ABORTED)
    return Group(returned.group_id, *split_completions(arrays, reasons, [""] * len(reasons)))
