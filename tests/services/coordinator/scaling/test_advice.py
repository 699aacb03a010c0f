"""The sentence that says what limits a run."""

from __future__ import annotations

from services.coordinator.scaling.advice import PoolFacts, advise
from services.coordinator.scaling.policy import PoolState


def pool(workers: int, rate: float, demand: float = 4.0) -> PoolFacts:
    return PoolFacts(workers, PoolState(workers, groups=1000 * rate, full_worker_s=1000.0, demand=demand))


def test_the_pool_that_limits_is_named_with_what_it_needs() -> None:
    text = advise({"rollout": pool(4, 0.5), "reward": pool(2, 10.0)}, wait_fraction=0.5)
    assert "the rollout pool limits: its 4 workers complete 50% of what the learner can train" in text
    assert "With 9 workers a step would take 1/2.00 of its present time" in text


def test_workers_to_spare_are_named() -> None:
    text = advise({"rollout": pool(12, 0.5), "reward": pool(1, 10.0)}, wait_fraction=0.01)
    assert text.startswith("the learner limits")
    assert "The rollout pool needs 9 of its 12 workers" in text


def test_a_wait_that_no_pool_explains_is_said_so() -> None:
    text = advise({"rollout": pool(12, 0.5)}, wait_fraction=0.3)
    assert "waits 30% of its time, though the rollout pool could complete 1.5 times" in text


def test_before_anything_is_measured_nothing_is_known() -> None:
    assert advise({"rollout": PoolFacts(2, PoolState())}, 0.0).startswith("nothing is known yet")
