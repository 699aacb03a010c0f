"""Sections of the algorithms, and `async_grpo`: groups or examples, number of steps, evaluation, and the reference.
Properties of an algorithm are declared in its section, so that no other module depends on its name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from paceline.spec.sections.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Usual
from paceline.spec.sections.loss import LossSection
from paceline.spec.sections.policy import PolicySection

NO_LIMIT_OF_STEPS = 1_000_000_000
"""Value of max_num_steps until the epochs are converted to steps."""


class AlgorithmSection(Section):
    """Settings of one algorithm. The defaults are for an algorithm without a reference."""

    samples: ClassVar[bool]
    """True if the algorithm trains on rollouts, false if on examples of a data set."""
    scoring_head: ClassVar[bool] = False
    """True if the model has a scoring head instead of the LM head."""
    compares_policies: ClassVar[bool] = True
    """True if the loss compares the policy with another model, so that both must compute without dropout."""
    uses_policy_loss: ClassVar[bool] = False
    """True if the algorithm trains on examples of a data set with the policy loss (`loss_fn`)."""
    has_teacher: ClassVar[bool] = False
    """True if `frozen_policy` is a different model from the policy."""
    reference: ClassVar[Literal["never", "with_penalty", "always"]] = "never"
    """When the policy before training is the `frozen_policy`: never, only if `loss_fn` has a KL penalty, or always."""

    @model_validator(mode="before")
    @classmethod
    def _leave_the_end_to_epochs(cls, values: Any) -> Any:
        """Set no limit of steps if max_num_epochs is set and max_num_steps is not."""
        has_epochs = "max_num_epochs" in cls.model_fields and isinstance(values, dict)
        if has_epochs and values.get("max_num_epochs") is not None:
            return {"max_num_steps": NO_LIMIT_OF_STEPS, **values}
        return values

    @property
    def uses_value_model(self) -> bool:
        """Return whether the learner also trains a value model."""
        return False

    @property
    def precomputes_reference(self) -> bool:
        """Return whether the reference is computed once for the whole data set, before training."""
        return bool(getattr(self, "precompute", False))

    def frozen_policy(self, policy: PolicySection, loss_fn: LossSection) -> PolicySection | None:
        """Return the model compared with the policy: a teacher, or the policy before training; None without one."""
        has_penalty = self.reference == "with_penalty" and loss_fn.reference_policy_kl_penalty > 0
        return policy if has_penalty or self.reference == "always" else None

    def pool_serves_reference(self, loss_fn: LossSection) -> bool:
        """Return whether the reward pool runs `frozen_policy`, which then sends log-probabilities with the batch."""
        return False


AdvantageName = Literal[
    "trl", "nemo", "dr_grpo", "rloo", "trl_batch", "gdpo", "reinforce_pp", "reinforce_pp_baseline", "gae"
]

WITHOUT_GROUP = ("gae", "reinforce_pp")
"""Advantages that do not compare the completions of a group."""

WITH_GROUP_BASELINE = ("trl", "nemo", "dr_grpo", "rloo")
"""Advantages that depend on the rewards of the group alone."""


class GrpoSection(AlgorithmSection):
    """Groups and the number of training steps (`algorithm: grpo`)."""

    samples: ClassVar[bool] = True
    reference: ClassVar = "with_penalty"

    num_prompts_per_step: Annotated[PositiveInt, Usual(1, 16_384, "512 in arXiv:2503.14476")] = 32
    """Groups in the batch of one step."""
    num_generations_per_prompt: Annotated[PositiveInt, Usual(1, 1024, "64 in arXiv:2402.03300")] = 8
    """Completions of each prompt; the advantage is relative to this group (`gae` and `reinforce_pp` need no group)."""
    max_num_steps: Annotated[PositiveInt, Usual(1, 1e9, "a step each second for 30 years")] = 100
    """Steps to train before the run ends."""
    max_num_epochs: PositiveFloat | None = None
    """The run ends after this many passes over the training data, unless max_num_steps ends it first. The number of
    steps is computed when the run is submitted. If max_num_steps is not set, the epochs alone decide."""
    advantage: AdvantageName = "trl"
    """Advantage preset. `trl`: group mean and sample std; `nemo`: leave-one-out; `dr_grpo`: no std; `rloo`;
    `trl_batch`: std of the batch; `gdpo`: each reward normalised separately; `reinforce_pp` and
    `reinforce_pp_baseline`; `gae`: from a value model (`value`)."""
    advantage_clip_low: float | None = None
    """Advantages below this are raised to it."""
    advantage_clip_high: float | None = None
    """Advantages above this are lowered to it."""
    overlong_filtering: bool = False
    """If true, a completion cut off at its token limit trains nothing, but its reward stays in the group's baseline."""
    use_dynamic_sampling: bool = False
    """Drop groups without any advantage, such as groups with equal rewards, and admit other groups instead.
    """
    max_generation_batches: PositiveInt = 10
    """Pause the run after this many batches of dropped groups in a row, or after two if all failures have one cause."""
    max_generation_failures: PositiveInt = 3
    """A group is dropped after this many attempts to generate it have failed with an unexpected error. Attempts that a
    worker, the network or the coordinator ended do not count. A group whose prompt is too long, or refused by the
    template, is dropped at once."""
    max_score_failures: PositiveInt = 3
    """A group is dropped after this many attempts to score it have failed because of its data or a reward function.
    Attempts that fail because a service is unreachable do not count. After a failure that every attempt would repeat
    (a missing column), the group is dropped at once."""
    val_period: NonNegativeInt = 0
    """Steps between two evaluations; 0: evaluations only by val_at_start and val_at_end."""
    val_at_start: bool = False
    """Evaluate the initial weights (version 0) before training."""
    val_at_end: bool = False
    """Evaluate the final version of the weights."""
    max_val_samples: PositiveInt = 256
    """Prompts of one evaluation, from the start of the validation set."""
    val_samples_per_prompt: PositiveInt = 1
    """Completions of each prompt in an evaluation: rewards are means over them, and functions with values 0 and 1 also
    get pass@k."""
    seed: NonNegativeInt = 42
    """Seeds the order of the data, the sampling and the initialisation."""

    @property
    def uses_value_model(self) -> bool:
        """Return whether the learner also trains a value model (PPO)."""
        return self.advantage == "gae"

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
                f"advantage_clip_low {low} and advantage_clip_high {high} do not include 0, so completions with "
                "an advantage of 0 would train; use bounds around 0"
            )
        return self


