"""A ledger with many groups that have ended."""

from __future__ import annotations

from exchange_drivers import World

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
