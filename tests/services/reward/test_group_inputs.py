"""What reward functions get of a group."""

from __future__ import annotations

import numpy as np
import pytest
from episode_groups import episode_group, episode_texts, ids

from paceline.errors import WireError
from paceline.groups import Completion, VersionSpan
from paceline.services.reward.group_inputs import GroupInputs, inputs_of_completions, inputs_of_episodes
from paceline.v1 import exchange_pb2 as pb


def of_episodes(texts: list[pb.SampleText], *, sums_turns: bool = True) -> GroupInputs:
    group = episode_group()
    return inputs_of_episodes(
        "the prompt", {"answer": 4}, group.completions, group.row_samples, texts, sums_turns=sums_turns
    )


def test_a_chats_completion_is_a_message() -> None:
    completion = Completion(ids(1), np.zeros(1, np.float32), (VersionSpan(1, 0, 0, 1),), "stop", "hi")
    inputs = inputs_of_completions([{"role": "user", "content": "?"}], {"answer": 4}, [completion] * 2)
    assert inputs.completions == [[{"role": "assistant", "content": "hi"}]] * 2
    assert inputs.columns == {"answer": [4, 4]}
    assert inputs.samples == [0, 1]


def test_a_completion_has_the_beginning_that_its_prompt_gives() -> None:
    """TRL's reward functions get an answer as a whole; the prompt is what came before."""
    completion = Completion(ids(1), np.zeros(1, np.float32), (VersionSpan(1, 0, 0, 1),), "stop", "hi</think>")
    user = {"role": "user", "content": "?"}
    inputs = inputs_of_completions([user, {"role": "assistant", "content": "<think>\n"}], {}, [completion])
    assert inputs.completions == [[{"role": "assistant", "content": "<think>\nhi</think>"}]]
    assert inputs.prompts == [[user]]


def test_an_episode_is_its_conversation_with_the_sampled_tokens_of_all_rows() -> None:
    inputs = of_episodes(episode_texts())
    assert [message["role"] for message in inputs.completions[0]] == ["assistant", "tool", "assistant"]
    assert inputs.completion_ids == [[7, 8, 10, 11], [12, 13]]
    assert inputs.prompts == ["the prompt", "the prompt"]
    assert inputs.columns["environment_reward"] == [1.0, None]
    assert inputs.columns["environment_ending"] == ["done", "truncated"]


def test_the_sum_of_turns_stands_for_a_reward_only_where_turns_have_no_advantage_of_their_own() -> None:
    texts = episode_texts()
    texts[1].turn_rewards = 0.5
    assert of_episodes(texts).columns["environment_reward"] == [1.0, 0.5]
    assert of_episodes(texts, sums_turns=False).columns["environment_reward"] == [1.0, None]


def test_an_episode_that_was_given_up_is_not_scored() -> None:
    texts = [*episode_texts(), pb.SampleText(ending="failed", detail="raised")]
    texts[1].prompt_json = '"another"'
    inputs = of_episodes(texts)
    assert inputs.samples == [0, 1]
    assert inputs.prompts == ["the prompt", "another"]
    rewards_CF = inputs.all_rewards(np.array([[1.0], [0.5]], np.float32))
    assert rewards_CF[:2].tolist() == [[1.0], [0.5]]
    assert np.isnan(rewards_CF[2]).all()
    assert inputs.all_values(["a", "b"]) == ["a", "b", None]


def test_texts_that_do_not_fit_are_a_wire_error() -> None:
    with pytest.raises(WireError, match="the header has 1 samples"):
        of_episodes(episode_texts()[:1])
    broken = episode_texts()
    broken[0].messages_json = "["
    with pytest.raises(WireError, match="messages_json"):
        of_episodes(broken)
