"""Every fault that a worker could make in a group is refused with the field, its value and the bound, and changes
nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from exchange_drivers import (
    COMMITTED,
    INVALID,
    PROMPT_IDS,
    STALE,
    Learner,
    MakeWorld,
    Reward,
    Rollout,
    World,
    group_result,
    make_completion,
    make_spec,
    named,
)

from paceline.errors import SpecError
from paceline.groups import Completion, Version, VersionSpan
from paceline.services.coordinator.exchange.batches import selection
from paceline.services.coordinator.ledger.segments import DamagedRecord
from paceline.services.coordinator.lifecycle.submission_checks import refuse_large_groups
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import CompletionArrays, decode_result, encode_completions

GOOD = make_completion(Version(1, 0), 3, 0)


def spans(*versions: tuple[int, int]) -> Completion:
    """Return a completion with one token for each version."""
    size = len(versions)
    return replace(
        GOOD,
        token_ids=GOOD.token_ids[:size],
        logprobs=GOOD.logprobs[:size],
        spans=tuple(VersionSpan(*version, at, at + 1) for at, version in enumerate(versions)),
    )


def ids(*token_ids: int) -> Completion:
    """Return a completion of these tokens."""
    return replace(GOOD, token_ids=np.array(token_ids, np.int32))


def logprobs(*values: float) -> Completion:
    """Return a completion whose tokens have these log-probabilities."""
    return replace(GOOD, logprobs=np.array(values, np.float32))


LIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "id beyond the vocabulary": ({"completion": ids(1, 50, 2)}, ("50", "vocabulary")),
    "negative id": ({"completion": ids(1, -5, 2)}, ("token_ids", "-5")),
    "prompt beyond the vocabulary": ({"prompt_ids": [5, 99999]}, ("99999", "50")),
    "negative id in the prompt": ({"prompt_ids": [5, -1]}, ("prompt_ids", "-1")),
    "empty prompt": ({"prompt_ids": []}, ("prompt_ids", "empty")),
    "longer than may be generated": (
        {"completion": make_completion(Version(1, 0), 17, 0)},
        ("17", "max_new_tokens", "16"),
    ),
    "longer than the sequence": ({"prompt_ids": [1] * 38}, ("38", "max_total_sequence_length", "40")),
    "step of the far future": ({"completion": spans((1, 0), (1, 10**9))}, ("1000000000",)),
    "step that no 32 bits hold": ({"completion": spans((1, 2**31))}, ("spans", "2147483647")),
    "session of the future": ({"completion": spans((999, 0))}, ("session 999",)),
    "version that another has": ({"completion": spans((1, 1))}, ("(1, 1)", "(1, 0)", "rollout")),
    "positive log-probability": ({"completion": logprobs(-1, 0.01, -1)}, ("logprobs", "0.001")),
    "huge log-probability": ({"completion": logprobs(-1, 3e38, -1)}, ("logprobs",)),
    "tiny log-probability": ({"completion": logprobs(-1, -3e38, -1)}, ("logprobs", "-100000")),
    "not a number": ({"completion": logprobs(-1, float("nan"), -1)}, ("logprobs",)),
    "text without end": ({"completion": replace(GOOD, text="x" * 100_000)}, ("texts", "6 tokens")),
    "another's name": ({"completion": named(GOOD, "ahead")}, ("samplers has 'ahead'", "'rollout'", "completion 0")),
    "a name on one of two": ({"completion": named(GOOD, "rollout")}, ("samplers has ''", "'rollout'", "completion 1")),
    "a name that is none": ({"completion": named(GOOD, "a b")}, ("sampler_names has 'a b'",)),
    "a reason that is none": ({"completion": replace(GOOD, finish_reason="tired")}, ("tired", "stop")),
}


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """A vocabulary of 50; sequences of 40 tokens, prompt included; another worker that is one version ahead."""
    world = make_world(
        policy={
            "model_name": "none",
            "max_total_sequence_length": 40,
            "generation": {"max_new_tokens": 16},
        }
    )
    with world.ledger.transaction():
        world.ledger.update_run(world.run_id, vocab_size=50, session=1, published_step=0)
    Rollout(world, "ahead", step=1)
    return world


@pytest.mark.parametrize("what", LIES)
def test_a_lie_in_a_group_is_refused(world: World, what: str) -> None:
    change, said = LIES[what]
    rollout = Rollout(world)
    (lease,) = rollout.lease()
    pair = [change.get("completion", GOOD), GOOD]
    request, frames = group_result(0, 1, pair, np.array(change.get("prompt_ids", PROMPT_IDS), np.int32))
    request.member_id = "rollout"
    before = world.dump()
    reply = world.send(request, frames).reply
    assert reply.status == INVALID
    for part in said:
        assert part in reply.message
    assert world.dump() == before
    assert rollout.finish(lease) == COMMITTED


@pytest.mark.parametrize("what", LIES)
def test_a_false_prefix_is_refused(world: World, what: str) -> None:
    change, said = LIES[what]
    rollout = Rollout(world)
    rollout.lease()
    pair = [change.get("completion", GOOD), GOOD]
    returned = pb.LeaseReturn(
        group_id=0,
        attempt=1,
        texts=[completion.text for completion in pair],
        finish_reasons=[completion.finish_reason for completion in pair],
    )
    frames = [encode_completions(np.array(change.get("prompt_ids", PROMPT_IDS), np.int32), pair)]
    request = pb.ExchangeRequest(member_id="rollout", lease_return=returned)
    before = world.dump()
    reply = world.send(request, frames).reply
    assert reply.status == INVALID
    for part in said:
        assert part in reply.message
    assert world.dump() == before


def test_what_is_at_a_bound_is_committed(world: World) -> None:
    rollout = Rollout(world)
    rollout.lease()
    longest = make_completion(Version(1, 0), 16, 0)
    longest = replace(longest, token_ids=np.full(16, 49, np.int32), logprobs=np.full(16, 5e-4, np.float32))
    request, frames = group_result(0, 1, [longest, longest], np.zeros(24, np.int32))
    request.member_id = "rollout"
    assert world.send(request, frames).reply.status == COMMITTED


def test_an_unknown_vocabulary_bounds_nothing_from_above(world: World) -> None:
    with world.ledger.transaction():
        world.ledger.update_run(world.run_id, vocab_size=0)
    rollout = Rollout(world)
    rollout.lease()
    request, frames = group_result(0, 1, [ids(1, 10**6, 2), GOOD])
    request.member_id = "rollout"
    assert world.send(request, frames).reply.status == COMMITTED


def test_tokens_of_a_version_that_is_on_its_way_count_before_it_is_acknowledged(world: World) -> None:
    rollout = Rollout(world)
    rollout.lease()
    world.exchange.workers.offer("rollout", Version(1, 1))
    world.exchange.workers.offer("rollout", Version(1, 0))  # a repeated offer withdraws nothing
    request, frames = group_result(0, 1, [spans((1, 0), (1, 1)), GOOD])
    request.member_id = "rollout"
    assert world.send(request, frames).reply.status == COMMITTED


@pytest.mark.parametrize(
    ("session", "step", "message"),
    [
        (0, 7, "spans has session 0, which the run never had; its newest session is 5"),
        (3, 7, "spans has session 3, which the run never had"),
        (5, 6, "spans has step 6 of session 5, which publishes from step 7 on"),
        (5, 7, ""),
        (2, 7, ""),
        (1, 3, ""),
    ],
)
def test_a_version_that_no_session_published_is_refused(world: World, session: int, step: int, message: str) -> None:
    with world.ledger.transaction():
        for begun, publish_from_step in ((1, None), (2, 3), (5, 7)):
            first = {} if publish_from_step is None else {"publish_from_step": publish_from_step}
            world.ledger.add_event(world.run_id, "session", {"session": begun, **first})
        world.ledger.update_run(world.run_id, session=5, published_step=7)
    rollout = Rollout(world, step=7, session=5)
    lease = rollout.lease(1)[0]
    completions = [make_completion(Version(session, step), 3, seed) for seed in range(lease.num_generations)]
    request, frames = group_result(lease.group_id, lease.attempt, completions)
    request.member_id = rollout.member_id
    reply = world.send(request, frames).reply
    assert message in reply.message
    assert (reply.status == INVALID) == bool(message)


def test_tokens_of_a_session_that_a_restored_ledger_lacks_count_after_every_worker_has_later_weights(
    world: World,
) -> None:
    with world.ledger.transaction():
        for begun, first in ((1, 0), (2, 3), (4, 5)):
            world.ledger.add_event(world.run_id, "session", {"session": begun, "publish_from_step": first})
        world.ledger.update_run(world.run_id, session=4, published_step=7)
    rollout = Rollout(world, step=6, session=3)
    lease = rollout.lease(1)[0]
    rollout.hold(7, session=4)
    request, frames = group_result(lease.group_id, lease.attempt, [spans((3, 6), (4, 7)), spans((4, 7), (4, 7))])
    request.member_id = rollout.member_id
    assert world.send(request, frames).reply.status == COMMITTED


BEGUN = replace(make_completion(Version(1, 1), 3, 7), finish_reason="abort")
DONE = make_completion(Version(1, 1), 2, 8)


def begun_by_another(world: World) -> tuple[Rollout, pb.Lease]:
    """Return a lease with one finished and one unfinished sample of a newer version."""
    first, second = Rollout(world, "first", step=1), Rollout(world, "second")
    (lease,) = first.lease()
    prefix = [named(DONE, "first"), named(BEGUN, "first")]
    assert first.return_lease(lease, prefix).reply.status == COMMITTED
    (again,) = second.lease()
    assert again.prefix_frame
    return second, again


def longer(first_token: int | None = None, version: tuple[int, int] = (1, 1)) -> Completion:
    """Return BEGUN with one more token, and perhaps another start."""
    token_ids = np.append(BEGUN.token_ids, 9).astype(np.int32)
    if first_token is not None:
        token_ids[0] = first_token
    own = (VersionSpan(*version, 0, 3), VersionSpan(1, 0, 3, 4))
    return Completion(token_ids, np.append(BEGUN.logprobs, -1).astype(np.float32), own, "stop", "")


CHANGED = {
    "another token": ([DONE, longer(first_token=49)], PROMPT_IDS, "completion 1 does not begin"),
    "another version": ([DONE, longer(version=(1, 0))], PROMPT_IDS, "completion 1 does not begin"),
    "shorter": ([DONE, GOOD], PROMPT_IDS, "completion 1 does not begin"),
    "a finished one goes on": ([GOOD, longer()], PROMPT_IDS, "completion 0 has 3 tokens"),
    "another prompt": ([DONE, longer()], PROMPT_IDS + 1, "prompt_ids"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_a_lease_came_with_stays_as_it_was(world: World, what: str) -> None:
    pair, prompt_ids, said = CHANGED[what]
    _, lease = begun_by_another(world)
    request, frames = group_result(lease.group_id, lease.attempt, pair, prompt_ids)
    request.member_id = "second"
    reply = world.send(request, frames).reply
    assert reply.status == INVALID
    assert said in reply.message
    request, frames = group_result(lease.group_id, lease.attempt, [DONE, longer()])
    request.member_id = "second"
    assert world.send(request, frames).reply.status == COMMITTED


def send(world: World, lease: pb.Lease, pair: list[Completion], member_id: str = "second") -> pb.ExchangeReply:
    request, frames = group_result(lease.group_id, lease.attempt, pair)
    request.member_id = member_id
    return world.send(request, frames).reply


@pytest.mark.parametrize(
    ("samplers", "message"),
    [
        ((("second",), ("first", "second")), "samplers has 'second' for tokens 0 to 2 of completion 0, but 'first'"),
        ((("first",), ("second", "second")), "samplers has 'second' for tokens 0 to 3 of completion 1, but 'first'"),
        ((("first",), ("first", "first")), "samplers has 'first' for tokens 3 to 4 of completion 1, but 'second'"),
        ((("first",), ("first", "third")), "samplers has 'third' for tokens 3 to 4 of completion 1, but 'second'"),
        ((("first",), ("first", "")), "samplers has '' for tokens 3 to 4 of completion 1, but 'second'"),
        ((("",), ("", "second")), "samplers has '' for tokens 0 to 2 of completion 0, but 'first'"),
        ((("",), ("", "")), ""),  # by a worker of 0.1.0
    ],
)
def test_the_tokens_of_a_prefix_keep_their_samplers(
    world: World, samplers: tuple[tuple[str, ...], tuple[str, ...]], message: str
) -> None:
    _, lease = begun_by_another(world)
    reply = send(world, lease, [named(DONE, *samplers[0]), named(longer(), *samplers[1])])
    assert message in reply.message
    assert (reply.status == INVALID) == bool(message)


def test_a_group_names_each_worker_that_continued_it(world: World) -> None:
    _, lease = begun_by_another(world)
    pair = [named(DONE, "first"), named(longer(), "first", "second")]
    assert send(world, lease, pair).status == COMMITTED
    payload = world.ledger.payload(world.run_id, lease.group_id)
    assert payload is not None
    texts, arrays = payload.read()
    assert set(CompletionArrays.of(arrays).samplers) == {"first", "second"}
    assert [c.spans for c in decode_result(arrays, texts)[1]] == [c.spans for c in pair]


def test_a_later_attempt_without_a_prefix_names_no_earlier_holder(world: World) -> None:
    first, second = Rollout(world, "first"), Rollout(world, "second")
    (lease,) = first.lease()
    first.return_lease(lease)
    (again,) = second.lease()
    assert "samplers has 'first'" in send(world, again, [named(GOOD, "first")] * 2).message
    assert second.finish(again) == COMMITTED


def test_a_later_attempt_has_no_versions_that_its_worker_does_not_hold(world: World) -> None:
    first, second = Rollout(world, "first"), Rollout(world, "second")
    (lease,) = first.lease()
    first.return_lease(lease)
    (again,) = second.lease()
    assert again.attempt == 2
    request, frames = group_result(again.group_id, 2, [spans((1, 0), (1, 1)), GOOD])
    request.member_id = "second"
    reply = world.send(request, frames).reply
    assert reply.status == INVALID
    assert "version (1, 1) in spans is newer than (1, 0), the newest that second acknowledged" in reply.message
    assert second.finish(again) == COMMITTED


def test_a_beginning_allows_its_own_versions_and_no_newer_ones(world: World) -> None:
    Rollout(world, "further ahead", step=2)
    _, lease = begun_by_another(world)
    own = longer()
    newer = replace(own, spans=(*own.spans[:1], VersionSpan(1, 2, 3, 4)))
    for completion, status in ((newer, INVALID), (own, COMMITTED)):
        request, frames = group_result(lease.group_id, lease.attempt, [DONE, completion])
        request.member_id = "second"
        assert world.send(request, frames).reply.status == status


def test_a_beginning_that_was_lost_refuses_no_result(world: World) -> None:
    _, lease = begun_by_another(world)
    row = world.ledger.db.execute("SELECT * FROM payloads WHERE kind = 'prefix'").fetchone()
    with world.ledger.transaction():
        selection.handle_damaged(world.exchange, world.run, DamagedRecord("gone", row["segment"], row["start"]))
    assert world.ledger.db.execute("SELECT 1 FROM payloads WHERE kind = 'prefix'").fetchone() is None
    _names_holders(world, lease)


def _names_holders(world: World, lease: pb.Lease) -> None:
    """Assert that a result whose prefix cannot be compared is committed if it names holders of the group alone."""
    refused = send(world, lease, [named(DONE, "ahead"), named(longer(), "first", "second")])
    assert "sampler_names has ['ahead'], but attempts up to 2 were leased to ['first', 'second']" in refused.message
    assert send(world, lease, [named(DONE, "first"), named(longer(), "first", "second")]).status == COMMITTED


def test_an_attempt_from_before_the_return_need_not_continue_its_prefix(world: World) -> None:
    slow, quick = Rollout(world, "slow"), Rollout(world, "quick")
    (lease,) = slow.lease()
    world.release("slow")
    (again,) = quick.lease()
    assert quick.return_lease(again, [GOOD, replace(GOOD, finish_reason="abort")]).reply.status == COMMITTED
    refused = send(world, lease, [named(GOOD, "quick")] * 2, "slow")
    assert "sampler_names has ['quick'], but attempts up to 1 were leased to ['slow']" in refused.message
    assert slow.finish(lease) == COMMITTED


def test_a_beginning_that_is_damaged_by_now_refuses_no_result(world: World) -> None:
    _, lease = begun_by_another(world)
    row = world.ledger.db.execute("SELECT * FROM payloads WHERE kind = 'prefix'").fetchone()
    world.ledger.payloads.recent.evict(row["segment"], row["start"])
    (segment,) = world.ledger.payloads.folder.glob("*.seg")
    segment.write_bytes(bytes(segment.stat().st_size))
    _names_holders(world, lease)


def test_a_returned_prefix_is_in_a_segment(world: World) -> None:
    begun_by_another(world)
    row = world.ledger.db.execute("SELECT * FROM payloads WHERE kind = 'prefix'").fetchone()
    assert row["segment"] is not None
    assert (row["header"], row["arrays"]) == (b"", b"")


def test_a_number_beyond_64_bits_of_sign_is_no_group(world: World) -> None:
    rollout, reward = Rollout(world), Reward(world)
    rollout.lease()
    for group_id in (2**63, 2**64 - 1):
        lease = pb.Lease(group_id=group_id, attempt=1, num_generations=2)
        assert rollout.finish(lease) == STALE
        task = pb.ScoreTask(group_id=group_id, attempt=1)
        assert reward.score(task, [0.0, 1.0]) == STALE
        assert rollout.return_lease(lease).reply.status == STALE
    learner = Learner(world)
    assert learner.part(2**63) is None


def test_a_run_whose_groups_no_message_carries_is_refused(tmp_path: Any) -> None:
    policy = {
        "model_name": "none",
        "max_total_sequence_length": 70_000,
        "generation": {"max_new_tokens": 65_536},
    }
    refuse_large_groups(make_spec(tmp_path, policy=policy, grpo={"num_generations_per_prompt": 256}))
    with pytest.raises(SpecError, match=r"num_generations_per_prompt 512 x .*max_new_tokens 65536.*256 MiB"):
        refuse_large_groups(make_spec(tmp_path, policy=policy, grpo={"num_generations_per_prompt": 512}))
