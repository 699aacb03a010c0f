"""`paceline drop`: a person drops groups from the batch that is due, and it is fixed anew."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import Conflict, InvalidInput
from paceline.services.coordinator.exchange.batches import session_faults
from paceline.services.coordinator.exchange.batches.selection import fix, take_apart
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange

REASON = "by_request"


def drop(exchange: Exchange, run: ActiveRun, group_ids: Sequence[int], now_s: float) -> None:
    """End groups of the fixed, untrained batch as dropped(by_request). The batch is fixed anew at once when enough
    scored groups are there, else when they are. Inside a transaction. Raises Conflict, InvalidInput.
    """
    if len(group_ids) > run.batch_size:
        raise InvalidInput(
            f"{len(group_ids)} groups are named, and a batch has {run.batch_size} (grpo.num_prompts_per_step)"
        )
    row = exchange.ledger.run(run.run_id)
    step, wanted = row["next_step"], sorted(set(group_ids))
    if not wanted:
        raise InvalidInput("name at least one group to drop")
    if row["next_batch"] <= step or run.prompts is None:
        raise Conflict(
            f"run {run.run_id} has no batch that is fixed and not trained; its next step is {step}"
        )
    in_batch = {group["group_id"]: group for group in exchange.group_queries.of_step(run.run_id, step)}
    others = [group_id for group_id in wanted if group_id not in in_batch]
    if others:
        raise InvalidInput(
            f"groups {others} are not in the batch of step {step}, which has {sorted(in_batch)}; only groups of a batch that "
            "is fixed and not trained can be dropped"
        )
    take_apart(exchange, run, step, wanted, REASON)
    for group_id in wanted:
        exchange.drop(run, in_batch[group_id], REASON)
    session_faults.reset(exchange, run.run_id)
    fixed = fix(exchange, run, now_s)
    when = "the batch is fixed anew" if fixed else "the batch is fixed anew when enough groups are scored"
    exchange.notice("warning", message=f"groups {wanted} of step {step} were dropped by request; {when}")
