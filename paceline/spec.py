"""`RunSpec`: everything that defines one training job, validated before anything starts.

Strict on purpose: an unknown key is an error that says what was meant, and settings that contradict each other are
refused with both values. Names follow NeMo RL wherever it has a key for the same thing. Defaults live here and
nowhere else. `paceline.spec_io` reads the YAML and the dotted overrides.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.loss_presets import PRESETS, Preset, PresetName

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


AdvantageName = Literal[
    "trl", "nemo", "dr_grpo", "rloo", "trl_batch", "gdpo", "reinforce_pp", "reinforce_pp_baseline"
]


class Section(BaseModel):
    """A part of the spec: frozen, no unknown keys, the docstring under each field is its description."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        validate_default=True,
    )


class GrpoSection(Section):
    """How groups are made and how many steps are trained (`algorithm: grpo`)."""

    num_prompts_per_step: PositiveInt = 32
    """Groups in the batch of one step."""
    num_generations_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Completions of each prompt; the advantage is relative to this group."""
    max_num_steps: PositiveInt = 100
    """Steps to train before the run ends."""
    advantage: AdvantageName = "trl"
    """Advantage preset: `trl` group mean and sample std, `nemo` leave-one-out, `dr_grpo` no std, `rloo`; `trl_batch`
    std of the batch, `gdpo` each reward normalised by itself, `reinforce_pp` and `reinforce_pp_baseline`."""
    advantage_clip_low: float | None = None
    """Advantages below this are raised to it."""
    advantage_clip_high: float | None = None
    """Advantages above this are lowered to it."""
    overlong_filtering: bool = False
    """A completion cut off at its token limit trains nothing; its reward stays in the group's baseline."""
    use_dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal and admit others in their place."""
    max_generation_batches: PositiveInt = 10
    """Give up when this many batches' worth of groups in a row were dropped without one that could train."""
    val_period: NonNegativeInt = 0
    """Evaluate every this many steps; 0 evaluates only where val_at_start and val_at_end say so."""
    val_at_start: bool = False
    """Evaluate version 0 before training."""
    val_at_end: bool = False
    """Evaluate the final version."""
    max_val_samples: PositiveInt = 256
    """Prompts of the validation set that one evaluation uses, from its start."""
    seed: NonNegativeInt = 42
    """Seeds the order of the data, the sampling and the initialisation."""

    @model_validator(mode="after")
    def _check(self) -> GrpoSection:
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and low >= high:
            raise ValueError(f"advantage_clip_low {low} is not below advantage_clip_high {high}")
        return self


class AsyncGrpoSection(Section):
    """How far generation may run ahead of training."""

    max_trajectory_age_steps: NonNegativeInt = 1
    """η: oldest version a trained token may have, in steps; 0 is synchronous, on-policy GRPO."""
    order: Literal["ready_first", "in_order"] = "ready_first"
    """`ready_first` trains what is complete, oldest first; `in_order` gives every lease a slot in its step."""
    late_wait_s: NonNegativeFloat = 30.0
    """How long a batch waits for a live group that would pass the age limit (`ready_first`)."""
    hard_max_age: NonNegativeInt | None = None
    """A late group still trains up to this age, else it is dropped as stale; default 2·η + 2."""
    in_flight_weight_updates: bool = True
    """Change weights between two decode steps of running sequences; false waits for them to finish."""
    recompute_kv_cache_after_weight_updates: bool = True
    """Recompute the KV cache of running sequences with the new weights."""

    @property
    def hard_max_age_steps(self) -> int:
        """The age up to which a late group still trains."""
        return 2 * self.max_trajectory_age_steps + 2 if self.hard_max_age is None else self.hard_max_age


def _preset_of(loss_fn: Any) -> Preset | None:
    name = loss_fn.get("preset") if isinstance(loss_fn, dict) else None
    return next((preset for known, preset in PRESETS.items() if known == name), None)


