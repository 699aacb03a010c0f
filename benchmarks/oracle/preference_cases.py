"""The preference losses that TRL and Paceline both have, in each one's settings. Plain data: both environments read it."""

from __future__ import annotations

from typing import Any

DPO_CASES: dict[str, dict[str, Any]] = {
    "dpo sigmoid": {"trl": "sigmoid", "kind": "sigmoid", "beta": 0.1},
    "dpo robust": {"trl": "robust", "kind": "robust", "beta": 0.1, "label_smoothing": 0.15},
    "dpo hinge": {"trl": "hinge", "kind": "hinge", "beta": 0.1},
    "ipo": {"trl": "ipo", "kind": "ipo", "beta": 0.3},
    "dpo, per-token means": {"trl": "sigmoid_norm", "kind": "sigmoid", "beta": 2.0, "average": True},
}

KTO: dict[str, dict[str, float]] = {
    "trl": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.3},
}

ORPO = {"beta": 0.1}

REWARD_CASES: dict[str, dict[str, Any]] = {
    "reward model": {"margin": False, "centring": None},
    "reward model, margin and centring": {"margin": True, "centring": 0.01},
}
