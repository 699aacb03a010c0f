"""From groups to sequences to packed rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from episode_groups import episode_group
from tiny_policy import make_spec

from paceline.errors import InvalidInput
from paceline.groups import Completion, Group, VersionSpan
from paceline.learner.batch.samples import (
    MOST_PADDED,
    SequenceLayout,
    TrainingSample,
    pack_samples,
    sequences_from_groups,
)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def completion(*tokens: int) -> Completion:
    spans = (VersionSpan(1, 3, 0, 1), VersionSpan(1, 4, 1, len(tokens)))
    return Completion(ids(*tokens), -np.arange(1, len(tokens) + 1, dtype=np.float32), spans, "stop")


def group(rewards: list[float] | None) -> Group:
    rewards_CF = None if rewards is None else np.array(rewards, np.float32)[:, None]
    return Group(7, ids(1, 2), (completion(3, 4), completion(5, 6, 8), completion(9, 9)), rewards_CF=rewards_CF)


def test_groups_become_samples_with_their_rewards() -> None:
    samples = sequences_from_groups([group([1.0, 0.0, math.nan])], make_spec(Path("anywhere")))
    np.testing.assert_array_equal([s.rewards_F for s in samples], [[1.0], [0.0], [math.nan]])
    second = samples[1]
    assert second.group_id == 7
    assert second.prompt_ids.tolist() == [1, 2]
    assert second.completion_ids.tolist() == [5, 6, 8]
    assert second.behaviour_logprobs_T is not None
    assert second.behaviour_logprobs_T.tolist() == [-1, -2, -3]
    assert second.versions_T is not None
    assert second.versions_T.tolist() == [3, 4, 4]


@pytest.mark.parametrize("rewards", [None, [1.0, 0.0]])
def test_rewards_must_be_there_for_every_completion(rewards: list[float] | None) -> None:
    with pytest.raises(InvalidInput, match="group 7 has rewards of shape"):
        sequences_from_groups([group(rewards)], make_spec(Path("anywhere")))


def test_a_row_holds_all_but_the_last_token_of_each() -> None:
    sequences = [
        TrainingSample(1, ids(10, 11), ids(12, 13, 14), np.array([-1, -2, -3], np.float32)),
        TrainingSample(2, ids(20), ids(21), np.array([-4], np.float32)),
    ]
    packed = pack_samples(sequences, torch.device("cpu"))
    assert packed.input_ids.tolist() == [[10, 11, 12, 13, 20]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0]]
    assert packed.layout.starts.tolist() == [0, 4, 5]
    assert packed.layout.runs == ((1, 4), (1, 1))
    assert packed.predictors_N.tolist() == [1, 2, 3, 4]
    assert packed.targets_N.tolist() == [12, 13, 14, 21]
    assert packed.lengths_N.tolist() == [3, 3, 3, 1]
    assert packed.sequence_N.tolist() == [0, 0, 0, 1]
    assert packed.behaviour_N is not None
    assert packed.behaviour_N.tolist() == [-1, -2, -3, -4]
    assert packed.group_ids_S == (1, 2)


def test_examples_have_no_sampler() -> None:
    sequence = TrainingSample(3, ids(1), ids(2, 3))
    assert sequence.behaviour_logprobs_T is None
    assert sequence.num_row_tokens == 2
    assert pack_samples([sequence], torch.device("cpu")).behaviour_N is None


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(InvalidInput, match="group 4 has an empty prompt"):
        TrainingSample(4, ids(), ids(1))
    with pytest.raises(InvalidInput, match="behaviour_logprobs_T has 1 values for 2"):
        TrainingSample(4, ids(1), ids(1, 2), np.zeros(1, np.float32))


def test_groups_without_the_pools_answers_are_refused() -> None:
    spec = make_spec(
        Path("anywhere"),
        "distillation",
        sections={"distillation": {"teacher_model_name": "t", "teacher_pool": "reward"}},
    )
    tokens = np.array([3, 4], np.int32)
    sampled = Completion(tokens, np.full(2, -1, np.float32), (VersionSpan(1, 0, 0, 2),), "stop")
    scored = Group(9, tokens, (sampled,), rewards_CF=np.ones((1, 1), np.float32))
    with pytest.raises(InvalidInput, match="group 9 has no log-probabilities of the reference"):
        sequences_from_groups([scored], spec)
    with_reference = replace(sampled, reference_logprobs=np.array([-0.5, -2], np.float32))
    (sequence,) = sequences_from_groups([replace(scored, completions=(with_reference,))], spec)
    packed = pack_samples([sequence], torch.device("cpu"))
    assert packed.reference_N is not None
    assert packed.reference_N.tolist() == [-0.5, -2]


def test_rows_of_an_episode_train_only_what_was_sampled() -> None:
    spec = make_spec(Path("anywhere"), sections={"environment": {"class": "a.py:A"}})
    first, second, third = sequences_from_groups([episode_group([1.0, 0.0])], spec)
    assert first.trained_T is not None
    assert first.trained_T.tolist() == [True, True, False, True]
    assert [s.prompt_ids.tolist() for s in (first, second, third)] == [[5, 6], [5, 9], [5, 6]]
    assert [s.num_sample_tokens for s in (first, second, third)] == [4, 4, 2]
    assert [s.counts for s in (first, second, third)] == [True, False, True]
    assert [s.transcript.first_turn for s in (first, second, third) if s.transcript] == [0, 2, 0]
    packed = pack_samples([first, second], torch.device("cpu"))
    assert packed.targets_N.tolist() == [7, 8, 10, 11]
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9, 5, 9]]
    assert packed.predictors_N.tolist() == [1, 2, 4, 6]


def test_a_truncated_episode_can_be_left_out() -> None:
    cut_off = episode_group([1.0, 0.0])
    rows = tuple(replace(c, finish_reason="length" if i < 2 else "stop") for i, c in enumerate(cut_off.completions))
    spec = make_spec(Path("anywhere"), sections={"environment": {"class": "a.py:A", "truncated": "leave_out"}})
    samples = sequences_from_groups([replace(cut_off, completions=rows)], spec)
    assert [s.num_trained_tokens for s in samples] == [0, 0, 2]


@pytest.mark.parametrize("num_sequences", [1, 64, 256, 1024])
def test_sequences_of_similar_lengths_are_padded_together(num_sequences: int) -> None:
    """Lognormal lengths, as of completions: few batches, little padding, and each token once."""
    lengths = np.random.default_rng(0).lognormal(4.0, 1.0, num_sequences).astype(int) + 1
    layout = SequenceLayout.of(lengths.tolist(), torch.device("cpu"))
    padded = layout.padded
    computed = torch.cat([tokens_nL.flatten() for tokens_nL in padded.tokens])
    assert torch.equal(computed[padded.own], torch.arange(lengths.sum()))
    assert len(computed) <= MOST_PADDED * lengths.sum()
    assert len(padded.tokens) <= max(20, num_sequences // 16)
    starts = torch.cat([tokens_nL[:, 0] for tokens_nL in padded.tokens])
    assert sorted(starts.tolist()) == layout.starts[:-1].tolist()
    for tokens_nL in padded.tokens:  # a sequence's tokens in order, then its last one again
        assert torch.all(tokens_nL.diff(dim=1) >= 0)
