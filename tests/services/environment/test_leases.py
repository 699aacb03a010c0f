"""Leases as the exchange sends them."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.errors import WireError
from paceline.groups import Version, VersionSpan
from paceline.services.environment.run import read_lease, required_by
from paceline.services.environment.sampling_workers import RequiredWeights
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import TurnArrays

ARRAYS = TurnArrays(
    0,
    np.array([1, 2], np.int32),
    np.array([3], np.int32),
    np.zeros(1, np.float32),
    (VersionSpan(1, 4, 0, 1),),
)
NOTE = pb.TurnNote(text="three", finish_reason="stop", state=b"state")


def lease(**fields: object) -> pb.Lease:
    known: dict[str, object] = {
        "group_id": 7,
        "attempt": 2,
        "prompt_json": '[{"role": "user", "content": "1+2"}]',
        "columns_json": '{"answer": 3}',
        "seed": 11,
        "num_generations": 4,
        "params": {"max_new_tokens": 8, "temperature": 0.5, "top_p": 1.0},
    }
    return pb.Lease(**{**known, **fields})  # type: ignore[arg-type]


def test_a_lease_with_its_journal() -> None:
    journal = [
        pb.EpisodeJournal(sample=1, life=2, failures=1, arrays_frames=[1, 3], note_frames=[2, 4], finished=True),
        pb.EpisodeJournal(sample=3, life=4, given_up=True),
    ]
    frames = [ARRAYS.encode(), NOTE.SerializeToString()] * 2
    group = read_lease(lease(journal=journal), frames)
    assert (group.group_id, group.attempt, group.num_samples, group.seed) == (7, 2, 4, 11)
    assert group.prompt == [{"role": "user", "content": "1+2"}]
    assert group.columns == {"answer": 3}
    assert (group.params.max_new_tokens, group.params.temperature) == (8, 0.5)
    assert sorted(group.recorded) == [1, 3]
    recorded = group.recorded[1]
    assert (recorded.life, recorded.failures, recorded.finished, recorded.given_up) == (2, 1, True, False)
    assert [note.text for _, note in recorded.turns] == ["three", "three"]
    assert recorded.turns[0][0].token_ids.tolist() == [3]
    assert group.recorded[3].given_up
    assert group.recorded[3].turns == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"columns_json": "[1]"}, "columns of group 7 are list"),
        ({"prompt_json": "{"}, "are not JSON"),
        ({"journal": [pb.EpisodeJournal(sample=1, arrays_frames=[1], note_frames=[9])]}, "frames 1 and 9"),
        ({"journal": [pb.EpisodeJournal(sample=1, arrays_frames=[0], note_frames=[1])]}, "frames 0 and 1"),
        (
            {"journal": [pb.EpisodeJournal(sample=1, arrays_frames=[2], note_frames=[2])]},
            "safetensors|payload",
        ),
        ({"journal": [pb.EpisodeJournal(sample=1, arrays_frames=[1])]}, "1 turns, but 0 notes"),
    ],
)
def test_what_is_no_lease_is_a_wire_error(fields: dict[str, object], words: str) -> None:
    with pytest.raises(WireError, match=words):
        read_lease(lease(**fields), [ARRAYS.encode(), NOTE.SerializeToString()])


def test_weights_may_be_as_old_as_the_run_allows() -> None:
    assert required_by(lease(step=7), 4) == RequiredWeights(oldest_step=3)
    assert required_by(lease(step=2), 4) == RequiredWeights(oldest_step=0)
    pinned = lease(pinned_version={"session": 2, "step": 5}, pinned_member="rollout-0")
    assert required_by(pinned, 4) == RequiredWeights(pinned=Version(2, 5), pinned_member="rollout-0")
