"""Transcripts of episodes on the wire: decoded as they were sent, and refused if they contradict themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
from episode_groups import episode_group

from paceline.errors import WireError
from paceline.groups import Group
from paceline.wire import decode_group, encode_completions


def frame_of(group: Group) -> bytes:
    return encode_completions(group.prompt_ids, group.completions, group.rows)


def test_a_group_with_rows_comes_back_with_its_digest() -> None:
    first, *others = episode_group().completions
    spans = (first.spans[0]._replace(sampler="rollout-b"), *first.spans[1:])
    sent = replace(episode_group(), completions=(replace(first, spans=spans), *others))
    got = decode_group(7, frame_of(sent), [1.0, 0.0])
    assert got.digest() == sent.digest() == "12505f528c4fa9a1431515f0facc5c47"  # as in 0.1.0
    assert [c.spans for c in got.completions] == [c.spans for c in sent.completions]
    assert got.num_samples == 2
    assert got.row_samples == (0, 0, 1)
    assert got.num_tokens == 6
    assert got.num_sequence_tokens == 13
    assert got.oldest_step == 3
    assert got.rewards_CF is not None
    assert got.rewards_CF.tolist() == [[1.0], [0.0]]
    assert [c.prompt_ids.tolist() for c in got.completions if c.prompt_ids is not None] == [
        [5, 6],
        [5, 9],
        [5, 6],
    ]
    assert got.completions[0].version_steps().tolist() == [3, 3, -1, 3]


def test_the_digest_covers_mask_prompts_samples_and_turns() -> None:
    group = episode_group()
    assert group.rows is not None
    first = group.completions[0]
    assert first.prompt_ids is not None
    others = [
        replace(group, rows=group.rows._replace(samples=(0, 1, 1))),
        replace(group, rows=group.rows._replace(turns=group.rows.turns[:-1])),
        replace(group, rows=None),
        replace(group, completions=(replace(first, prompt_ids=first.prompt_ids + 1), *group.completions[1:])),
        replace(group, completions=(replace(first, sampled_T=np.ones(4, bool)), *group.completions[1:])),
    ]
    assert len({group.digest(), *(other.digest() for other in others)}) == 6


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("prompt_lengths", np.array([2, 2, 3], np.int32), "prompt_lengths have sum 7"),
        ("prompt_lengths", np.array([4, 2, 0], np.int32), "minimum 0"),
        ("prompt_lengths", np.array([6], np.int32), "1 prompt_lengths"),
        ("row_samples", np.array([0, 1, 0], np.int32), "row_samples do not rise"),
        ("row_samples", np.array([0, 0, 2], np.int32), "below 2"),
        ("num_samples", np.array([0], np.int32), "num_samples is"),
        ("sampled", np.ones(7, bool), "logprobs|do not cover"),
        ("sampled", np.ones(6, bool), "sampled has 6 values"),
        ("logprobs", -np.ones(7, np.float32), "were not sampled must be 0"),
        ("turns", np.array([[0, 0, 2]], np.int32), "1, 3. with 4 turn_rewards"),
        ("turns", np.array([[0, 0, 2], [0, 3, 5], [1, 0, 1], [2, 0, 2]], np.int32), "not within its transcript"),
        ("turns", np.array([[0, 3, 4], [0, 0, 2], [1, 0, 1], [2, 0, 2]], np.int32), "is not after"),
        ("turns", np.array([[0, 0, 1], [0, 3, 4], [1, 0, 1], [2, 0, 2]], np.int32), "its turns do not cover"),
        ("turn_rewards", np.full(4, np.inf, np.float32), "infinite"),
        ("spans", np.array([[0, 1, 3, 0, 4], [1, 1, 4, 0, 1], [2, 1, 3, 0, 2]], np.int64), "do not cover"),
        ("truncated", np.zeros(2, bool), "truncated has 2 values"),
    ],
)
def test_contradictory_arrays_are_a_wire_error(name: str, value: np.ndarray, fault: str) -> None:
    arrays = safetensors.numpy.load(frame_of(episode_group()))
    with pytest.raises(WireError, match=fault):
        decode_group(7, safetensors.numpy.save(arrays | {name: value}), [1.0, 0.0])


def test_a_completion_that_was_cut_off_arrives_so() -> None:
    group = episode_group()
    cut = replace(group, completions=(replace(group.completions[0], finish_reason="length"), *group.completions[1:]))
    assert [c.finish_reason for c in decode_group(7, frame_of(cut), [1.0, 0.0]).completions] == [
        "length", "stop", "stop",
    ]  # fmt: skip
