"""Simulate runs whose pools the scaling policy sizes, against pools of a fixed size.

    python benchmarks/scaling.py --json

A load is a schedule of step times of the learner and a distribution of generation times. For every load and cold start it
prints: changes of direction of the pools' sizes for each change of the load, the learner's share of waiting in steady state
(from three cold starts after a change on), and the cost by that of fixed pools which are large enough for the largest load.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import itertools

from benchmarks.scaling_simulation.pools import SimulatedPool, SimulatedRun
from benchmarks.short_form import parse
from paceline.services.coordinator.scaling.policy import Bounds, Measurement, PoolState, decide

PERIOD_S = 15.0
BATCH, MAX_AGE = 64, 5
GENERATION_SLOTS, SCORING_SLOTS = 16, 4
GENERATION_S, SCORING_S = 40.0, 4.0
COLD_STARTS_S = (30.0, 120.0, 300.0)
DAY_S = 6 * 3600.0


@dataclass(frozen=True)
class Load:
    """What the learner asks for over time, and how generation times spread."""

    name: str
    step_s: tuple[tuple[float, float], ...]
    """(from, seconds of a step), in order."""
    spread: float
    """σ of the logarithm of generation times."""

    def step_at(self, at_s: float) -> float:
        """Return the seconds of a step that begins then."""
        return [seconds for since_s, seconds in self.step_s if since_s <= at_s][-1]


LOADS = (
    Load("steady", ((0.0, 20.0),), 0.3),
    Load("bursty", ((0.0, 40.0), (3600.0, 10.0), (7200.0, 40.0), (10800.0, 10.0), (14400.0, 40.0)), 0.3),
    Load("long-tailed", ((0.0, 20.0), (10800.0, 30.0)), 1.1),
)


def main() -> None:
    """Simulate every load with every cold start."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parse(parser)
    loads = LOADS[:1] if arguments.short else LOADS
    results = [simulate(load, cold_s, arguments.seed) for load in loads for cold_s in COLD_STARTS_S]
    summary = {
        "direction_changes_per_load_change": max(r["direction_changes_per_load_change"] for r in results),
        "learner_wait_share": max(r["learner_wait_share"] for r in results),
        "cost_over_fixed": sum(r["cost"] for r in results) / sum(r["fixed_cost"] for r in results),
    }
    if arguments.json:
        print(json.dumps({**summary, "runs": results}))
        return
    for result in results:
        print(
            f"{result['load']:12} cold start {result['cold_start_s']:3.0f} s: "
            f"direction changes {result['direction_changes_per_load_change']:.1f}, learner waits "
            f"{result['learner_wait_share']:.1%}, cost {result['cost_over_fixed']:.2f} of fixed pools, sizes {result['sizes']}"
        )
    print(json.dumps(summary))


def simulate(load: Load, cold_start_s: float, seed: int) -> dict[str, object]:
    """Return the figures of one simulated run of DAY_S seconds."""
    draw = random.Random(f"{load.name}/{cold_start_s}/{seed}")
    mean_log = math.log(GENERATION_S) - load.spread**2 / 2
    pools = {
        "rollout": pool(
            "rollout", GENERATION_SLOTS, cold_start_s, 8.0, lambda: draw.lognormvariate(mean_log, load.spread)
        ),
        "reward": pool("reward", SCORING_SLOTS, cold_start_s, 1.0, lambda: draw.expovariate(1 / SCORING_S)),
    }
    run = SimulatedRun(
        pools["rollout"], pools["reward"], BATCH, MAX_AGE,
        lambda at_s: load.step_at(at_s) * draw.uniform(0.9, 1.1),
    )  # fmt: skip
    bounds = Bounds(least=0, most=256, cold_start_s=cold_start_s)
    states = {name: PoolState() for name in pools}
    sizes: dict[str, list[tuple[float, int]]] = {name: [] for name in pools}
    waits: list[tuple[float, float]] = []
    """(time, seconds of waiting) of each period."""
    before = {name: (0, 0.0, 0.0) for name in pools}
    steps, waited_s = 0, 0.0
    while run.now_s < DAY_S:
        new_steps = run.step_times_s[steps:]
        for name, each in pools.items():
            completed, occupied_s, ready_s = before[name]
            ready_in_period_s = each.ready_s - ready_s
            measured = Measurement(
                PERIOD_S, True, each.num_ready(run.now_s), each.num_starting(run.now_s),
                each.completed - completed, sum(worker.held for worker in each.workers),
                (each.occupied_s - occupied_s) / ready_in_period_s if ready_in_period_s else 0.0,
                len(new_steps), sum(new_steps) / max(len(new_steps), 1), BATCH,
            )  # fmt: skip
            if not ready_in_period_s:
                measured = Measurement(PERIOD_S, True, 0, each.num_starting(run.now_s), 0, 0, 0.0)
            states[name] = decide(states[name], measured, bounds)
            each.resize(states[name].desired, run.now_s)
            run.wake_at(run.now_s + cold_start_s)
            sizes[name].append((run.now_s, states[name].desired))
            before[name] = (each.completed, each.occupied_s, each.ready_s)
        steps, waited_s = len(run.step_times_s), run.waited_s
        run.advance(run.now_s + PERIOD_S)
        waits.append((run.now_s, run.waited_s - waited_s))
    changes_s = [since_s for since_s, _ in load.step_s]
    steady = [w for at_s, w in waits if all(not 0 <= at_s - c < 600.0 + 3 * cold_start_s for c in changes_s)]
    fixed = fixed_cost(load)
    cost = sum(each.cost for each in pools.values())
    return {
        "load": load.name,
        "cold_start_s": cold_start_s,
        "direction_changes_per_load_change": max(
            direction_changes([(t, n) for t, n in sizes[name] if a <= t < b])
            for name in pools
            for a, b in zip(changes_s, [*changes_s[1:], DAY_S], strict=True)
        ),
        "learner_wait_share": sum(steady) / (PERIOD_S * len(steady)),
        "cost": cost,
        "fixed_cost": fixed,
        "cost_over_fixed": cost / fixed,
        "steps": len(run.step_times_s),
        "sizes": {name: sorted({n for _, n in sizes[name][40:]}) for name in pools},
    }


def pool(name: str, slots: int, cold_start_s: float, price: float, duration_s: Callable[[], float]) -> SimulatedPool:
    """Return a pool without workers."""
    return SimulatedPool(name, slots, cold_start_s, price, duration_s)


def fixed_cost(load: Load) -> float:
    """Return the cost of pools of a fixed size that the largest demand needs, with the policy's headroom."""
    demand = BATCH / min(seconds for _, seconds in load.step_s)
    rollouts = math.ceil(1.1 * demand * GENERATION_S / GENERATION_SLOTS)
    rewards = math.ceil(1.1 * demand * SCORING_S / SCORING_SLOTS)
    return DAY_S * (8.0 * rollouts + 1.0 * rewards)


def direction_changes(sizes: list[tuple[float, int]]) -> int:
    """Return how often a size that had grown shrank, or the other way round; the first direction is none."""
    directions = [
        1 if after > before else -1 for (_, before), (_, after) in itertools.pairwise(sizes) if after != before
    ]
    return sum(a != b for a, b in itertools.pairwise(directions))


if __name__ == "__main__":
    main()
