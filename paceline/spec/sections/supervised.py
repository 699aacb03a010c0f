"""`sft`, `dpo`, `kto`, `orpo`, `rm`: training on a data set's examples, without sampling.

`offline_grpo`: the policy loss on recorded completions with rewards, without sampling.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from paceline.spec.sections.algorithm import AlgorithmSection, steps_left_to_epochs
from paceline.spec.sections.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from paceline.spec.sections.loss import LossSection
from paceline.spec.sections.policy import PolicySection

ExampleForm = Literal["demonstration", "preference", "labeled_completion", "traces"]


class ExamplesSection(AlgorithmSection):
    """Settings of every algorithm that reads examples: their number, the number of steps, and the evaluation on
    held-out examples."""

    samples: ClassVar[bool] = False
    example_form: ClassVar[ExampleForm]
    """Form of a row of the data set (`paceline.data.example_rows`)."""
    reads_conversations: ClassVar[bool] = False
    """True if data.messages_key may name whole conversations."""

    max_num_steps: PositiveInt = 100
    """Steps to train before the run ends."""
    max_num_epochs: PositiveFloat | None = None
    """Passes over the training data after which the run ends, if max_num_steps does not end it before; the number of steps
    is resolved when the run is submitted. Where max_num_steps is not set, the epochs alone decide."""
    num_examples_per_step: PositiveInt = 32
    """Examples in the batch of one step; a prompt with its chosen and rejected completions is one example."""
    seed: NonNegativeInt = 42
    """Seed of the order of the data and of a new head."""
    val_period: NonNegativeInt = 0
    """Measure the held-out examples every this many steps; 0: only where val_at_start and val_at_end say so."""
    val_at_start: bool = False
    """Measure them before training."""
    val_at_end: bool = False
    """Measure them after the last step."""
    max_val_samples: PositiveInt = 256
    """Examples of the validation set that one measurement uses, from its start."""

    @model_validator(mode="before")
    @classmethod
    def _leave_the_end_to_epochs(cls, values: Any) -> Any:
        return steps_left_to_epochs(values)

    @property
    def validates(self) -> bool:
        """Return whether held-out examples are measured at all."""
        return bool(self.val_period or self.val_at_start or self.val_at_end)

    def val_due(self, trained_steps: int) -> bool:
        """Return whether they are measured after this many trained steps."""
        if trained_steps == 0:
            return self.val_at_start
        if trained_steps == self.max_num_steps and self.val_at_end:
            return True
        return bool(self.val_period) and trained_steps % self.val_period == 0


class SftSection(ExamplesSection):
    """Supervised fine-tuning (`algorithm: sft`)."""

    example_form: ClassVar[ExampleForm] = "demonstration"
    reads_conversations: ClassVar[bool] = True
    compares_policies: ClassVar[bool] = False

    loss_mask: Literal["completion", "assistant"] = "completion"
    """`completion` trains the text after the prompt (of a conversation: its last message), `assistant` every message
    of the assistant (data.messages_key)."""


class DpoSection(ExamplesSection):
    """Direct preference optimisation (`algorithm: dpo`)."""

    example_form: ClassVar[ExampleForm] = "preference"

    reference_policy_kl_penalty: PositiveFloat = 0.05
    """β: weight that holds the policy to the reference."""
    preference_loss: Literal["sigmoid", "conservative", "robust", "hinge", "ipo"] = "sigmoid"
    """Function of the difference of the two log-ratios (docs/objectives.md)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """ε: the chance that a label is flipped (`conservative`, `robust`)."""
    preference_loss_weight: PositiveFloat = 1.0
    """Factor of the preference loss."""
    sft_loss_weight: NonNegativeFloat = 0.0
    """Factor of the chosen completions' negative log-likelihood; 0 leaves it out."""
    preference_average_log_probs: bool = False
    """Divide each log-ratio by its completion's length (`ipo` always does)."""
    sft_average_log_probs: bool = False
    """Divide each completion's negative log-likelihood by its length."""
    precompute: bool = False
    """Compute the reference once, for the whole data set, before training; then it needs no memory."""

    @property
    def precomputes_reference(self) -> bool:
        """Return whether `precompute` is set."""
        return self.precompute

    def frozen_policy(self, policy: PolicySection, loss_fn: LossSection) -> PolicySection:
        """Return the policy as it was."""
        return policy

    @model_validator(mode="after")
    def _check(self) -> DpoSection:
        if self.label_smoothing and self.preference_loss not in ("conservative", "robust"):
            raise ValueError(
                f"label_smoothing {self.label_smoothing} with preference_loss {self.preference_loss!r}, which has "
                "none; use conservative or robust"
            )
        return self


class KtoSection(ExamplesSection):
    """Kahneman-Tversky optimisation of single completions, good or bad (`algorithm: kto`)."""

    example_form: ClassVar[ExampleForm] = "labeled_completion"

    reference_policy_kl_penalty: PositiveFloat = 0.1
    """β: weight that holds the policy to the reference."""
    desirable_weight: PositiveFloat = 1.0
    """Factor of the good completions' loss."""
    undesirable_weight: PositiveFloat = 1.0
    """Factor of the bad completions' loss."""
    precompute: bool = False
    """Compute the reference once, for all examples that the run will read, before training; then it needs no memory."""

    @property
    def precomputes_reference(self) -> bool:
        """Return whether `precompute` is set."""
        return self.precompute

    def frozen_policy(self, policy: PolicySection, loss_fn: LossSection) -> PolicySection:
        """Return the policy as it was."""
        return policy

    @model_validator(mode="after")
    def _check(self) -> KtoSection:
        if self.num_examples_per_step < 2:
            raise ValueError(
                f"num_examples_per_step {self.num_examples_per_step}: KTO's KL is measured on completions of other "
                "prompts of the batch, so it takes at least 2"
            )
        return self


class OrpoSection(ExamplesSection):
    """Odds-ratio preference optimisation, without a reference (`algorithm: orpo`)."""

    example_form: ClassVar[ExampleForm] = "preference"

    odds_ratio_weight: PositiveFloat = 0.1
    """β (λ in the paper): factor of the odds-ratio term beside the chosen completions' likelihood."""


class RmSection(ExamplesSection):
    """A reward model: one score for a prompt with a completion (`algorithm: rm`)."""

    example_form: ClassVar[ExampleForm] = "preference"
    scoring_head: ClassVar[bool] = True

    centring: NonNegativeFloat = 0.01
    """Factor of (r_chosen + r_rejected)², which keeps scores around 0."""


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
