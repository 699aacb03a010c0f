"""The rewards of all scored groups of a run: those that were trained, that wait, and that were dropped without variance."""

from __future__ import annotations

import pytest
from exchange_drivers import COMMITTED, MakeWorld, Reward, Rollout

from paceline.errors import NotFound
from paceline.records import Records
from paceline.services.coordinator.records import lists
from paceline.services.coordinator.records.reader import RecordsReader
from paceline.v1 import records_pb2 as pb


def test_dropped_groups_are_attempts_too(make_world: MakeWorld) -> None:
    world = make_world(grpo={"use_dynamic_sampling": True})
    rollout, reward = Rollout(world), Reward(world)
    for lease in rollout.lease(8):
        assert rollout.finish(lease) == COMMITTED
    expected = []
    for task, values in zip(reward.tasks(), ([1.0, 1.0], [1.0, 0.0]), strict=False):
        assert reward.score(task, values) == COMMITTED
        expected.append((world.run.prompts.draw(task.group_id)[0], values))
    assert "dropped" in world.states().values()
    reader = RecordsReader(world.ledger)
    records = Records(lambda method, request: getattr(reader, method)(request))
    assert list(records.attempts(world.run_id)) == expected
    with pytest.raises(NotFound):
        list(records.attempts("no-run"))

    first = reader.ListAttempts(pb.ListAttemptsRequest(run_id=world.run_id, page_size=1))
    assert (len(first.attempts), first.next_page_token) == (1, str(first.attempts[0].group_id))
    request = pb.ListAttemptsRequest(run_id=world.run_id)
    page = lists.list_attempts(world.ledger, request, world.spec, max_characters=0)
    assert (len(page.attempts), page.next_page_token) == (1, first.next_page_token)
    small = Records(lambda _, request: lists.list_attempts(world.ledger, request, world.spec, max_characters=0))
    assert list(small.attempts(world.run_id)) == expected
