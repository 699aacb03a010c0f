"""The objectives that TRL and Paceline both have, in each one's settings. Plain data: both environments read it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    """One objective. Keys of `trl` that start with `is_` describe the importance ratio that its trainer makes."""

    trl: dict[str, Any]
    paceline: dict[str, Any]
    empty_has_a_loss: bool = False
    """TRL gives an empty completion the ratio exp(0) = 1 and so the constant loss -A, without a gradient."""


NO_WEIGHT = {"truncated_importance_sampling_ratio": None}
CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
OUR_CLIP = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28}
NARROW = {"epsilon": 3e-4, "epsilon_high": 4e-4}
LUSPO = {"epsilon": 2e-3, "epsilon_high": 2.5e-3}

CASES: dict[str, Case] = {
    **{
        f"{name}, clip-higher": Case({"loss_type": name, **CLIP}, {"reduction": name, **OUR_CLIP, **NO_WEIGHT})
        for name in ("grpo", "dapo", "dr_grpo", "bnpo")
    },
    "dual clip (delta)": Case(
        {"loss_type": "dapo", **CLIP, "delta": 1.6}, {**OUR_CLIP, "ratio_clip_c": 1.6, **NO_WEIGHT}
    ),
    "gspo": Case(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", **NARROW},
        {"preset": "gspo", **NO_WEIGHT},
    ),
    "gspo, wide clip": Case(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", **CLIP},
        {"preset": "gspo", **OUR_CLIP, **NO_WEIGHT},
    ),
    "luspo": Case(
        {"loss_type": "luspo", "importance_sampling_level": "sequence", **LUSPO},
        {"preset": "luspo", **NO_WEIGHT},
    ),
    "luspo, wide clip": Case(
        {"loss_type": "luspo", "importance_sampling_level": "sequence", **CLIP},
        {"preset": "luspo", **OUR_CLIP, **NO_WEIGHT},
    ),
    "cispo": Case({"loss_type": "cispo", "epsilon_high": 5.0}, {"preset": "cispo", **NO_WEIGHT}),
    "sapo": Case({"loss_type": "sapo"}, {"preset": "sapo", **NO_WEIGHT}),
    "vespo": Case({"loss_type": "vespo"}, {"preset": "vespo", **NO_WEIGHT}),
    "vespo, token weights": Case(
        {"loss_type": "vespo", "is_mode": "token_truncate", "is_max": 2.0}, {"preset": "vespo"}
    ),
    "token truncation": Case({"loss_type": "dapo", "is_mode": "token_truncate", "is_max": 2.0}, {}),
    "token mask (IcePop)": Case(
        {"loss_type": "grpo", "is_mode": "token_mask", "is_max": 5.0, "is_min": 0.5}, {"preset": "icepop"}
    ),
    "sequence truncation": Case(
        {"loss_type": "dapo", "is_mode": "sequence_truncate", "is_max": 3.0},
        {
            "truncated_importance_sampling_type": "sequence_tis",
            "truncated_importance_sampling_ratio": 3.0,
        },
    ),
    "sequence mask": Case(
        {"loss_type": "dapo", "is_mode": "sequence_mask", "is_max": 3.0},
        {
            "truncated_importance_sampling_type": "sequence_mask",
            "truncated_importance_sampling_ratio": 3.0,
        },
    ),
    "r·k3": Case(
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
        {"reduction": "grpo", "reference_policy_kl_penalty": 0.1, **NO_WEIGHT},
    ),
    "off-policy mask": Case(
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.3},
        {"off_policy_mask_threshold": 0.3, **NO_WEIGHT},
    ),
    "entropy bonus": Case({"loss_type": "dapo", "entropy_coef": 0.05}, {"entropy_bonus": 0.05, **NO_WEIGHT}),
    "rloo": Case({"trainer": "rloo", **CLIP}, {"preset": "rloo", **OUR_CLIP, **NO_WEIGHT}, True),
}
