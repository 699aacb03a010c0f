"""Objectives: one file for each algorithm (`grpo` is in policy.py), with its samples, its loss and its metrics."""

from __future__ import annotations

from paceline.learner.objectives.base import Objective
from paceline.learner.objectives.distillation import Distillation
from paceline.learner.objectives.dpo import Dpo
from paceline.learner.objectives.kto import Kto
from paceline.learner.objectives.offline_grpo import OfflineGrpo
from paceline.learner.objectives.orpo import Orpo
from paceline.learner.objectives.policy import Grpo
from paceline.learner.objectives.reward_model import RewardModel
from paceline.learner.objectives.sft import Sft
from paceline.spec import RunSpec


def objective_of(spec: RunSpec) -> Objective:
    match spec.algorithm:
        case "grpo":
            return Grpo(spec)
        case "distillation":
            return Distillation(spec)
        case "sft":
            return Sft(spec)
        case "dpo":
            return Dpo(spec)
        case "orpo":
            return Orpo(spec)
        case "kto":
            return Kto(spec)
        case "offline_grpo":
            return OfflineGrpo(spec)
        case "rm":
            return RewardModel(spec)
        case _:
            raise ValueError(f"unknown algorithm {spec.algorithm!r}")
