"""The sentence that says what limits a run."""

from __future__ import annotations

from paceline.services.coordinator.scaling.policy import PoolState
from paceline.services.coordinator.scaling.scaler import PoolFacts, advise


def pool(workers: int, rate: float, demand: float = 4.0, share: float = 1.0, cost: float = 0.0) -> PoolFacts:
    state = PoolState(workers, groups=1000 * rate, full_worker_s=1000.0, demand=demand, share=share)
    return PoolFacts(workers, state, cost)


def test_the_pool_that_limits_is_named_with_what_it_needs() -> None:
    text = advise({"rollout": pool(4, 0.5), "reward": pool(2, 10.0)}, wait_fraction=0.5)
    assert "the rollout pool limits the run: its 4 workers complete 50% of what the learner can train" in text
    assert "With 9 workers a step would take 50% of its present time" in text


def test_workers_to_spare_are_named() -> None:
    text = advise({"rollout": pool(12, 0.5), "reward": pool(1, 10.0)}, wait_fraction=0.01)
    assert text.startswith("the learner limits")
    assert "The rollout pool needs 9 of its 12 workers" in text


def test_a_wait_that_no_pool_explains_is_said_so() -> None:
    text = advise({"rollout": pool(12, 0.5)}, wait_fraction=0.3)
    assert "waits 30% of its time, though the rollout pool could complete 1.5 times" in text


def test_before_anything_is_measured_nothing_is_known() -> None:
    assert advise({"rollout": PoolFacts(2, PoolState())}, 0.0).startswith("nothing is measured yet")


def test_what_a_change_costs_or_saves_is_named_where_costs_are() -> None:
    short = advise({"rollout": pool(4, 0.5, cost=2.5)}, wait_fraction=0.5)
    assert "With 9 workers, for 12.50 more an hour a step would take 50%" in short
    spare = advise({"rollout": pool(12, 0.5, cost=2.5)}, wait_fraction=0.0)
    assert spare.endswith("The rollout pool needs 9 of its 12 workers, with 10% to spare, which saves 7.50 an hour")


def test_a_pool_is_measured_by_its_share_of_the_demand() -> None:
    pools = {"rollout (a)": pool(2, 1.0, share=0.5), "rollout (b)": pool(1, 1.0, share=0.5)}
    assert "the rollout (b) pool limits the run: its 1 worker completes 50%" in advise(pools, wait_fraction=0.4)
    unused = {"rollout (a)": pool(8, 1.0), "rollout (b)": pool(0, 1.0, share=0.0)}
    assert advise(unused, 0.0).startswith("the learner limits"), "a pool without a share is no bottleneck"


def test_a_pool_without_workers_comes_before_every_figure() -> None:
    text = advise({"rollout": pool(4, 0.5), "reward": PoolFacts(0, PoolState())}, wait_fraction=0.9)
    assert text.startswith("no reward worker takes work: start a worker")


def test_the_gain_of_a_faster_learner_is_bounded_by_the_pools() -> None:
    text = advise({"rollout": pool(12, 0.5), "reward": pool(1, 5.0)}, wait_fraction=0.0)
    assert "the pools could feed a learner that is 1.2 times as fast" in text
