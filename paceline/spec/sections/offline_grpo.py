"""`offline_grpo`: the policy loss on recorded completions with rewards, without sampling."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from paceline.spec.sections.base import PositiveInt
from paceline.spec.sections.loss import LossSection
from paceline.spec.sections.policy import PolicySection
from paceline.spec.sections.supervised import ExampleForm, ExamplesSection


class OfflineGrpoSection(ExamplesSection):
    """GRPO on traces (`algorithm: offline_grpo`): an example is a prompt with all its recorded completions. Its loss is
    `loss_fn`'s, at the temperature `policy.generation.temperature`."""

    example_form: ClassVar[ExampleForm] = "traces"
    uses_policy_loss: ClassVar[bool] = True

    advantage: Literal["trl", "nemo", "dr_grpo", "rloo"] = "trl"
    """Advantage of a completion relative to the others of its prompt, as `grpo.advantage`."""
    reward_keys: tuple[str, ...] = ()
    """Columns whose sum is the reward; empty: `final_reward`, or all reward functions of TRL's completions."""
    min_reward_threshold: float | None = None
    """Traces with a smaller reward are left out, before they are compared."""
    max_traces_per_group: PositiveInt = Field(default=64, ge=2)
    """A prompt with more traces is several examples of at most so many."""

    def frozen_policy(self, policy: PolicySection, loss_fn: LossSection) -> PolicySection | None:
        """Return the policy before training, for a KL penalty; None without one."""
        return policy if loss_fn.reference_policy_kl_penalty > 0 else None

    def check_with(self, loss_fn: LossSection) -> None:
        """Raise ValueError for settings of the loss that traces have no values for."""
        refused = {
            "proximal_policy": ("exact", "traces have no ages"),
            "use_kl_in_reward": (False, "advantages are those of the recorded rewards"),
            "reference_policy_pool": ("learner", "no reward worker takes part"),
            "reference_policy_sync_steps": (None, "the reference is the policy before training"),
        }
        for key, (allowed, why) in refused.items():
            value = getattr(loss_fn, key)
            if value != allowed:
                raise ValueError(
                    f"loss_fn.{key} {value!r} with algorithm 'offline_grpo': {why}; leave it at {allowed!r}"
                )
