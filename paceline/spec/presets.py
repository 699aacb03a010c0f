"""Settings of `loss_fn` and `grpo` by the name of the paper that proposed them (`loss_fn.preset`).

Promise: a preset only fills in what the spec leaves out, so the resolved spec shows every value and a setting of the
user's always wins. Formulas and sources: docs/objectives.md.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

PresetName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "bnpo",
    "gspo",
    "luspo",
    "cispo",
    "sapo",
    "vespo",
    "dppo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "decoupled_ppo",
    "icepop",
    "m2po",
    "ppo",
]


class Preset(NamedTuple):
    """Values for keys that the spec leaves out."""

    loss_fn: dict[str, Any]
    grpo: dict[str, Any]


_GROUP_STD = {"advantage": "trl"}
_NO_WEIGHT = {"truncated_importance_sampling_ratio": None}

PRESETS: dict[PresetName, Preset] = {
    "grpo": Preset({"reduction": "grpo"}, _GROUP_STD),
    "dr_grpo": Preset({"reduction": "dr_grpo"}, {"advantage": "dr_grpo"}),
    "dapo": Preset(
        {"reduction": "dapo", "ratio_clip_min": 0.2, "ratio_clip_max": 0.28},
        {**_GROUP_STD, "use_dynamic_sampling": True},
    ),
    "bnpo": Preset({"reduction": "bnpo"}, _GROUP_STD),
    "gspo": Preset(
        {
            "ratio_level": "sequence",
            "ratio_clip_min": 3e-4,
            "ratio_clip_max": 4e-4,
            "reduction": "grpo",
        },
        _GROUP_STD,
    ),
    "luspo": Preset(
        {
            "ratio_level": "sequence",
            "ratio_clip_min": 2e-3,
            "ratio_clip_max": 2.5e-3,
            "reduction": "sequence_sum",
        },
        _GROUP_STD,
    ),
    # No lower bound and 5 as the upper one, as ScaleRL recommends.
    "cispo": Preset(
        {"policy_loss": "cispo", "ratio_clip_min": 1.0, "ratio_clip_max": 4.0, "reduction": "dapo"},
        _GROUP_STD,
    ),
    "sapo": Preset({"policy_loss": "sapo", "reduction": "grpo"}, _GROUP_STD),
    "vespo": Preset({"policy_loss": "vespo", "reduction": "dapo"}, _GROUP_STD),
    "dppo": Preset(
        {"policy_loss": "dppo", "ratio_anchor": "behaviour", "reduction": "dapo", **_NO_WEIGHT},
        {"advantage": "dr_grpo"},
    ),
    "rloo": Preset(
        {
            "ratio_level": "sequence_product",
            "reduction": "grpo",
            "reference_policy_kl_penalty": 0.05,
            "reference_policy_kl_type": "k1",
            "use_kl_in_reward": True,
        },
        {"advantage": "rloo"},
    ),
    "reinforce_pp": Preset(
        {
            "reduction": "dapo",
            "reference_policy_kl_penalty": 0.01,
            "reference_policy_kl_type": "k1",
            "use_kl_in_reward": True,
        },
        {"advantage": "reinforce_pp"},
    ),
    "reinforce_pp_baseline": Preset({"reduction": "dapo"}, {"advantage": "reinforce_pp_baseline"}),
    # AReaL drops the tokens whose weight is above its cap.
    "decoupled_ppo": Preset(
        {
            "reduction": "dapo",
            "truncated_importance_sampling_type": "icepop",
            "truncated_importance_sampling_ratio": 5.0,
        },
        _GROUP_STD,
    ),
    "icepop": Preset(
        {
            "reduction": "grpo",
            "truncated_importance_sampling_type": "icepop",
            "truncated_importance_sampling_ratio": 5.0,
            "truncated_importance_sampling_ratio_min": 0.5,
        },
        _GROUP_STD,
    ),
    "m2po": Preset(
        {
            "policy_loss": "unclipped",
            "ratio_anchor": "behaviour",
            "m2_threshold": 0.04,
            "reduction": "dapo",
            **_NO_WEIGHT,
        },
        _GROUP_STD,
    ),
    "ppo": Preset({"reduction": "dapo"}, {"advantage": "gae"}),
}