class AsyncGrpoSection(Section):
    """Limits how far generation may run ahead of training."""

    max_trajectory_age_steps: Annotated[NonNegativeInt, Usual(0, 16, "1 and 4 in NeMo RL")] = 1
    """η: largest age in steps for leases and batches; 0 is synchronous, on-policy GRPO. With `in_order` no token of a
    larger age is trained, with `ready_first` late groups are trained up to `hard_max_age`."""
    order: Literal["ready_first", "in_order"] = "ready_first"
    """`ready_first` trains complete groups, oldest first; `in_order` gives every lease a slot in its step."""
    late_wait_s: NonNegativeFloat = 30.0
    """Seconds for which a batch waits for an unfinished group that would pass the age limit (`ready_first`)."""
    hard_max_age: NonNegativeInt | None = None
    """Largest age in steps at which a late group still trains; an older group is dropped as stale. Default 2·η + 2."""
    in_flight_weight_updates: bool = True
    """Change weights between two decode steps of running sequences; false waits for them to finish."""
    recompute_kv_cache_after_weight_updates: bool | PositiveInt = True
    """When to recompute the KV cache of running sequences with the new weights. true: at every update of an engine. A
    number: once keys and values are so many updates old. false: never."""

    @property
    def recompute_after_updates(self) -> int | None:
        """Return the number of updates after which the KV cache of running sequences is recomputed; None: never."""
        after = self.recompute_kv_cache_after_weight_updates
        return int(after) or None

    @property
    def hard_max_age_steps(self) -> int:
        """Return the largest age at which a late group still trains."""
        return 2 * self.max_trajectory_age_steps + 2 if self.hard_max_age is None else self.hard_max_age


ExampleForm = Literal["demonstration", "preference", "labeled_completion", "traces"]