class LossSection(Section):
    """The policy loss: a ratio, what becomes of it, the correction of the sampler's age, penalties, the reduction
    (docs/objectives.md has the formulas)."""

    preset: PresetName | None = None
    """A paper's settings for the keys of loss_fn and grpo that the spec leaves out."""
    policy_loss: Literal["clip", "unclipped", "cispo", "sapo", "dppo", "vespo"] = "clip"
    """What is made of ratio and advantage: `clip` (PPO, GRPO, and GSPO by ratio_level), `unclipped`, or by name."""
    ratio_anchor: Literal["proximal", "behaviour"] = "proximal"
    """Denominator of the ratio: the learner at the start of the step, or the sampler. With one update per step the
    proximal ratio is 1, so no clip acts."""
    ratio_level: Literal["token", "sequence", "sequence_product"] = "token"
    """One ratio per token, or one per sequence: `sequence` its geometric mean, `sequence_product` the product."""
    proximal_policy: Literal["exact", "log_linear"] = "exact"
    """`exact` asks the model before the first of several updates; `log_linear` interpolates by the token's version."""
    ratio_clip_min: Annotated[float, Field(ge=0, le=1)] = 0.2
    """ε: the ratio is clipped from below at 1 - ε; 1 is no bound."""
    ratio_clip_max: NonNegativeFloat = 0.2
    """ε_high: the ratio is clipped from above at 1 + ε_high."""
    ratio_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: for negative advantages the ratio is bounded by this as well."""
    sapo_temperature_pos: PositiveFloat = 1.0
    """τ for positive advantages (`sapo`)."""
    sapo_temperature_neg: PositiveFloat = 1.05
    """τ for the others (`sapo`)."""
    dppo_mask_low: PositiveFloat = 0.2
    """A token with a negative advantage is dropped once its probability fell by more than this (`dppo`)."""
    dppo_mask_high: PositiveFloat = 0.2
    """A token with a positive advantage is dropped once its probability rose by more than this (`dppo`)."""
    dppo_square_penalty: NonNegativeFloat = 1e-3
    """Weight of (log r)² (`dppo`)."""
    vespo_k_pos: PositiveFloat = 2.0
    """Exponent of the sequence weight for advantages from 0 on (`vespo`)."""
    vespo_lambda_pos: PositiveFloat = 3.0
    """Decay of the sequence weight for advantages from 0 on (`vespo`)."""
    vespo_k_neg: PositiveFloat = 3.0
    """Exponent for negative advantages (`vespo`)."""
    vespo_lambda_neg: PositiveFloat = 2.0
    """Decay for negative advantages (`vespo`)."""
    reduction: Literal["grpo", "dapo", "dr_grpo", "bnpo", "sequence_sum"] = "dapo"
    """How token losses become one number, always over the global batch (`bnpo` excepted)."""
    reference_policy_kl_penalty: NonNegativeFloat = 0.0
    """β: weight of the KL to the reference policy; 0 loads no reference."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL; `k1` has no gradient as a loss and is refused there with β > 0."""
    use_kl_in_reward: bool = False
    """Subtract β·KL from the reward instead of adding it to the loss."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Weight of the mean entropy per token, which the loss then raises."""
    truncated_importance_sampling_ratio: PositiveFloat | None = 2.0
    """Upper bound of the proximal/behaviour weight that corrects for the sampler's older weights; null: no weight."""
    truncated_importance_sampling_ratio_min: NonNegativeFloat = 0.0
    """Lower bound of that weight."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "sequence_tis", "sequence_mask"] = "tis"
    """Beyond the bounds: `tis` holds a token's weight at them, `icepop` drops the token; `sequence_tis` and
    `sequence_mask` do the same with the product over the sequence."""
    geometric_mask: tuple[PositiveFloat, PositiveFloat] | None = None
    """Drop sequences whose geometric mean of proximal/behaviour ratios is outside (low, high)."""
    veto: tuple[PositiveFloat, PositiveFloat] | None = None
    """Drop sequences with any proximal/behaviour ratio outside (low, high)."""
    m2_threshold: PositiveFloat | None = None
    """M2PO: drop the tokens with the largest squared log proximal/behaviour ratio until its mean is at most this."""
    off_policy_mask_threshold: PositiveFloat | None = None
    """Drop sequences with a negative advantage whose mean log behaviour/current ratio exceeds this."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        preset = _preset_of(values)
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
        if self.use_kl_in_reward and self.reference_policy_kl_penalty == 0:
            raise ValueError(
                "use_kl_in_reward is true with reference_policy_kl_penalty 0: nothing to subtract"
            )
        in_loss = self.reference_policy_kl_penalty > 0 and not self.use_kl_in_reward
        if in_loss and self.reference_policy_kl_type == "k1":
            raise ValueError(
                f"reference_policy_kl_type is 'k1' with reference_policy_kl_penalty "
                f"{self.reference_policy_kl_penalty}: k1 in the loss has no gradient on average; use k2 or k3, or "
                "set use_kl_in_reward"
            )
        return self

    def _check_anchor(self) -> None:
        if self.policy_loss == "dppo" and self.ratio_anchor != "behaviour":
            raise ValueError(
                f"policy_loss 'dppo' with ratio_anchor {self.ratio_anchor!r}: its trust region is around the sampler; "
                "set ratio_anchor=behaviour"
            )
        if self.m2_threshold is not None and self.proximal_policy != "exact":
            raise ValueError(
                f"m2_threshold {self.m2_threshold} with proximal_policy {self.proximal_policy!r}: the threshold is "
                "taken before the first update, from the exact proximal policy"
            )
        if self.ratio_anchor == "proximal":
            return
        if self.truncated_importance_sampling_ratio is not None:
            raise ValueError(
                f"ratio_anchor 'behaviour' with truncated_importance_sampling_ratio "
                f"{self.truncated_importance_sampling_ratio}: the ratio already corrects for the sampler, a weight on "
                "top would count it twice; set truncated_importance_sampling_ratio=null"
            )
        if self.ratio_level != "token":
            raise ValueError(
                f"ratio_anchor 'behaviour' with ratio_level {self.ratio_level!r}: the numerical noise of a whole "
                "sequence puts nearly every ratio outside the clip; set ratio_anchor=proximal"
            )
        if self.policy_loss == "vespo":
            raise ValueError(
                "policy_loss 'vespo' with ratio_anchor 'behaviour': it multiplies the proximal ratio and the "
                "importance weight by itself; set ratio_anchor=proximal"
            )
        if self.proximal_policy != "exact":
            raise ValueError(
                f"ratio_anchor 'behaviour' with proximal_policy {self.proximal_policy!r}: nothing would be "
                "anchored at that approximation"
            )

    def _check_ratio(self) -> None:
        if self.policy_loss != "clip" and self.ratio_level != "token":
            raise ValueError(
                f"policy_loss {self.policy_loss!r} with ratio_level {self.ratio_level!r}: only 'clip' is defined on "
                "ratios of sequences"
            )
        if self.ratio_clip_c is not None:
            if self.policy_loss != "clip":
                raise ValueError(f"ratio_clip_c {self.ratio_clip_c} with policy_loss {self.policy_loss!r}")
            if self.ratio_clip_c <= 1 + self.ratio_clip_max:
                raise ValueError(
                    f"ratio_clip_c {self.ratio_clip_c} is not above 1 + ratio_clip_max = {1 + self.ratio_clip_max}"
                )
        weight = self.truncated_importance_sampling_type
        if self.policy_loss == "vespo" and weight in ("sequence_tis", "sequence_mask"):
            raise ValueError(
                f"policy_loss 'vespo' with truncated_importance_sampling_type {weight!r}: it multiplies the weights "
                "of the tokens itself; use 'tis' or 'icepop'"
            )


