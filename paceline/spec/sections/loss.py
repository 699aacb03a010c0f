"""`loss_fn`: the objective of `algorithm: grpo`, with presets named after the paper that proposed them. Promise: a
preset only fills in keys that the spec leaves out, so the resolved spec shows every value and a user's setting takes
precedence. Formulas and sources: docs/use/objectives.md."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field, model_validator

from paceline.spec.sections.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section, Usual

PresetName = Literal[
    "grpo", "dr_grpo", "dapo", "bnpo", "gspo", "luspo", "cispo", "sapo", "vespo", "dppo", "rloo",
    "reinforce_pp", "reinforce_pp_baseline", "decoupled_ppo", "icepop", "m2po", "ppo",
]  # fmt: skip


class Preset(NamedTuple):
    """Values for keys that the spec leaves out."""

    loss_fn: dict[str, Any]
    grpo: dict[str, Any]


def _preset(reduction: str, advantage: str, use_dynamic_sampling: bool | None = None, **loss_fn: Any) -> Preset:
    sampling = {} if use_dynamic_sampling is None else {"use_dynamic_sampling": use_dynamic_sampling}
    return Preset({"reduction": reduction, **loss_fn}, {"advantage": advantage, **sampling})


_KL_IN_REWARD: dict[str, Any] = {"reference_policy_kl_type": "k1", "use_kl_in_reward": True}
_AT_SAMPLER: dict[str, Any] = {"ratio_anchor": "behaviour", "truncated_importance_sampling_ratio": None}
_ICEPOP: dict[str, Any] = {"truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": 5.0}

PRESETS: dict[PresetName, Preset] = {
    "grpo": _preset("grpo", "trl"),
    "dr_grpo": _preset("dr_grpo", "dr_grpo"),
    "dapo": _preset("dapo", "trl", use_dynamic_sampling=True, ratio_clip_min=0.2, ratio_clip_max=0.28),
    "bnpo": _preset("bnpo", "trl"),
    "gspo": _preset("grpo", "trl", ratio_level="sequence", ratio_clip_min=3e-4, ratio_clip_max=4e-4),
    "luspo": _preset("sequence_sum", "trl", ratio_level="sequence", ratio_clip_min=2e-3, ratio_clip_max=2.5e-3),
    # ScaleRL recommends no lower bound and 5 as the upper one.
    "cispo": _preset("dapo", "trl", policy_loss="cispo", ratio_clip_min=1.0, ratio_clip_max=4.0),
    "sapo": _preset("grpo", "trl", policy_loss="sapo"),
    "vespo": _preset("dapo", "trl", policy_loss="vespo"),
    "dppo": _preset("dapo", "dr_grpo", policy_loss="dppo", **_AT_SAMPLER),
    "rloo": _preset("grpo", "rloo", ratio_level="sequence_product", reference_policy_kl_penalty=0.05, **_KL_IN_REWARD),
    "reinforce_pp": _preset("dapo", "reinforce_pp", reference_policy_kl_penalty=0.01, **_KL_IN_REWARD),
    "reinforce_pp_baseline": _preset("dapo", "reinforce_pp_baseline"),
    # AReaL drops the tokens whose weight is above its cap.
    "decoupled_ppo": _preset("dapo", "trl", **_ICEPOP),
    "icepop": _preset("grpo", "trl", truncated_importance_sampling_ratio_min=0.5, **_ICEPOP),
    "m2po": _preset("dapo", "trl", policy_loss="unclipped", m2_threshold=0.04, **_AT_SAMPLER),
    "ppo": _preset("dapo", "gae"),
}


def preset_of(loss_fn: Any) -> Preset | None:
    name: Any = loss_fn.get("preset") if isinstance(loss_fn, dict) else None
    return PRESETS[name] if name in get_args(PresetName) else None


class LossSection(Section):
    """The policy loss: a ratio, a function of ratio and advantage, the correction for the sampler's age, penalties, and
    the reduction (docs/use/objectives.md has the formulas)."""

    preset: PresetName | None = None
    """A paper's settings for the keys of loss_fn and grpo that the spec leaves out."""
    policy_loss: Literal["clip", "unclipped", "cispo", "sapo", "dppo", "vespo"] = "clip"
    """Function of ratio and advantage: `clip` (PPO, GRPO; GSPO by ratio_level), `unclipped`, or a paper's, by name."""
    ratio_anchor: Literal["proximal", "behaviour"] = "proximal"
    """Policy in the denominator of the ratio: the learner at the start of the step (`proximal`), or the sampler
    (`behaviour`). With one update per step the proximal ratio is 1, so no clip acts."""
    ratio_level: Literal["token", "sequence", "sequence_product"] = "token"
    """`token`: one ratio per token. `sequence`: one per sequence, the geometric mean of its tokens' ratios.
    `sequence_product`: one per sequence, their product."""
    proximal_policy: Literal["exact", "log_linear"] = "exact"
    """Log-probabilities of the proximal policy: `exact` runs the model before the first of several updates;
    `log_linear` interpolates by the token's version."""
    ratio_clip_min: Annotated[float, Field(ge=0, le=1)] = 0.2
    """ε: the ratio is clipped from below at 1 - ε; 1 is no bound."""
    ratio_clip_max: Annotated[NonNegativeFloat, Usual(0, 10, "0.2 in verl, 0.28 in arXiv:2503.14476")] = 0.2
    """ε_high: the ratio is clipped from above at 1 + ε_high."""
    ratio_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Constant c of the dual clip, which also bounds the ratio for negative advantages."""
    sapo_temperature_pos: PositiveFloat = 1.0
    """τ for positive advantages (`sapo`)."""
    sapo_temperature_neg: PositiveFloat = 1.05
    """τ for other advantages (`sapo`)."""
    dppo_mask_low: PositiveFloat = 0.2
    """A token with a negative advantage is dropped once its probability fell by more than this (`dppo`)."""
    dppo_mask_high: PositiveFloat = 0.2
    """A token with a positive advantage is dropped once its probability rose by more than this (`dppo`)."""
    dppo_square_penalty: NonNegativeFloat = 1e-3
    """Weight of (log r)² (`dppo`)."""
    vespo_k_pos: PositiveFloat = 2.0
    """Exponent of the sequence weight for advantages of at least 0 (`vespo`)."""
    vespo_lambda_pos: PositiveFloat = 3.0
    """Decay of the sequence weight for advantages of at least 0 (`vespo`)."""
    vespo_k_neg: PositiveFloat = 3.0
    """Exponent of the sequence weight for negative advantages (`vespo`)."""
    vespo_lambda_neg: PositiveFloat = 2.0
    """Decay of the sequence weight for negative advantages (`vespo`)."""
    reduction: Literal["grpo", "dapo", "dr_grpo", "bnpo", "sequence_sum"] = "dapo"
    """Reduction of token losses to one number, always over the global batch (`bnpo` excepted)."""
    reference_policy_kl_penalty: Annotated[NonNegativeFloat, Usual(0, 1, "0.04 in arXiv:2402.03300")] = 0.0
    """β: weight of the KL to the reference policy; 0 loads no reference."""
    reference_policy_sync_steps: PositiveInt | None = None
    """Steps between two mixes of the policy into the reference; unset: the reference stays as before training."""
    reference_policy_sync_mix: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of the policy in the synchronised reference: reference = mix · policy + (1 - mix) · reference."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL to the reference policy; `k1` in the loss has no gradient and is refused with β > 0."""
    reference_policy_pool: Literal["learner", "reward"] = "learner"
    """Processes that run the reference policy: the learner in every step; or, in its place, the reward workers once for
    every group, each with a copy of the reference."""
    use_kl_in_reward: bool = False
    """Subtract β·KL from the reward instead of adding it to the loss."""
    entropy_bonus: Annotated[NonNegativeFloat, Usual(0, 0.1, "0.001 in verl")] = 0.0
    """Weight of the mean entropy per token, which the loss rewards."""
    truncated_importance_sampling_ratio: Annotated[
        PositiveFloat | None, Usual(1, 100, "2, as in docs/use/objectives.md")
    ] = 2.0
    """Upper bound of the proximal/behaviour weight that corrects for the sampler's older weights; null: no weight."""
    truncated_importance_sampling_ratio_min: NonNegativeFloat = 0.0
    """Lower bound of the proximal/behaviour weight."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "sequence_tis", "sequence_mask"] = "tis"
    """Treatment of weights outside the bounds: `tis` clips a token's weight, `icepop` drops the token; `sequence_tis`
    and `sequence_mask` do the same with the product over the sequence."""
    geometric_mask: tuple[PositiveFloat, PositiveFloat] | None = None
    """Drop sequences whose geometric mean of proximal/behaviour ratios is outside (low, high)."""
    veto: tuple[PositiveFloat, PositiveFloat] | None = None
    """Drop sequences with any proximal/behaviour ratio outside (low, high)."""
    m2_threshold: PositiveFloat | None = None
    """M2PO: drop the tokens with the largest squared log proximal/behaviour ratio until the mean of these squares is at
    most this."""
    off_policy_mask_threshold: PositiveFloat | None = None
    """Drop sequences with a negative advantage whose mean log behaviour/current ratio exceeds this."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        preset = preset_of(values)
        return {**preset.loss_fn, **values} if preset else values

    @model_validator(mode="after")
    def _check(self) -> LossSection:
        self._check_anchor()
        self._check_ratio()
        for name in ("geometric_mask", "veto"):
            bounds = getattr(self, name)
            if bounds is not None and bounds[0] >= bounds[1]:
                raise ValueError(f"{name} is {bounds}: the lower bound must be below the upper one")
        cap, floor = self.truncated_importance_sampling_ratio, self.truncated_importance_sampling_ratio_min
        if cap is not None and floor >= cap:
            raise ValueError(
                f"truncated_importance_sampling_ratio_min {floor} is not below "
                f"truncated_importance_sampling_ratio {cap}"
            )
        kind = self.truncated_importance_sampling_type
        if cap is None and (kind != "tis" or floor):
            raise ValueError(
                f"truncated_importance_sampling_type {kind!r} and truncated_importance_sampling_ratio_min {floor} with "
                "truncated_importance_sampling_ratio null: without an upper bound there is no weight for them to act on; "
                "set the ratio, or leave them out"
            )
        if self.reference_policy_pool == "reward" and self.reference_policy_kl_penalty == 0:
            raise ValueError(
                "reference_policy_pool is 'reward' with reference_policy_kl_penalty 0: there is no reference; set the "
                "penalty, or leave the pool out"
            )
        if self.reference_policy_sync_steps is not None:
            self._check_sync(self.reference_policy_sync_steps)
        if self.use_kl_in_reward and self.reference_policy_kl_penalty == 0:
            raise ValueError(
                "use_kl_in_reward is true with reference_policy_kl_penalty 0: there is no KL to subtract; set the penalty"
            )
        in_loss = self.reference_policy_kl_penalty > 0 and not self.use_kl_in_reward
        if in_loss and self.reference_policy_kl_type == "k1":
            raise ValueError(
                f"reference_policy_kl_type is 'k1' with reference_policy_kl_penalty "
                f"{self.reference_policy_kl_penalty}: k1 in the loss has no gradient on average; use k2 or k3, or "
                "set use_kl_in_reward"
            )
        return self

    def _check_sync(self, steps: int) -> None:
        if self.reference_policy_kl_penalty == 0:
            raise ValueError(
                f"reference_policy_sync_steps {steps} with reference_policy_kl_penalty 0: there is no reference to "
                "synchronise; set the penalty, or leave reference_policy_sync_steps out"
            )
        if self.reference_policy_pool == "reward":
            raise ValueError(
                f"reference_policy_sync_steps {steps} with reference_policy_pool 'reward': the reward workers do not get the "
                "policy's weights, so their reference never changes; set reference_policy_pool=learner"
            )

    def _check_anchor(self) -> None:
        if self.policy_loss == "dppo" and self.ratio_anchor != "behaviour":
            raise ValueError(
                f"policy_loss 'dppo' with ratio_anchor {self.ratio_anchor!r}: its trust region is around the sampler; "
                "set ratio_anchor=behaviour"
            )
        if self.m2_threshold is not None and self.proximal_policy != "exact":
            raise ValueError(
                f"m2_threshold {self.m2_threshold} with proximal_policy {self.proximal_policy!r}: the threshold is "
                "taken before the first update, from the exact proximal policy; set proximal_policy=exact"
            )
        if self.ratio_anchor == "proximal":
            return
        if self.truncated_importance_sampling_ratio is not None:
            raise ValueError(
                f"ratio_anchor 'behaviour' with truncated_importance_sampling_ratio "
                f"{self.truncated_importance_sampling_ratio}: the ratio already corrects for the sampler, and an "
                "importance weight would correct a second time; set truncated_importance_sampling_ratio=null"
            )
        if self.ratio_level != "token":
            raise ValueError(
                f"ratio_anchor 'behaviour' with ratio_level {self.ratio_level!r}: the numerical noise of a whole "
                "sequence puts nearly every ratio outside the clip; set ratio_anchor=proximal"
            )
        if self.policy_loss == "vespo":
            raise ValueError(
                "policy_loss 'vespo' with ratio_anchor 'behaviour': vespo itself multiplies the proximal ratio "
                "and the importance weight; set ratio_anchor=proximal"
            )
        if self.proximal_policy != "exact":
            raise ValueError(
                f"ratio_anchor 'behaviour' with proximal_policy {self.proximal_policy!r}: the ratio does "
                "not use the proximal policy, so this setting would have no effect; set proximal_policy=exact"
            )

    def _check_ratio(self) -> None:
        if self.policy_loss != "clip" and self.ratio_level != "token":
            raise ValueError(
                f"policy_loss {self.policy_loss!r} with ratio_level {self.ratio_level!r}: only 'clip' is defined on "
                "ratios of sequences; set ratio_level=token"
            )
        if self.ratio_clip_c is not None:
            if self.policy_loss != "clip":
                raise ValueError(
                    f"ratio_clip_c {self.ratio_clip_c} with policy_loss {self.policy_loss!r}, which ignores it"
                )
            if self.ratio_clip_c <= 1 + self.ratio_clip_max:
                raise ValueError(
                    f"ratio_clip_c {self.ratio_clip_c} is not above 1 + ratio_clip_max = {1 + self.ratio_clip_max}"
                )
        weight = self.truncated_importance_sampling_type
        if self.policy_loss == "vespo" and weight in ("sequence_tis", "sequence_mask"):
            raise ValueError(
                f"policy_loss 'vespo' with truncated_importance_sampling_type {weight!r}: vespo itself multiplies "
                "the weights of the tokens; use 'tis' or 'icepop'"
            )
