"""The life of a group through the exchange, with real messages: leases, results, scores, batches, receipts."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from exchange_drivers import (
    COMMITTED,
    DUPLICATE,
    INVALID,
    OK,
    PROMPT_IDS,
    STALE,
    Learner,
    MakeWorld,
    Reward,
    Rollout,
    World,
    fill,
    make_completion,
)
from stream_threads import settle

from paceline.data.prompts import open_prompts
from paceline.errors import Unreadable, WireError
from paceline.groups import Group, Version, VersionSpan
from paceline.services.common.worker.score_extras import TRAINER_STATE
from paceline.services.coordinator.exchange.leases import revoke_work
from paceline.services.learner.training.batches import BatchClient, RankBatch
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import decode_completions, decode_group


def test_a_group_as_an_older_format_has_it_is_scored_trained_and_verified(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    for lease in rollout.lease(4):
        request, (arrays, texts) = rollout.result(lease)
        group = Group(lease.group_id, PROMPT_IDS, tuple(rollout.completions(lease)))
        request.group.digest = group.digest(like="0" * 64)
        assert request.group.digest not in (group.digest(), "")
        whole_result = request.group.SerializeToString() + texts  # its fields were one message
        assert world.send(request, [arrays, whole_result]).reply.status == COMMITTED
    for task in reward.tasks():
        assert reward.texts[task.group_id] == [f"{task.group_id}1{i}".lstrip("0") for i in range(2)]
        assert reward.score(task) == COMMITTED
    part = learner.ask(0)
    assert RankBatch.decode(part.reply.batch, part.payloads).groups[1].num_tokens == 9
    assert learner.train(0) == [[0, 1]]


def test_a_rank_does_not_train_what_arrived_changed(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 4)
    outcome = learner.ask(0)
    batch, (first, second) = outcome.reply.batch, outcome.payloads
    assert [group.group_id for group in RankBatch.decode(batch, [first, second]).groups] == [0, 1]
    with pytest.raises(WireError, match="group 0 of step 0 arrived changed"):
        RankBatch.decode(batch, [second, first])
    changed = pb.BatchReply.FromString(batch.SerializeToString())
    changed.groups[1].rewards[0] += 0.5
    with pytest.raises(WireError, match="the scores of group 1 of step 0 arrived changed"):
        RankBatch.decode(changed, [first, second])
    arrivals = [[second, first], [first[:-4], second], [first, second]]
    line = SimpleNamespace(wait=lambda *_: (pb.ExchangeReply(status=OK, batch=batch), arrivals.pop(0)))
    place = SimpleNamespace(rank=0, world_size=1)
    rank = SimpleNamespace(place=place, background=line, membership=MagicMock(), stopping=None, grace_s=1.0)
    part = BatchClient(world.run_id, 1, rank).fetch(0)  # type: ignore[arg-type]
    assert part is not None
    assert [group.group_id for group in part.groups] == [0, 1]
    assert arrivals == []


def test_a_group_from_admission_to_trained(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    lease, _ = rollout.lease(4)
    assert (lease.group_id, lease.attempt, lease.step, lease.num_generations) == (0, 1, 0, 2)
    assert json.loads(lease.prompt_json).startswith("p")
    assert lease.params.max_new_tokens == 16
    assert world.states() == {0: "leased", 1: "leased", 2: "admitted", 3: "admitted"}  # (η + 1)·B = 4
    assert rollout.finish(lease) == COMMITTED
    assert world.group(0)["tokens"] == 4 + 5
    assert world.group(0)["sequence_tokens"] == 9 + 2 * 3
    (task,) = reward.tasks()
    assert reward.texts[0] == ["10", "11"]  # seeds of the driver: attempt 1, samples 0 and 1
    columns = json.loads(task.columns_json)
    assert columns.pop(TRAINER_STATE) == {"global_step": 0, "max_steps": 4, "epoch": 0.0, "reward_workers": 1}
    assert columns == {"answer": int(json.loads(lease.prompt_json)[1:])}
    assert reward.score(task, [0.25, 0.75]) == COMMITTED
    assert world.group(0)["reward"] == 0.5
    assert learner.part(0) is None
    assert fill(rollout, reward, 1) == [2]
    assert world.states()[1] == "leased"
    outcome = learner.ask(0)
    assert [group.group_id for group in outcome.reply.batch.groups] == [0, 2]
    first = decode_group(0, outcome.payloads[0], list(outcome.reply.batch.groups[0].rewards))
    assert first.num_tokens == 9
    assert first.digest() == outcome.reply.batch.groups[0].digest
    assert first.rewards_CF is not None
    assert first.rewards_CF.tolist() == [[0.25], [0.75]]
    assert world.states()[0] == "batched"
    assert learner.receipt(0, 0, outcome.reply.batch.groups).reply.status == COMMITTED
    assert world.states()[0] == world.states()[2] == "trained"
    assert world.row["next_step"] == world.row["next_batch"] == 1
    assert world.row["chain"] == outcome.reply.batch.chain != ""
    assert world.counters["tokens:trained"] == world.counters["tokens:generated"] == 18
    assert [content["step"] for content in world.kinds("step")] == [0]
    assert world.kinds("metrics")[0]["metrics"] == {"loss": 0.5}
    assert len(rollout.lease(8)) == 1  # 3; of the two new ones, for step 2, version 0 would be too old
    rollout.hold(1)
    assert len(rollout.lease(8)) == 2


def test_the_first_result_wins_whichever_attempt_it_is_of(world: World) -> None:
    first, second = Rollout(world, "a"), Rollout(world, "b")
    (lease,) = first.lease(2)
    world.release("a")
    (again,) = second.lease(2)
    assert (again.group_id, again.attempt, again.seed) == (0, 2, lease.seed)
    assert first.finish(lease) == COMMITTED
    digest = world.group(0)["digest"]
    assert second.finish(again) == DUPLICATE
    assert world.group(0)["digest"] == digest
    assert world.counters["tokens:wasted"] == 9
    assert world.counters["tokens:generated"] == 9


def test_a_result_sent_again_is_a_duplicate_and_no_waste(world: World) -> None:
    rollout = Rollout(world)
    (lease,) = rollout.lease(2)
    assert rollout.finish(lease) == COMMITTED
    before = world.dump()
    assert rollout.finish(lease) == DUPLICATE
    assert world.dump() == before


def test_seeds_differ_by_group_and_are_the_same_in_another_life(world: World) -> None:
    seeds = [lease.seed for lease in Rollout(world).lease(8)]
    assert len(set(seeds)) == 4
    world.release("rollout")
    world.restart()
    assert [lease.seed for lease in Rollout(world).lease(8)] == seeds


@pytest.mark.parametrize("field", ["protocol", "term", "run_id", "session"])
def test_messages_of_another_time_change_nothing(world: World, field: str) -> None:
    rollout, learner = Rollout(world), Learner(world)
    (lease,) = rollout.lease(2)
    before = world.dump()
    request, frames = rollout.result(lease)
    if field == "session":
        learner = Learner(world, session=7)
        assert learner.ask(0).reply.status == STALE
        assert learner.receipt(0, 0, []).reply.status == STALE
    else:
        setattr(request, field, {"protocol": 9, "term": 9, "run_id": "other-9"}[field])
        reply = world.send(request, frames).reply
        assert reply.status == (INVALID if field == "protocol" else STALE)
        assert "9" in reply.message
    assert world.dump() == before
    assert world.notices == []


def test_another_runs_learner_is_told_that_it_has_ended(world: World) -> None:
    with world.ledger.transaction():
        world.ledger.add_run("other-1", world.row["spec_yaml"], "")
        world.ledger.update_run("other-1", state="cancelled")
    asked = pb.ExchangeRequest(run_id="other-1", batch=pb.BatchRequest(step=0, world_size=1))
    assert world.send(asked).reply.batch.state == pb.BATCH_STATE_END
    asked = pb.ExchangeRequest(run_id="other-1", lease=pb.LeaseRequest(room=8))
    assert world.send(asked).reply.status == STALE


def test_attempts_that_were_never_leased_are_stale(world: World) -> None:
    rollout = Rollout(world)
    (lease,) = rollout.lease(2)
    for attempt in (0, 2):
        lease.attempt = attempt
        assert rollout.finish(lease) == STALE
    lease.group_id, lease.attempt = 99, 1
    assert rollout.finish(lease) == STALE
    assert rollout.return_lease(lease).reply.status == STALE
    assert world.states()[0] == "leased"


def test_an_unfinished_group_goes_on_elsewhere(world: World) -> None:
    first = Rollout(world, "a", step=0)
    (lease,) = first.lease(2)
    done, begun = first.completions(lease)
    begun = type(begun)(begun.token_ids, begun.logprobs, begun.spans, "abort", "beg")
    assert first.return_lease(lease, [done, begun]).reply.status == COMMITTED
    assert world.states()[0] == "admitted"
    second = Rollout(world, "b", step=1)
    outcome = second.ask(2)
    (again,) = outcome.reply.lease.leases
    assert (again.group_id, again.attempt, again.prefix_frame) == (0, 2, 1)
    assert list(again.prefix_finish_reasons) == ["stop", "abort"]
    assert world.group(0)["lease_step"] == 0  # the oldest that its tokens can have
    _, prefix = decode_completions(outcome.payloads[0], again.prefix_finish_reasons, ["", ""])
    assert prefix[0].token_ids.tolist() == done.token_ids.tolist()
    more = make_completion(Version(1, 1), 3, 77)
    whole = type(done)(
        np.concatenate([prefix[1].token_ids, more.token_ids]),
        np.concatenate([prefix[1].logprobs, more.logprobs]),
        (VersionSpan(1, 0, 0, 5, "a"), VersionSpan(1, 1, 5, 8, "b")),
        "stop",
        "whole",
    )
    second.completions = lambda lease, length=4: [prefix_done, whole]  # type: ignore[method-assign]
    prefix_done = type(done)(prefix[0].token_ids, prefix[0].logprobs, prefix[0].spans, "stop", done.text)
    assert second.finish(again) == COMMITTED
    assert (world.group(0)["tokens"], world.group(0)["oldest_step"]) == (12, 0)
    kinds = world.ledger.db.execute("SELECT kind FROM payloads").fetchall()
    assert [row["kind"] for row in kinds] == ["result"]


def test_a_prefix_that_does_not_fit_is_refused(world: World) -> None:
    rollout = Rollout(world)
    (lease,) = rollout.lease(2)
    before = world.dump()
    one, two = rollout.completions(lease)
    assert rollout.return_lease(lease, [one, two, one]).reply.status == INVALID
    assert rollout.return_lease(lease, [one]).reply.status == INVALID
    assert world.dump() == before


def test_a_lease_returned_empty_starts_again(world: World) -> None:
    rollout = Rollout(world)
    (lease,) = rollout.lease(2)
    assert rollout.return_lease(lease).reply.status == COMMITTED
    assert rollout.return_lease(lease).reply.status == STALE
    (again,) = rollout.lease(2)
    assert (again.group_id, again.attempt, again.prefix_frame) == (0, 2, 0)


def test_a_bad_prompt_is_dropped_and_its_replacement_inherits_the_place(world: World) -> None:
    rollout, reward = Rollout(world), Reward(world)
    leases = rollout.lease(8)
    assert rollout.return_lease(leases[1], error="the prompt is empty").reply.status == COMMITTED
    assert world.counters["groups:dropped:bad_prompt"] == 1
    assert "the prompt is empty" in world.kinds("warning")[0]["message"]
    (replacement,) = rollout.lease(8)
    assert (replacement.group_id, replacement.step) == (4, 0)
    assert world.group(4)["slot"] == world.group(1)["slot"] == 1
    for lease in (leases[0], replacement, leases[2]):
        rollout.finish(lease)
    for task in reward.tasks():
        reward.score(task)
    assert rollout.finish(leases[3]) == COMMITTED
    assert Learner(world).train(0) == [[0, 4]]


def test_a_group_whose_data_fail_has_a_budget_that_lost_workers_do_not_use_up(make_world: MakeWorld) -> None:
    world = make_world(grpo={"max_generation_failures": 3})
    rollout = Rollout(world)
    for failures in (1, 2):
        (lease,) = rollout.lease(2)
        assert lease.group_id == 0
        assert rollout.return_lease(lease, error="the template refuses it", reason="").reply.status == COMMITTED
        assert (
            rollout.return_lease(lease, error="the template refuses it", reason="").reply.status == STALE
        )  # sent again
        assert world.group(0)["generation_failures"] == failures
    for _ in range(5):
        (lease,) = rollout.lease(2)
        world.release("rollout")  # its worker is gone
        rollout = Rollout(world)
    assert (lease.group_id, lease.attempt, world.group(0)["generation_failures"]) == (0, 7, 2)
    (lease,) = rollout.lease(2)
    rollout.return_lease(lease, error="the template refuses it", reason="")
    assert world.states()[0] == "dropped"
    assert [content["message"] for content in world.kinds("warning")] == [
        "generating group 0 failed (1 of 3): the template refuses it",
        "group 0 was dropped as 'bad_prompt': the template refuses it",
    ]
    assert world.counters["failures:bad_prompt"] == 3
    assert world.counters["groups:dropped:bad_prompt"] == 1


def test_an_attempt_after_a_failed_one_counts(make_world: MakeWorld) -> None:
    world = make_world(grpo={"max_generation_failures": 2})
    rollout = Rollout(world)
    (lease,) = rollout.lease(2)
    rollout.return_lease(lease, error="refused as not finite", reason="")
    (lease,) = rollout.lease(2)
    assert rollout.finish(lease) == COMMITTED
    assert world.states()[0] == "generated"


def test_a_prompt_that_no_attempt_can_encode_is_dropped_at_once(make_world: MakeWorld) -> None:
    world = make_world(grpo={"max_generation_failures": 3})
    rollout = Rollout(world)
    (lease,) = rollout.lease(2)
    rollout.return_lease(lease, error="the prompt has 3001 tokens", reason="bad_prompt")
    assert world.states()[0] == "dropped"


def test_prompts_that_are_too_long_are_counted_apart(world: World) -> None:
    rollout = Rollout(world)
    for number, lease in enumerate(rollout.lease(8)):
        rollout.return_lease(lease, error=f"the prompt has {3000 + number} tokens", reason="prompt_too_long")
    dropped = world.counters["groups:dropped:prompt_too_long"]
    assert dropped == world.counters["failures:prompt_too_long"] == 4, "one attempt each"
    assert len(world.kinds("warning")) == 1, "equal failures are one line"
    (paused,) = world.kinds("paused")
    assert "4 groups in a row were dropped as 'prompt_too_long'" in paused["message"]
    assert "policy.max_total_sequence_length" in paused["message"]


def test_bad_prompts_among_good_ones_do_not_pause_the_run(world: World) -> None:
    rollout = Rollout(world)
    good, *others = rollout.lease(8)
    for lease in others:
        rollout.return_lease(lease, error="the prompt has 3000 tokens")
    for _ in range(3):  # bad prompts fail at once, good ones take time
        for lease in rollout.lease(8):
            rollout.return_lease(lease, error="the prompt has 3000 tokens")
    assert world.kinds("paused") == []
    rollout.finish(good)
    for lease in rollout.lease(8)[:2]:
        rollout.return_lease(lease, error="the prompt has 3000 tokens")
    assert world.counters["groups:dropped:bad_prompt"] > 8
    assert world.kinds("paused") == []


def test_prompts_that_fail_for_one_cause_pause_the_run_with_the_first_error(world: World) -> None:
    rollout = Rollout(world)
    for number in range(4):  # two batches of 2
        assert world.kinds("paused") == []
        (lease,) = rollout.lease(2)
        rollout.return_lease(lease, error=f"the prompt has {3000 + number} tokens, but must have 1 to 511")
    (paused,) = world.kinds("paused")
    assert (
        "4 groups in a row were dropped as 'bad_prompt' for one cause: the prompt has 3000 tokens" in paused["message"]
    )
    assert "`paceline resume test-1`" in paused["message"]
    assert len(world.kinds("warning")) == 1
    assert rollout.lease(2) == []


def test_leases_of_a_silent_worker_go_to_others_and_the_first_result_wins(world: World) -> None:
    rollout, reward = Rollout(world), Reward(world)
    first, second, *_ = rollout.lease(8)
    rollout.finish(first)
    (task,) = reward.tasks()
    with world.ledger.transaction():
        assert revoke_work(world.exchange, ["rollout", "reward"], with_leases=False) == 1
    assert world.states()[1] == "leased"
    (again,) = Reward(world, "other").tasks()
    assert (again.group_id, again.attempt) == (0, 2)
    assert reward.score(task) == COMMITTED  # it is back, and its result is the first
    with world.ledger.transaction():
        assert revoke_work(world.exchange, ["rollout"], with_leases=True) == 3
    other = Rollout(world, "other")
    leases = other.lease(8)
    assert [(lease.group_id, lease.attempt) for lease in leases] == [(1, 2), (2, 2), (3, 2)]
    assert rollout.finish(second) == COMMITTED
    assert other.finish(leases[0]) == DUPLICATE


def test_a_member_that_is_gone_loses_leases_and_tasks(world: World) -> None:
    rollout, reward = Rollout(world), Reward(world)
    leases = rollout.lease(8)
    rollout.finish(leases[0])
    (task,) = reward.tasks()
    assert world.release("rollout") == 3
    assert world.release("reward") == 0
    assert set(world.states().values()) == {"generated", "admitted"}
    assert rollout.ask(8).reply.status == STALE  # no member before its next Hello
    world.enter("rollout")
    assert rollout.lease(8) == []  # it has acknowledged no version in this term
    (again,) = Reward(world, "other").tasks()
    assert (again.group_id, again.attempt) == (0, 2)
    assert reward.score(task) == COMMITTED  # the text is the same, so the first score counts
    assert [lease.attempt for lease in Rollout(world, "new").lease(8)] == [2, 2, 2]


def test_a_paused_run_gives_nothing_new_and_takes_everything(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    leases = rollout.lease(6)
    for lease in leases[:2]:
        rollout.finish(lease)
    world.set_state("paused")
    assert rollout.finish(leases[2]) == COMMITTED
    for task in reward.tasks():
        assert reward.score(task) == COMMITTED
    assert rollout.lease(8) == []
    assert learner.part(0) is None
    world.set_state("running")
    part = learner.part(0)
    assert part is not None
    world.set_state("paused")
    assert learner.part(0) == part
    assert learner.train(0) == [[0, 1]]
    world.set_state("running")
    rollout.hold(1)
    assert len(rollout.lease(8)) == 3


def test_the_end_of_a_run_drops_what_is_open(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 2)
    learner.train(0)
    leases = rollout.lease(8)
    rollout.finish(leases[0])
    world.end()
    assert world.counters["groups:dropped:run_ended"] == 4
    assert world.counters["tokens:dropped:run_ended"] == 9
    assert sum(world.ledger.group_queries.num_open(world.run_id).values()) == 0
    assert rollout.finish(leases[1]) == STALE
    assert learner.ask(1).reply.batch.state == pb.BATCH_STATE_END


def test_leases_of_chats_have_the_tools_of_their_rows(make_world: MakeWorld, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": None}}
    chat = [{"role": "user", "content": "1+1?"}]
    rows = [
        {"prompt": chat, "tools": [tool]},
        {"prompt": "text", "tools": "any"},
        {"prompt": chat, "tools": None},
    ]
    (tmp_path / "tools.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "train": str(tmp_path / "tools.jsonl"),
        "shuffle": False,
        "validation": str(tmp_path / "tools.jsonl"),
    }
    world = make_world(data=data, grpo={"val_at_start": True})
    world.begin_evaluation(0)
    leases = Rollout(world).lease(12)
    by_class: dict[bool, list[Any]] = {True: [], False: []}
    for lease in leases:
        by_class[lease.HasField("pinned_version")].append(lease.tools_json and json.loads(lease.tools_json))
    sent = [{"type": "function", "function": {"name": "add"}}]
    assert by_class[False][:3] == [sent, "", ""]
    assert by_class[True] == [sent, "", ""]


def test_prompts_of_a_stream_are_admitted_as_it_is_read_and_resume(make_world: MakeWorld, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    rows = [json.dumps({"prompt": f"p{n}", "answer": n}) + "\n" for n in range(7)]
    (tmp_path / "set" / "train.jsonl").write_text("".join(rows))
    data = {"train": str(tmp_path / "set"), "streaming": True, "streaming_block_rows": 3}
    world = make_world(data=data, async_grpo={"max_trajectory_age_steps": 3})
    assert Rollout(world).lease(4)
    before = len(world.states())
    world.restart()
    for _ in range(8):  # a request admits the prompts that were read
        Rollout(world, "other").ask(64)
        settle()
    assert before < len(world.states()) == 8, "the run has 4 steps of 2 groups"
    assert world.exchange.active.state.unreadable_data == ""
    admitted = [json.loads(world.exchange.group_queries.prompt(world.run_id, n) or "") for n in range(8)]
    assert sorted(admitted[:3]) == ["p0", "p1", "p2"]
    assert sorted(admitted[:6]) == [f"p{n}" for n in range(6)]
    prompts = open_prompts(world.spec.data, world.spec.seed)
    for draw, prompt in enumerate(admitted):
        with contextlib.suppress(Unreadable):
            prompts.draw(draw)
        settle()
        assert prompts.draw(draw)[0] == prompt


def test_no_more_groups_than_the_steps_need(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    for step in range(4):
        rollout.hold(step)
        while not learner.train(step):
            fill(rollout, reward, 1)
    assert len(world.states()) == 8
    assert rollout.lease(8) == []
    assert learner.part(4) is None  # until the run has ended
    assert world.counters["groups:trained"] == 8
    assert world.ledger.trained_samples(world.run_id) == 16
