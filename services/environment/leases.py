"""A lease as the exchange sends it, read into what its episodes begin with."""

from __future__ import annotations

import json
from collections.abc import Sequence

from paceline.environment.protocols import EpisodeLease, SampleJournal, TurnParams
from paceline.episodes import TurnArrays
from paceline.errors import WireError
from paceline.groups import Version
from paceline.services.environment.engine_list import Wanted
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import parse_message


def read_lease(lease: pb.Lease, payloads: Sequence[bytes]) -> EpisodeLease:
    """Return the group of a lease with its journal. Raises WireError."""
    try:
        prompt, columns = json.loads(lease.prompt_json), json.loads(lease.columns_json or "{}")
    except ValueError as error:
        raise WireError(f"prompt or columns of group {lease.group_id} are no JSON: {error}") from None
    if not isinstance(columns, dict):
        raise WireError(
            f"columns of group {lease.group_id} are {type(columns).__name__}, have to be an object"
        )
    return EpisodeLease(
        group_id=lease.group_id,
        attempt=lease.attempt,
        prompt=prompt,
        columns=columns,
        num_samples=lease.num_generations,
        seed=lease.seed,
        params=TurnParams.of(lease.params),
        journal={record.sample: _read_journal(record, payloads) for record in lease.journal},
    )


def wanted_by(lease: pb.Lease, max_age: int) -> Wanted:
    """Return the weights that a lease asks for: η steps old at most when the group was leased."""
    if lease.HasField("pinned_version"):
        pinned = Version(lease.pinned_version.session, lease.pinned_version.step)
        return Wanted(pinned=pinned, pinned_member=lease.pinned_member)
    return Wanted(oldest_step=max(0, lease.step - max_age))


def _read_journal(record: pb.EpisodeJournal, payloads: Sequence[bytes]) -> SampleJournal:
    if len(record.arrays_frames) != len(record.note_frames):
        raise WireError(
            f"sample {record.sample} has {len(record.arrays_frames)} turns and {len(record.note_frames)} notes"
        )
    turns = []
    for arrays, note in zip(record.arrays_frames, record.note_frames, strict=True):
        if not (0 < arrays <= len(payloads) and 0 < note <= len(payloads)):
            raise WireError(
                f"sample {record.sample} has frames {arrays} and {note} of a message with {len(payloads)}"
            )
        turns.append(
            (TurnArrays.decode(payloads[arrays - 1]), parse_message(pb.TurnNote, payloads[note - 1]))
        )
    return SampleJournal(record.life, record.failures, record.finished, record.given_up, tuple(turns))
