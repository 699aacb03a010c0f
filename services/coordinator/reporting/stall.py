"""Explanation of a stall: why the learner waits, and what helps. Pure; the coordinator feeds it.

Reasons are checked along a group's way; the first that holds explains the stall, because no data can arrive behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.services.coordinator.ledger.groups import State


@dataclass(frozen=True)
class Facts:
    """State of run and pools while the learner waits."""

    waited_s: float
    """Seconds of waiting for the batch of `step`; without a learner, seconds since a learner was connected."""
    step: int
    learners: int
    """Learners on the run."""
    rollouts: int
    """Connected rollout workers."""
    ready_rollouts: int
    """Connected rollout workers that have set the run up."""
    versions: tuple[int, ...]
    """Steps of the versions that they acknowledged."""
    rewards: int
    """Connected reward workers."""
    leases: int
    holders: int
    """Workers that hold leases."""
    tasks: int
    """Score tasks that reward workers hold."""
    groups: Mapping[str, int]
    """Open groups by state."""
    batch: int
    """B: groups in a step."""
    max_age: int
    """η."""
    environments: int | None = None
    """Connected environment workers, which hold the leases; None for a run without an environment."""
    ready_environments: int = 0
    """Those of them that have set the run up."""
    asked: bool = True
    """True when the learner has asked for the batch of `step`; if not, `waited_s` counts from its last training step."""
    admission_closed: str = ""
    """Reason why no group is admitted; empty if groups are."""
    unreadable_data: str = ""
    """Reason why the next prompt cannot be read; empty if it can."""


def explain(facts: Facts) -> str:
    """Return a sentence on what is missing, with numbers, and a sentence on what to do."""
    waited = f"{facts.waited_s:.0f} s"
    if not facts.learners:
        return (
            f"no learner has worked on step {facts.step} for {waited}: none is connected. "
            "Start one, or read the log of the last one"
        )
    if not facts.asked:
        return (
            f"the learner has not asked for the data of step {facts.step} for {waited}: it loads, saves or publishes, or one "
            "of its ranks hangs. Read the logs of its ranks"
        )
    reason, advice = _why(facts)
    return f"learner has waited {waited} for the data of step {facts.step}: {reason}. {advice}"


def _why(facts: Facts) -> tuple[str, str]:
    holder = "rollout" if facts.environments is None else "environment"
    groups, held = facts.groups, f"{facts.holders} {holder} workers hold leases"
    to_generate = groups.get(State.ADMITTED, 0) + groups.get(State.LEASED, 0)
    to_score = groups.get(State.GENERATED, 0)
    scored = groups.get(State.SCORED, 0)
    if facts.admission_closed:
        return (
            f"admission is closed, {facts.admission_closed}",
            "Make room; admission then opens automatically",
        )
    if facts.unreadable_data:
        return (
            f"no prompt is admitted, {facts.unreadable_data}",
            "It goes on automatically when the data can be read",
        )
    if scored >= facts.batch:
        return (
            f"{scored} groups are scored, but {to_generate + to_score} older ones are waited for",
            "It goes on after async_grpo.late_wait_s, or when they are complete (order: in_order)",
        )
    if to_score + scored < facts.batch and facts.environments == 0:
        return (
            f"{held}, none is connected",
            "Start environment workers, or read why the last one died in its log",
        )
    if to_score + scored < facts.batch and facts.environments and not facts.ready_environments:
        return (
            f"{facts.environments} environment workers are connected, none has set the run up",
            "Read their logs: the user's code may take long to load",
        )
    if to_score + scored < facts.batch and not facts.rollouts:
        nobody = (
            f"{held}, none is connected" if facts.environments is None else "no rollout worker is connected"
        )
        return nobody, "Start rollout workers, or read why the last one died in its log"
    if to_score + scored < facts.batch and not facts.ready_rollouts:
        return (
            f"{facts.rollouts} rollout workers are connected, none has set the run up",
            "Read their logs: a model takes long to load, or cannot be loaded",
        )
    if to_score + scored < facts.batch and not facts.leases:
        newest = max(facts.versions, default=-1)
        if newest < facts.step - facts.max_age:
            has = (
                f"the newest weights of any are version {newest}"
                if facts.versions
                else "none has any weights"
            )
            return (
                f"0 {holder} workers hold leases, {has}, and step {facts.step} needs {facts.step - facts.max_age}",
                "Weights do not arrive: look for 'did not reach' in the coordinator's log and check "
                "weights.max_wait_s and the network from learner to rollout",
            )
        return (
            f"{held}, although {groups.get(State.ADMITTED, 0)} groups could be had",
            "The workers do not ask: read their logs, and look whether their processes are stopped",
        )
    if to_score and not facts.rewards:
        return f"{to_score} groups are generated, no reward worker is connected", "Start reward workers"
    if to_score and to_score + scored >= facts.batch:
        return (
            f"{to_score} groups are generated and not scored, reward workers hold {facts.tasks} of them",
            "Scoring is the bottleneck: add reward workers, or look at the time-outs of the reward functions",
        )
    return (
        f"{held}, {facts.leases} in all; {scored} of {facts.batch} groups are scored, {to_score} wait for a score",
        "Generation is the bottleneck: add rollout workers, or raise async_grpo.max_trajectory_age_steps",
    )
