"""Log-probabilities of the reference from the reward pool: committed with the scores, served with the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from exchange_drivers import (
    COMMITTED,
    DUPLICATE,
    INVALID,
    Learner,
    MakeWorld,
    Reward,
    Rollout,
    World,
)

from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import decode_group, encode_reference

POOL = {"reference_policy_kl_penalty": 0.1, "reference_policy_pool": "reward"}
REWARDS = {"rewards": [0.0, 1.0], "functions": ["exact_match"]}


@pytest.fixture
def asked(make_world: MakeWorld) -> World:
    return make_world(loss_fn=POOL)


def answer(tokens: int, seed: int) -> np.ndarray:
    return -np.random.default_rng(seed).random(tokens).astype(np.float32)


def send(reward: Reward, task: pb.ScoreTask, *answers: np.ndarray, **fields: Any) -> int:
    """Send a score with one frame for each of the answers."""
    request = reward.message(task, **(REWARDS | fields))
    return reward.world.send(request, [encode_reference([one]) for one in answers]).reply.status


def generated(world: World) -> list[pb.ScoreTask]:
    """Generate two groups of 4 + 5 tokens that wait for their scores."""
    rollout = Rollout(world)
    for lease in rollout.lease(4):
        assert rollout.finish(lease) == COMMITTED
    return Reward(world).tasks()


def served(world: World, learner: Learner) -> dict[int, list[float]]:
    """Return the reference's answers in step 0's only part, as the learner decodes them."""
    outcome = learner.ask(0)
    found = {}
    for place, group in enumerate(outcome.reply.batch.groups):
        reference = outcome.payloads[group.reference_frame - 1]
        decoded = decode_group(group.group_id, outcome.payloads[place], group.rewards, reference)
        parts = [completion.reference_logprobs for completion in decoded.completions]
        assert [len(part) for part in parts if part is not None] == [4, 5]
        assert group.scores_digest == decoded.scores_digest()
        found[group.group_id] = np.concatenate([part for part in parts if part is not None]).tolist()
    return found


def test_the_answers_come_with_the_batch_as_they_were_sent_and_again_after_a_restart(asked: World) -> None:
    reward, tasks = Reward(asked), generated(asked)
    answers = {task.group_id: answer(9, task.group_id) for task in tasks}
    for task in tasks:
        assert task.wants_reference
        assert send(reward, task, answers[task.group_id]) == COMMITTED
        assert send(reward, task, answer(9, 99)) == DUPLICATE
    learner = Learner(asked)
    expected = {group_id: values.tolist() for group_id, values in answers.items()}
    assert served(asked, learner) == expected
    asked.restart()
    assert served(asked, learner) == expected
    assert learner.train(0) == [[0, 1]]


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([], id="none"),
        pytest.param([answer(8, 0)], id="too few tokens"),
        pytest.param([answer(9, 0), answer(9, 0)], id="two frames"),
        pytest.param([np.array([-1.0] * 8 + [math.nan], np.float32)], id="not finite"),
        pytest.param([np.array([-1.0] * 8 + [0.01], np.float32)], id="positive"),
        pytest.param([np.array([-1.0] * 8 + [3e38], np.float32)], id="huge"),
        pytest.param([np.array([-1.0] * 8 + [-3e38], np.float32)], id="tiny"),
    ],
)
def test_a_score_without_a_whole_answer_is_refused_and_changes_nothing(asked: World, answers: list[np.ndarray]) -> None:
    reward, (task, _) = Reward(asked), generated(asked)
    before = asked.dump()
    assert send(reward, task, *answers) == INVALID
    assert asked.dump() == before
    assert send(reward, task, answer(9, 0)) == COMMITTED


def test_a_foreign_frame_is_refused(asked: World) -> None:
    reward, (task, _) = Reward(asked), generated(asked)
    outcome = asked.send(reward.message(task, **REWARDS), [b"not safetensors"])
    assert outcome.reply.status == INVALID
    assert asked.states()[task.group_id] == "generated"


def test_a_dead_workers_task_is_asked_again_and_the_first_answer_wins(asked: World) -> None:
    first, other, (task, later) = Reward(asked), Reward(asked, "other"), generated(asked)
    asked.release("reward", crashed=True)
    again = {t.group_id: t for t in other.tasks()}[task.group_id]
    assert again.attempt == task.attempt + 1
    assert send(other, again, answer(9, 5)) == COMMITTED
    assert send(first, task, answer(9, 6)) == DUPLICATE  # it was only cut off, and is back
    assert send(first, later, answer(9, 7)) == COMMITTED
    assert served(asked, Learner(asked))[task.group_id] == answer(9, 5).tolist()


def test_a_failure_needs_no_answer(asked: World) -> None:
    reward, (task, _) = Reward(asked), generated(asked)
    assert reward.fail(task) == COMMITTED
    assert asked.group(task.group_id)["score_failures"] == 1


def test_an_evaluation_is_only_scored(make_world: MakeWorld) -> None:
    world = make_world(loss_fn=POOL, grpo={"val_at_start": True})
    world.begin_evaluation(0)
    rollout, reward = Rollout(world), Reward(world)
    (lease, *_) = rollout.lease(1)
    assert lease.HasField("pinned_version")
    rollout.finish(lease)
    (task,) = reward.tasks()
    assert not task.wants_reference
    assert reward.score(task) == COMMITTED


def test_other_runs_want_no_reference(world: World) -> None:
    task, _ = generated(world)
    assert not task.wants_reference


def test_verify_misses_an_answer_that_is_gone(make_world: MakeWorld) -> None:
    world = make_world(loss_fn=POOL, check=False)
    reward = Reward(world)
    for task in generated(world):
        send(reward, task, answer(9, 0))
    with world.ledger.transaction():
        world.ledger.db.execute("DELETE FROM payloads WHERE kind = 'reference' AND group_id = 1")
    ledger = Ledger(world.path, read_only=True)
    report = verify(ledger, world.run_id)
    ledger.close()
    assert report.problems == ["group 1: the group is scored without the reference's log-probabilities"]
    assert report.facts["references"] == 1
