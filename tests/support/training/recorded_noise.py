"""Recorded differences between the log-probabilities of real engines and the learner's (`benchmarks/sampler_noise.py`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[2] / "data" / "sampler_noise"
COMPLETIONS = 4
"""Completions of a group."""


def load_noise(name: str) -> list[np.ndarray]:
    """Return log μ - log π of each completion, [T] float32 in nats, not clipped; each COMPLETIONS neighbours are a group.
    `name` is a recording in FOLDER, or the path of another one, without `.npz`."""
    with np.load(FOLDER / f"{name}.npz") as recording:
        tokens = (recording["differences"] * recording["unit"]).astype(np.float32)
        return np.split(tokens, recording["lengths"].cumsum()[:-1])