class SftSection(Section):
    """Supervised fine-tuning on the same loop (`algorithm: sft`)."""

    max_num_steps: PositiveInt = 100
    """Steps to train before the run ends."""
    num_examples_per_step: PositiveInt = 32
    """Examples in the batch of one step."""
    seed: NonNegativeInt = 42
    """Seeds the order of the data."""


class OptimizerSection(Section):
    """AdamW, as torch names its arguments."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, applied to matrices only."""


class SchedulerSection(Section):
    """Learning rate over steps."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from 0."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The rate at the last step as a fraction of the peak (`linear`, `cosine`)."""


class GenerationSection(Section):
    """How completions are sampled and by which engine."""

    backend: Literal["native", "vllm"] = "native"
    """`native` is embedded (any machine), `vllm` needs the extra of that name."""
    max_new_tokens: PositiveInt = 256
    """Longest completion, in tokens."""
    min_new_tokens: NonNegativeInt = 0
    """No stop token before this many tokens; biases the ratio, see allow_biased_sampling."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probabilities everywhere are at this temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus; below 1 biases the ratio, see allow_biased_sampling."""
    top_k: NonNegativeInt = 0
    """Keep the k likeliest tokens; 0 keeps all; above 0 biases the ratio, see allow_biased_sampling."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, besides the tokenizer's end of sequence."""
    allow_biased_sampling: bool = False
    """Accept top_p, top_k and min_new_tokens although the learner's log-probabilities do not repeat their masks."""
    max_batch_size: PositiveInt = 64
    """Sequences that one `native` engine decodes at a time."""
    vllm_cfg: dict[str, Any] = {}
    """Settings of the vLLM engine that Paceline interprets (tensor_parallel_size, gpu_memory_utilization …)."""
    vllm_kwargs: dict[str, Any] = {}
    """Further engine arguments, handed to vLLM as they are."""

    @model_validator(mode="after")
    def _check(self) -> GenerationSection:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens {self.min_new_tokens} exceeds max_new_tokens {self.max_new_tokens}"
            )
        if self.backend != "vllm" and (self.vllm_cfg or self.vllm_kwargs):
            given = "vllm_cfg" if self.vllm_cfg else "vllm_kwargs"
            raise ValueError(
                f"{given} is set, but backend is {self.backend!r}, which would ignore it; remove it"
            )
        biased = [
            f"{name}={value}"
            for name, value, neutral in (
                ("top_p", self.top_p, 1.0),
                ("top_k", self.top_k, 0),
                ("min_new_tokens", self.min_new_tokens, 0),
            )
            if value != neutral
        ]
        if biased and not self.allow_biased_sampling:
            raise ValueError(
                f"{', '.join(biased)} masks the sampler's distribution, the learner's log-probabilities do not "
                "repeat the mask, so the importance ratio would be biased; remove it, or set "
                "allow_biased_sampling=true to accept that"
            )
        return self


