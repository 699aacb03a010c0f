"""A result consists of the logged turns, and a sample with an unreadable turn begins again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from episode_drivers import (
    ENVIRONMENT,
    EnvironmentWorker,
    Episode,
    Episodes,
    assemble,
    make_turn,
    serving_rollout,
)
from exchange_drivers import COMMITTED, INVALID, STALE, MakeWorld, Rollout, World, group_result

from paceline.groups import Version, VersionSpan, joined_spans
from paceline.services.coordinator.exchange import turn_logs
from paceline.services.coordinator.exchange.batches import selection
from paceline.services.coordinator.exchange.requests import lease as lease_requests
from paceline.services.coordinator.exchange.uploads.intake import turn_digest
from paceline.services.coordinator.ledger import segments
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import encode_result

VERSION = Version(1, 0)


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world(**ENVIRONMENT)


def finished(world: World) -> tuple[EnvironmentWorker, Episodes]:
    """A lease whose two samples are finished."""
    serving_rollout(world)
    worker = EnvironmentWorker(world)
    (held,) = worker.lease(2)
    worker.play_all(held, VERSION)
    return worker, held


def changed_turn(held: Episodes, **fields: Any) -> None:
    turns = held.samples[0].turns
    turns[1] = turns[1]._replace(**fields)


def shorter(held: Episodes) -> None:
    del held.samples[0].turns[-1]


def other_row(held: Episodes) -> None:
    turns = held.samples[0].turns
    turns[1:] = [turn._replace(row=1) for turn in turns[1:]]


def without(held: Episodes) -> None:
    held.samples[0] = Episode(given_up=True)


CHANGES: dict[str, tuple[Callable[[Episodes], None], str]] = {
    "token": (
        lambda held: changed_turn(held, token_ids=np.array([1, 2, 49], np.int32)),
        "has other tokens or samplers in turn 1",
    ),
    "logprob": (
        lambda held: changed_turn(held, logprobs=np.full(3, -9, np.float32)),
        "has other tokens or samplers in turn 1",
    ),
    "version": (
        lambda held: changed_turn(held, spans=(VersionSpan(0, 0, 0, 3),)),
        "has other tokens or samplers in turn 1",
    ),
    "sampler": (
        lambda held: changed_turn(held, spans=(VersionSpan(1, 0, 0, 3, "rollout-0"),)),
        "has other tokens or samplers in turn 1",
    ),
    "no sampler": (
        lambda held: changed_turn(held, spans=(VersionSpan(1, 0, 0, 3),)),
        "has other tokens or samplers in turn 1",
    ),
    "context": (
        lambda held: changed_turn(held, context_ids=np.array([1], np.int32)),
        "has other tokens before turn 1",
    ),
    "turn missing": (shorter, "has 2 turns, but 3 in the ledger"),
    "row": (other_row, "has other tokens or samplers in turn 1"),
    "sample missing": (without, "has 0 turns, but 3 in the ledger"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_a_result_that_is_not_its_turn_log_is_invalid(
    world: World, change: Callable[[Episodes], None], message: str
) -> None:
    worker, held = finished(world)
    good = worker.result(held)
    before = world.dump()
    change(held)
    reply = world.send(*worker.result(held)).reply
    assert (reply.status, message in reply.message) == (INVALID, True), reply.message
    assert world.dump() == before
    assert world.send(*good).reply.status == COMMITTED


def test_a_digest_of_a_turn_covers_its_samplers() -> None:
    def digest(*samplers: str) -> str:
        spans = (VersionSpan(1, 4, 0, 1), VersionSpan(1, 4, 1, 2), VersionSpan(1, 5, 2, 3))
        named = [span._replace(sampler=sampler) for span, sampler in zip(spans, samplers, strict=True)]
        assert turn_digest(token_ids, logprobs, named) == turn_digest(token_ids, logprobs, joined_spans(named))
        return turn_digest(token_ids, logprobs, named)

    token_ids, logprobs = np.array([2, 3, 4], np.int32), np.array([-1, -2, -0.5], np.float32)
    assert digest("", "", "") == "0694a6674a652cbba2e5077a0a746c5e"  # as in 0.1.0
    others = [digest("a", "a", "a"), digest("b", "b", "b"), digest("a", "b", "b"), digest("a", "a", "")]
    assert len({digest("", "", ""), *others}) == 5


def test_a_result_before_its_last_turn_is_invalid(world: World) -> None:
    serving_rollout(world)
    worker = EnvironmentWorker(world)
    (held,) = worker.lease(2)
    worker.play_all(held, VERSION)
    world.release("environment")
    other = EnvironmentWorker(world, "other")
    (again,) = other.lease(2)
    again.samples[1].turns.append(make_turn(VERSION, 1))
    assert other.finish(again) == INVALID
    (third,) = other.lease(2)
    other.play(third, 0, VERSION, last=False)
    third.samples[1].turns.append(make_turn(VERSION, 1))
    reply = world.send(*other.result(third)).reply
    assert "sample 0 is not finished" in reply.message


def test_a_result_of_an_attempt_that_a_later_one_has_left_behind_is_stale(world: World) -> None:
    worker, held = finished(world)
    world.release("environment")
    other = EnvironmentWorker(world, "other")
    assert len(other.lease(2)) == 1
    assert worker.finish(held) == COMMITTED  # the turn log is the same whoever submits it
    worker, other = EnvironmentWorker(world, "third"), EnvironmentWorker(world, "fourth")
    (first,) = worker.lease(2)
    worker.play(first, 0, VERSION, last=False)
    world.release("third")
    (second,) = other.lease(2)
    other.end(second, 0)
    first.samples[1].turns.append(make_turn(VERSION, 1))
    assert worker.finish(first) == STALE


def test_groups_without_rows_and_groups_with_rows_stay_in_their_runs(world: World, make_world: MakeWorld) -> None:
    worker, held = finished(world)
    plain = make_world()
    rollout = Rollout(plain)
    (lease,) = rollout.lease(2)
    request, frames = group_result(held.lease.group_id, 1, rollout.completions(lease))
    request.member_id = worker.member_id
    reply = world.send(request, frames).reply
    assert (reply.status, "has no rows, but the run has an environment" in reply.message) == (INVALID, True)
    request, frames = worker.result(held)
    request.member_id = rollout.member_id
    reply = plain.send(request, frames).reply
    assert (reply.status, "has rows, but the run has no environment" in reply.message) == (INVALID, True)


def test_the_texts_of_every_sample_come_with_a_group(world: World) -> None:
    worker, held = finished(world)
    request, (arrays, texts) = worker.result(held)
    message = pb.Texts.FromString(texts)
    for change in ("one sample", "ending", "reward", "long"):
        changed = pb.Texts.FromString(texts)
        if change == "one sample":
            del changed.samples[1]
        elif change == "ending":
            changed.samples[0].ending = "over"
        elif change == "reward":
            changed.samples[0].reward = float("inf")
        else:
            changed.samples[0].messages_json = "x" * (3 << 20)
        assert world.send(request, [arrays, changed.SerializeToString()]).reply.status == INVALID
    message.samples[0].messages_json = "x" * (1 << 20)  # schemas of tools may be large
    assert world.send(request, [arrays, message.SerializeToString()]).reply.status == COMMITTED


def test_tokens_behind_the_last_turn_of_a_row_are_refused(world: World) -> None:
    worker, held = finished(world)
    request, _ = worker.result(held)
    group, samples = assemble(held)
    first = group.completions[0]
    more = replace(
        first,
        token_ids=np.append(first.token_ids, np.int32(1)),
        logprobs=np.append(first.logprobs, np.float32(0)),
        sampled_T=np.append(first.sampled_T, False),
    )
    group = replace(group, completions=(more, *group.completions[1:]))
    request.group.digest = group.digest()
    frames = encode_result(group.prompt_ids, group.completions, group.rows, samples)
    reply = world.send(request, frames).reply
    assert (reply.status, "its last turn ends at" in reply.message) == (INVALID, True), reply.message


def test_a_lease_comes_back_without_samples(world: World) -> None:
    worker, held = finished(world)
    _, (arrays, _) = worker.result(held)
    returned = pb.LeaseReturn(group_id=held.lease.group_id, attempt=1, finish_reasons=["stop"] * 2, texts=["", ""])
    request = pb.ExchangeRequest(member_id=worker.member_id, lease_return=returned)
    assert "submits them turn by turn" in world.send(request, [arrays]).reply.message
    assert worker.return_lease(held).reply.status == COMMITTED
    (again,) = EnvironmentWorker(world, "other").lease(2)
    assert again.is_finished


def test_a_turn_that_cannot_be_read_begins_its_sample_again(world: World) -> None:
    world.ledger.payloads.max_segment_bytes = 1
    worker, held = finished(world)
    turns = world.ledger.episodes.of_group(world.run_id, 0)
    world.release("environment")
    world.restart()  # nothing is in memory
    (world.ledger.payloads.folder / f"{turns[1]['segment']:08d}.seg").unlink()
    (again,) = EnvironmentWorker(world, "other").lease(2)
    assert [(sample.life, sample.failures, len(sample.turns)) for sample in again.samples] == [
        (2, 0, 0),
        (1, 0, 3),
    ]
    assert world.ledger.failures(world.run_id) == {"damaged": 1}
    assert world.group(0)["tokens"] == 9
    assert worker.finish(held) == STALE


def test_large_turn_logs_come_one_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_requests, "MAX_TURN_LOG_BYTES", 100)
    serving_rollout(world)
    worker = EnvironmentWorker(world)
    for held in worker.lease(8):
        worker.play(held, 0, VERSION, last=False)
    world.release("environment")
    other = EnvironmentWorker(world, "other")
    assert [len(other.lease(8)) for _ in range(5)] == [1, 1, 1, 1, 0]
    assert turn_logs.size_of({}) == 0


def test_a_group_that_is_lost_after_its_result_plays_again_in_its_next_lives(world: World) -> None:
    worker, held = finished(world)
    assert worker.finish(held) == COMMITTED
    (row,) = world.ledger.db.execute("SELECT segment, start FROM payloads WHERE kind = 'result'").fetchall()
    with world.ledger.transaction():
        damaged = segments.DamagedRecord("lost", row["segment"], row["start"])
        selection.handle_damaged(world.exchange, world.run, damaged)
    books = world.ledger.token_books(world.run_id)
    assert (books["generated"], books["wasted"]) == (0, 18)
    (again,) = worker.lease(2)
    assert [sample.life for sample in again.samples] == [1, 1]
    worker.play_all(again, VERSION)
    assert worker.finish(again) == COMMITTED
