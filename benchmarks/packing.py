"""Micro-batches of even cost against those of first fit, for long sequences. Arithmetic alone: nothing is trained.

    python benchmarks/packing.py [--json]

Every pass of sharded ranks ends with the slowest rank. Printed is the work of the slowest rank of each pass, summed over the
passes of a step, by a rank's mean work: 1 is ideal. Lengths are log-normal with a median of 8,000 tokens, cut at 65,536, 4
prompts a rank × 16 completions; the work is that of an 8B model (`paceline/models/shape.py`); groups go to the ranks as in a run,
even by tokens. Each figure is the mean of 20 batches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import numpy as np
from short_form import parse

from paceline.learner.step.plan import pack, pack_evenly
from paceline.models.shape import shape_of, training_flops
from paceline.services.coordinator.ledger.tables.batches import balance

MEDIAN, LONGEST, BATCHES = 8_000, 65_536, 20
SHAPE = shape_of(
    {
        "num_hidden_layers": 36,
        "hidden_size": 4_096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151_936,
        "intermediate_size": 12_288,
    }
)


def work(length: int) -> float:
    """Return the operations of one sequence."""
    assert SHAPE is not None
    return training_flops(SHAPE, [(1, length)], length)


def lengths_of_ranks(rng: np.random.Generator, sigma: float, ranks: int) -> list[list[int]]:
    """Return the lengths of each rank's sequences."""
    groups = np.minimum(rng.lognormal(np.log(MEDIAN), sigma, (4 * ranks, 16)).astype(int), LONGEST)
    parts = balance([int(group.sum()) for group in groups], ranks)
    return [[int(length) for index in part for length in groups[index]] for part in parts]


def slowest(lengths: Sequence[Sequence[int]], packed: Sequence[Sequence[Sequence[int]]]) -> float:
    """Return the work of the slowest rank of each pass, summed, by the mean work of a rank."""
    costs = [[sum(work(own[i]) for i in row) for row in rows] for own, rows in zip(lengths, packed, strict=True)]
    passes = max(map(len, costs))
    padded = [row + [0.0] * (passes - len(row)) for row in costs]
    return sum(map(max, zip(*padded, strict=True))) / (sum(map(sum, padded)) / len(padded))


def compare(sigma: float, ranks: int, budget: int) -> dict[str, float]:
    """Return both figures for one setting."""
    sums = np.zeros(2)
    for seed in range(BATCHES):
        lengths = lengths_of_ranks(np.random.default_rng(seed), sigma, ranks)
        first_fit = [pack(own, budget) for own in lengths]
        passes = max(map(len, first_fit))
        even = [pack_evenly(own, [work(n) for n in own], budget, passes) for own in lengths]
        sums += slowest(lengths, first_fit), slowest(lengths, even)
    first_fit_mean, even_mean = (sums / BATCHES).round(3).tolist()
    return {
        "sigma": sigma, "ranks": ranks, "budget": budget, "first_fit": first_fit_mean, "even_cost": even_mean
    }  # fmt: skip


def main() -> None:
    """Print a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    options = parse(parser)
    rows = [
        compare(sigma, ranks, budget)
        for sigma in ((1.0,) if options.short else (0.5, 1.0, 1.5))
        for ranks in ((8,) if options.short else (8, 32))
        for budget in (65_536, 98_304, 131_072)
    ]
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