class ExamplesSection(AlgorithmSection):
    """Settings of every algorithm that trains on examples: numbers of examples and steps, evaluation."""

    samples: ClassVar[bool] = False
    example_form: ClassVar[ExampleForm]
    """Form of a row of the data set (`paceline.data.example_rows`)."""
    reads_conversations: ClassVar[bool] = False
    """True if data.messages_key may name whole conversations."""

    max_num_steps: Annotated[PositiveInt, Usual(1, 1e9, "a step each second for 30 years")] = 100
    """Steps to train before the run ends."""
    max_num_epochs: PositiveFloat | None = None
    """The run ends after this many passes over the training data, unless max_num_steps ends it first. The number of
    steps is computed when the run is submitted. If max_num_steps is not set, the epochs alone decide."""
    num_examples_per_step: Annotated[PositiveInt, Usual(1, 65_536, "512 in NeMo RL's SFT")] = 32
    """Examples in the batch of one step; a prompt with its chosen and rejected completions is one example."""
    seed: NonNegativeInt = 42
    """Seed of the order of the data and of a new head."""
    val_period: NonNegativeInt = 0
    """Steps between two evaluations on held-out examples; 0: evaluations only by val_at_start and val_at_end."""
    val_at_start: bool = False
    """Evaluate before training."""
    val_at_end: bool = False
    """Evaluate after the last step."""
    max_val_samples: PositiveInt = 256
    """Examples of one evaluation, from the start of the validation set."""

    @property
    def validates(self) -> bool:
        """Return whether the run evaluates on held-out examples."""
        return bool(self.val_period or self.val_at_start or self.val_at_end)

    def val_due(self, trained_steps: int) -> bool:
        """Return whether an evaluation is due after this many trained steps."""
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
    of the assistant in a conversation."""


class DpoSection(ExamplesSection):
    """Direct preference optimisation (`algorithm: dpo`)."""

    example_form: ClassVar[ExampleForm] = "preference"
    reference: ClassVar = "always"

    reference_policy_kl_penalty: PositiveFloat = 0.05
    """β: weight that keeps the policy near the reference."""
    preference_loss: Literal["sigmoid", "conservative", "robust", "hinge", "ipo"] = "sigmoid"
    """Function of the difference of the two log-ratios (docs/use/objectives.md)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """ε: probability that a label is flipped (`conservative`, `robust`)."""
    preference_loss_weight: PositiveFloat = 1.0
    """Factor of the preference loss."""
    sft_loss_weight: NonNegativeFloat = 0.0
    """Factor of the chosen completions' negative log-likelihood; 0 leaves it out."""
    preference_average_log_probs: bool = False
    """Divide each log-ratio by its completion's length (`ipo` always does)."""
    sft_average_log_probs: bool = False
    """Divide each completion's negative log-likelihood by its length."""
    precompute: bool = False
    """Compute the reference's log-probabilities of all data once before training, and unload the reference."""

    @model_validator(mode="after")
    def _check(self) -> DpoSection:
        if self.label_smoothing and self.preference_loss not in ("conservative", "robust"):
            raise ValueError(
                f"label_smoothing {self.label_smoothing} with preference_loss {self.preference_loss!r}, which "
                "ignores it; use conservative or robust"
            )
        return self


class KtoSection(ExamplesSection):
    """Kahneman-Tversky optimisation of single completions, good or bad (`algorithm: kto`)."""

    example_form: ClassVar[ExampleForm] = "labeled_completion"
    reference: ClassVar = "always"

    reference_policy_kl_penalty: PositiveFloat = 0.1
    """β: weight that keeps the policy near the reference."""
    desirable_weight: PositiveFloat = 1.0
    """Factor of the good completions' loss."""
    undesirable_weight: PositiveFloat = 1.0
    """Factor of the bad completions' loss."""
    precompute: bool = False
    """Compute the reference's log-probabilities of all examples once before training, and unload the reference."""

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
    """β (λ in the paper): factor of the odds-ratio term, which is added to the chosen completions' likelihood."""


class RmSection(ExamplesSection):
    """A reward model: one score for a prompt with a completion (`algorithm: rm`)."""

    example_form: ClassVar[ExampleForm] = "preference"
    scoring_head: ClassVar[bool] = True

    centring: NonNegativeFloat = 0.01
    """Factor of (r_chosen + r_rejected)², which keeps scores near 0."""