class PolicySection(Section):
    """The model, how it is trained and how it generates."""

    model_name: str
    """A local folder or a name on the Hugging Face hub."""
    tokenizer_name: str | None = None
    """Where the tokenizer is, when not with the model."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type of the learner's forward and backward; masters stay float32. auto: bfloat16 on CUDA."""
    generation_precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the rollout engine's weights, and of the weights on the wire. auto: bfloat16 on CUDA."""
    max_total_sequence_length: PositiveInt = 2048
    """Prompt and completion together, in tokens; longer prompts are refused."""
    train_mb_tokens: PositiveInt = 8192
    """Token budget of one micro-batch; sequences are packed up to it."""
    num_updates_per_step: PositiveInt = 1
    """Optimizer updates that one batch gets; the batch's groups are split among them."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at one time in the LM head."""
    optimizer: OptimizerSection = OptimizerSection()
    """The optimizer."""
    scheduler: SchedulerSection = SchedulerSection()
    """The learning-rate schedule."""
    generation: GenerationSection = GenerationSection()
    """Sampling and engine."""


class DataSection(Section):
    """Where prompts come from. Columns that are not named here go to the reward functions."""

    train: str
    """A .jsonl or .parquet file, a folder made by `datasets`, or a data set's name on the hub."""
    validation: str | None = None
    """The same, for evaluation."""
    train_split: str = "train"
    """Split of a `datasets` folder or a hub data set."""
    validation_split: str = "test"
    """Split for evaluation."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or chat messages (a list of role and content)."""
    completion_key: str = "completion"
    """Column with the target text (`algorithm: sft`)."""
    system_prompt: str | None = None
    """Put before every prompt as a system message; makes a chat of a text prompt."""
    apply_chat_template: Literal["auto", "always", "never"] = "auto"
    """auto: messages always, text only when system_prompt is set."""
    shuffle: bool = True
    """Seeded order, anew in every epoch; false keeps the file's order."""


