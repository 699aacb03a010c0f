"""`grpo` and `async_grpo`: making groups, the number of steps, and the bound on staleness."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from paceline.spec.sections.algorithm import AlgorithmSection, steps_left_to_epochs
from paceline.spec.sections.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from paceline.spec.sections.loss import LossSection
from paceline.spec.sections.policy import PolicySection

AdvantageName = Literal[
    "trl", "nemo", "dr_grpo", "rloo", "trl_batch", "gdpo", "reinforce_pp", "reinforce_pp_baseline", "gae"
]

WITHOUT_GROUP = ("gae", "reinforce_pp")
"""Advantages that do not compare the completions of a group."""

WITH_GROUP_BASELINE = ("trl", "nemo", "dr_grpo", "rloo")
"""Advantages that need nothing but the rewards of the group."""


class GrpoSection(AlgorithmSection):
    """Making of groups and number of training steps (`algorithm: grpo`)."""

    samples: ClassVar[bool] = True

    num_prompts_per_step: PositiveInt = 32
    """Groups in the batch of one step."""
    num_generations_per_prompt: PositiveInt = 8
    """Completions of each prompt; the advantage is relative to this group (`gae` and `reinforce_pp`: need no group)."""
    max_num_steps: PositiveInt = 100
    """Steps to train before the run ends."""
    max_num_epochs: PositiveFloat | None = None
    """Passes over the training data after which the run ends, if max_num_steps does not end it before; the number of steps
    is resolved when the run is submitted. Where max_num_steps is not set, the epochs alone decide."""
    advantage: AdvantageName = "trl"
    """Advantage preset: `trl` group mean and sample std, `nemo` leave-one-out, `dr_grpo` no std, `rloo`; `trl_batch`
    std of the batch, `gdpo` each reward normalised by itself, `reinforce_pp` and `reinforce_pp_baseline`; `gae` from a
    value model (`value`)."""
    advantage_clip_low: float | None = None
    """Advantages below this are raised to it."""
    advantage_clip_high: float | None = None
    """Advantages above this are lowered to it."""
    overlong_filtering: bool = False
    """A completion cut off at its token limit trains nothing; its reward stays in the group's baseline."""
    use_dynamic_sampling: bool = False
    """Drop groups whose rewards give no completion an advantage, as where all are equal, and admit others in their place."""
    max_generation_batches: PositiveInt = 10
    """Pause when this many batches' worth of groups in a row were dropped without one that could train; two batches'
    worth are enough for failures of one cause."""
    max_generation_failures: PositiveInt = 3
    """Attempts at generating a group that may fail by an unforeseen error before it is dropped; those that a worker, the
    network or the coordinator ended do not count, and a prompt that is too long or that the template refuses is dropped
    at once."""
    max_score_failures: PositiveInt = 3
    """Attempts at scoring a group that may fail by the fault of its data or of a reward function before it is
    dropped; those that fail because a service could not be reached do not count, and a failure that every attempt would
    repeat (a column that is missing) drops it at once."""
    val_period: NonNegativeInt = 0
    """Evaluate every this many steps; 0 evaluates only where val_at_start and val_at_end say so."""
    val_at_start: bool = False
    """Evaluate version 0 before training."""
    val_at_end: bool = False
    """Evaluate the final version."""
    max_val_samples: PositiveInt = 256
    """Prompts of the validation set that one evaluation uses, from its start."""
    val_samples_per_prompt: PositiveInt = 1
    """Completions of each prompt in an evaluation: rewards are means over them, and functions with values 0 and 1 also
    get pass@k."""
    seed: NonNegativeInt = 42
    """Seeds the order of the data, the sampling and the initialisation."""

    @model_validator(mode="before")
    @classmethod
    def _leave_the_end_to_epochs(cls, values: Any) -> Any:
        return steps_left_to_epochs(values)

    @property
    def uses_value_model(self) -> bool:
        """Return whether the learner trains a value model beside the policy (PPO)."""
        return self.advantage == "gae"

    def frozen_policy(self, policy: PolicySection, loss_fn: LossSection) -> PolicySection | None:
        """Return the policy before training, for a KL penalty; None without one."""
        return policy if loss_fn.reference_policy_kl_penalty > 0 else None

    def pool_serves_reference(self, loss_fn: LossSection) -> bool:
        """Return whether there is a reference and loss_fn.reference_policy_pool assigns it to the reward pool."""
        return loss_fn.reference_policy_kl_penalty > 0 and loss_fn.reference_policy_pool == "reward"

    @model_validator(mode="after")
    def _check(self) -> GrpoSection:
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and low >= high:
            raise ValueError(f"advantage_clip_low {low} is not below advantage_clip_high {high}")
        if (low or 0.0) > 0 or (high or 0.0) < 0:
            raise ValueError(
                f"advantage_clip_low {low} and advantage_clip_high {high} leave out 0, so completions without a reward or a "
                "difference would train; take bounds around 0"
            )
        if self.num_generations_per_prompt == 1 and self.advantage not in WITHOUT_GROUP:
            raise ValueError(
                f"num_generations_per_prompt 1 with advantage {self.advantage!r}: a completion alone has nothing to be "
                f"compared with; take 2 or more, or advantage {' or '.join(WITHOUT_GROUP)}"
            )
        return self


class AsyncGrpoSection(Section):
    """Bound on how far generation may run ahead of training."""

    max_trajectory_age_steps: NonNegativeInt = 1
    """η: age in steps that leases and batches aim for; 0 is synchronous, on-policy GRPO. `in_order` trains no older token,
    `ready_first` trains late groups up to `hard_max_age`."""
    order: Literal["ready_first", "in_order"] = "ready_first"
    """`ready_first` trains what is complete, oldest first; `in_order` gives every lease a slot in its step."""
    late_wait_s: NonNegativeFloat = 30.0
    """Seconds that a batch waits for a live group that would pass the age limit (`ready_first`)."""
    hard_max_age: NonNegativeInt | None = None
    """A late group still trains up to this age, else it is dropped as stale; default 2·η + 2."""
    in_flight_weight_updates: bool = True
    """Change weights between two decode steps of running sequences; false waits for them to finish."""
    recompute_kv_cache_after_weight_updates: bool | PositiveInt = True
    """Recompute the KV cache of running sequences with the new weights: true at every update of an engine, a number once keys and
    values are from so many updates before, false never."""

    @property
    def recompute_after_updates(self) -> int | None:
        """Return the updates after which keys and values of running sequences are computed again; None: never."""
        after = self.recompute_kv_cache_after_weight_updates
        return int(after) or None

    @property
    def hard_max_age_steps(self) -> int:
        """Return the largest age at which a late group still trains."""
        return 2 * self.max_trajectory_age_steps + 2 if self.hard_max_age is None else self.hard_max_age
