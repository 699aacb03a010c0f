"""How many services of each role a host starts for its runs."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.spec import ClusterSection, RunSpec


def sizes_for(specs: Sequence[RunSpec]) -> ClusterSection:
    """Return the services that the runs need: as the first of them with rollouts says. Runs on examples need no workers, and
    only runs with an environment need environment workers, one unless they say how many."""
    sizes = next((spec.cluster for spec in specs if spec.samples), specs[0].cluster)
    if not any(spec.samples for spec in specs):
        none = {"rollout_workers": 0, "reward_workers": 0, "rollout_gpus": (), "reward_gpus": ()}
        return sizes.model_copy(update={**none, "environment_workers": 0})
    named = [spec.cluster.environment_workers for spec in specs if spec.environment.is_used]
    environment_workers = max((1 if number is None else number for number in named), default=0)
    if not named and sizes.environment_workers:
        environment_workers = sizes.environment_workers
    return sizes.model_copy(update={"environment_workers": environment_workers})