class RewardFunctionSection(Section):
    """One reward function."""

    function: str
    """A built-in's name, or `path/to/file.py:function`."""
    name: str | None = None
    """Name in metrics and samples; default the function's own."""
    weight: float = 1.0
    """Factor in the sum of rewards."""
    kwargs: dict[str, Any] = {}
    """Fixed keyword arguments for the function."""
    timeout_s: PositiveFloat = 30.0
    """Time limit of one call on one group."""
    memory_mb: PositiveInt = 2048
    """Address space that the function may add in its process."""

    @property
    def label(self) -> str:
        """The name that metrics use."""
        return self.name or self.function.rsplit(":", 1)[-1]


class WeightsSection(Section):
    """How new weights reach the rollout workers."""

    channel: Literal["collective"] = "collective"
    """`collective`: NCCL between GPUs, gloo between CPUs."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl when learner and rollout have GPUs of their own (cluster.*_gpus), else gloo by host memory."""
    publish_interval: PositiveInt = 1
    """Steps between two published versions."""
    max_wait_s: PositiveFloat = 30.0
    """Time limit of every operation with one member; a member that needs longer is left out."""
    bucket_mb: PositiveInt = 256
    """Size of one packed bucket."""


class CheckpointingSection(Section):
    """When the learner's state is made durable."""

    enabled: bool = True
    """Whether to write checkpoints at all."""
    save_period: PositiveInt = 50
    """Steps between two checkpoints; the last step always makes one."""
    keep_top_k: PositiveInt = 2
    """Newest complete checkpoints that are kept."""
    checkpoint_dir: str | None = None
    """Where to, each run in a folder of its own; default `checkpoints/` in the run's directory."""


class LoggerSection(Section):
    """What is written down."""

    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    keep_samples: bool = True
    """Keep trained groups in the ledger as the run's trace data set (`paceline samples`)."""
    stall_warning_s: PositiveFloat = 60.0
    """A warning that names the reason when the learner has waited this long; again at twice the time, and so on."""


class ClusterSection(Section):
    """How many processes `paceline up` starts on this host. A cluster's size is its operator's."""

    rollout_workers: PositiveInt = 2
    """Rollout services."""
    reward_workers: PositiveInt = 1
    """Reward services."""
    learner_ranks: PositiveInt = 1
    """Ranks of the learner."""
    rollout_gpus: tuple[int, ...] = ()
    """GPUs for rollout, split evenly over the workers; empty means CPU."""
    learner_gpus: tuple[int, ...] = ()
    """GPUs for the learner, one per rank; empty means CPU."""
    threads_per_process: PositiveInt = 1
    """Compute threads of each process on a CPU."""