class OfflineGrpoSection(ExamplesSection):
    """GRPO on traces (`algorithm: offline_grpo`): an example is a prompt with all its recorded completions. The loss is
    that of `loss_fn`, at the temperature `policy.generation.temperature`."""

    example_form: ClassVar[ExampleForm] = "traces"
    uses_policy_loss: ClassVar[bool] = True
    reference: ClassVar = "with_penalty"

    advantage: Literal["trl", "nemo", "dr_grpo", "rloo"] = "trl"
    """Advantage of a completion relative to the other completions of its prompt; names as in `grpo.advantage`."""
    reward_keys: tuple[str, ...] = ()
    """Columns whose sum is the reward; empty: `final_reward`, or all reward functions of TRL's completions."""
    min_reward_threshold: float | None = None
    """Smallest reward of a trace that is used; traces with a smaller reward are left out before traces are compared."""
    max_traces_per_group: PositiveInt = Field(default=64, ge=2)
    """Divide a prompt with more traces into several examples of at most this many."""

    def check_with(self, loss_fn: LossSection) -> None:
        """Raise ValueError for loss settings that need values which traces lack."""
        refused = {
            "proximal_policy": ("exact", "traces have no ages"),
            "use_kl_in_reward": (False, "the advantages come from the recorded rewards"),
            "reference_policy_pool": ("learner", "no reward worker takes part"),
            "reference_policy_sync_steps": (None, "the reference is the policy before training"),
        }
        for key, (allowed, why) in refused.items():
            value = getattr(loss_fn, key)
            if value != allowed:
                raise ValueError(
                    f"loss_fn.{key} {value!r} with algorithm 'offline_grpo': {why}; leave it at {allowed!r}"
                )


WHOLE_DISTRIBUTIONS = ("jsd", "gkd", "top_k", "full")


class DistillationSection(AlgorithmSection):
    """On-policy distillation (`algorithm: distillation`). `grpo` has groups, steps and seed, `loss_fn` the corrections."""

    samples: ClassVar[bool] = True
    has_teacher: ClassVar[bool] = True

    teacher_model_name: str | None = None
    """The teacher, with the student's tokenizer: a local folder, an fsspec URL, a name on the hub, or `run:ID`."""
    teacher_pool: Literal["learner", "reward"] = "learner"
    """Processes that run the teacher: the learner, each rank with a shard; or the reward workers, each with the whole
    model, which add the teacher's log-probabilities of the sampled tokens to the group's rewards."""
    kl_type: Literal["reverse", "forward", "mixed"] = "reverse"
    """Divergence that the loss reduces: KL(student‖teacher), KL(teacher‖student), or both."""
    mixed_kl_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the forward KL in `mixed`."""
    max_forward_ratio: PositiveFloat = 10.0
    """Upper bound of the teacher's probability over the student's in the forward KL, to limit the variance."""

    @field_validator("kl_type", mode="before")
    @classmethod
    def _refuse_whole_distributions(cls, kind: object) -> object:
        if kind in WHOLE_DISTRIBUTIONS:
            raise ValueError(
                f"{kind!r} compares whole distributions at every token, and only the teacher's log-probability of the "
                "sampled token is available; use reverse, forward or mixed"
            )
        return kind

    def frozen_policy(self, policy: PolicySection, loss_fn: LossSection) -> PolicySection:
        """Return the teacher."""
        return policy.model_copy(update={"model_name": self.teacher_model_name, "tokenizer_name": None})

    def pool_serves_reference(self, loss_fn: LossSection) -> bool:
        """Return whether the reward pool runs the teacher."""
        return self.teacher_pool == "reward"

    def check_with(self, grpo: GrpoSection, loss_fn: LossSection) -> None:
        """Raise ValueError for settings that contradict a teacher."""
        if self.teacher_model_name is None:
            raise ValueError("distillation.teacher_model_name is not set; name the teacher")
        if loss_fn.reference_policy_kl_penalty > 0:
            raise ValueError(
                f"loss_fn.reference_policy_kl_penalty {loss_fn.reference_policy_kl_penalty} with algorithm "
                "'distillation': the teacher replaces the reference; set it to 0"
            )
        if grpo.advantage != "trl" or grpo.use_dynamic_sampling:
            raise ValueError(
                f"grpo.advantage {grpo.advantage!r} and use_dynamic_sampling {grpo.use_dynamic_sampling} with "
                "algorithm 'distillation': the teacher gives the advantages, and rewards are only shown; leave both out"
            )
