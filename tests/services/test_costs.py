"""What has ended costs nothing: no request reads the groups that a run has had before, however many they are."""

from __future__ import annotations

from exchange_drivers import COMMITTED, Learner, MakeWorld, Reward, Rollout, World

NUM_ENDED = 3000


def add_ended_groups(world: World) -> None:
    """Groups of earlier steps, and some that were dropped, as a long run leaves them."""
    row = "(?, ?, 'train', ?, ?, ?)"
    with world.ledger.transaction():
        for index in range(NUM_ENDED):
            state = "dropped" if index % 5 == 0 else "trained"
            world.ledger.db.execute(
                f"INSERT INTO groups (run_id, group_id, class, state, slot, step) VALUES {row}",
                (world.run_id, 10**6 + index, state, 0, None if state == "dropped" else -1),
            )


def instructions(world: World) -> dict[str, int]:
    """How many instructions of SQLite's machine a step's life takes, by kind of request."""
    counts: dict[str, int] = {}
    kind = ""

    def count() -> None:
        counts[kind] = counts.get(kind, 0) + 1

    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    world.ledger.db.set_progress_handler(count, 1)
    kind = "lease"
    leases = rollout.lease(4)
    kind = "group"
    for lease in leases:
        assert rollout.finish(lease) == COMMITTED
    kind = "task"
    tasks = reward.tasks()
    kind = "score"
    for task in tasks:
        assert reward.score(task) == COMMITTED
    kind = "batch"
    part = learner.part(0)
    assert part is not None
    kind = "receipt"
    learner.receipt(0, 0, part)
    kind = "leave"
    world.release(rollout.member_id, crashed=True)
    kind = "gauges"
    world.ledger.held()
    world.ledger.holders()
    world.ledger.groups_by_state(world.run_id)
    world.ledger.live_tokens(world.run_id)
    world.ledger.db.set_progress_handler(None, 1)
    return counts


def test_no_request_reads_what_has_ended(make_world: MakeWorld) -> None:
    short, long = make_world(), make_world(check=False)
    add_ended_groups(long)
    few, many = instructions(short), instructions(long)
    assert few.keys() == many.keys()
    for kind, number in many.items():
        assert number < few[kind] + NUM_ENDED // 10, kind