class RunSpec(Section):
    """One training job. Submitted once, checked whole, written beside the run as it was resolved."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = "run"
    """A word for people; the run's id and its folder are made from it: letters, digits, dot, dash, underscore."""
    algorithm: Literal["grpo", "sft"] = "grpo"
    """What is trained from what: `grpo` from rollouts, `sft` from a data set's completions."""
    policy: PolicySection
    data: DataSection
    grpo: GrpoSection = GrpoSection()
    async_grpo: AsyncGrpoSection = AsyncGrpoSection()
    loss_fn: LossSection = LossSection()
    sft: SftSection = SftSection()
    rewards: tuple[RewardFunctionSection, ...] = ()
    weights: WeightsSection = WeightsSection()
    checkpointing: CheckpointingSection = CheckpointingSection()
    logger: LoggerSection = LoggerSection()
    cluster: ClusterSection = ClusterSection()

    @property
    def max_num_steps(self) -> int:
        """Steps that the run trains."""
        return self.grpo.max_num_steps if self.algorithm == "grpo" else self.sft.max_num_steps

    @property
    def seed(self) -> int:
        """The seed of the algorithm in use."""
        return self.grpo.seed if self.algorithm == "grpo" else self.sft.seed

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        preset, grpo = _preset_of(values.get("loss_fn")), values.get("grpo", {})
        return {**values, "grpo": {**preset.grpo, **grpo}} if preset and isinstance(grpo, dict) else values

    @model_validator(mode="after")
    def _check(self) -> RunSpec:
        if self.algorithm == "grpo":
            self._check_grpo()
        return self

    def _check_grpo(self) -> None:
        age = self.async_grpo.max_trajectory_age_steps
        if not self.rewards:
            raise ValueError("rewards is empty, but algorithm grpo needs at least one reward function")
        labels = [reward.label for reward in self.rewards]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(
                    f"rewards has the name {label!r} {labels.count(label)} times; give each its own name"
                )
        if all(reward.weight == 0 for reward in self.rewards):
            raise ValueError("every reward has weight 0, so nothing could be learnt")
        if self.weights.publish_interval > age + 1:
            raise ValueError(
                f"weights.publish_interval {self.weights.publish_interval} exceeds "
                f"async_grpo.max_trajectory_age_steps + 1 = {age + 1}: no lease could ever be given"
            )
        if self.async_grpo.hard_max_age_steps < age:
            raise ValueError(
                f"async_grpo.hard_max_age {self.async_grpo.hard_max_age} is below max_trajectory_age_steps {age}"
            )
        if self.policy.generation.max_new_tokens >= self.policy.max_total_sequence_length:
            raise ValueError(
                f"policy.generation.max_new_tokens {self.policy.generation.max_new_tokens} leaves no room for a "
                f"prompt in policy.max_total_sequence_length {self.policy.max_total_sequence_length}"
            )
        if self.policy.num_updates_per_step > self.grpo.num_prompts_per_step:
            raise ValueError(
                f"policy.num_updates_per_step {self.policy.num_updates_per_step} exceeds "
                f"grpo.num_prompts_per_step {self.grpo.num_prompts_per_step}"
            )
        if self.grpo.advantage == "gdpo" and self.loss_fn.use_kl_in_reward:
            raise ValueError(
                "grpo.advantage 'gdpo' with loss_fn.use_kl_in_reward true: it normalises each reward by itself and "
                "has no place for a KL among them; put the KL in the loss"
            )
        if self.loss_fn.proximal_policy == "log_linear" and self.policy.num_updates_per_step == 1:
            raise ValueError(
                "loss_fn.proximal_policy 'log_linear' with policy.num_updates_per_step 1: with one update the "
                "proximal policy is the current one, exactly and at no cost; set it to exact"
            )
        if (
            self.grpo.val_period or self.grpo.val_at_start or self.grpo.val_at_end
        ) and self.data.validation is None:
            raise ValueError(
                "grpo.val_period, val_at_start or val_at_end is set, but data.validation is not; name a data set"
            )
