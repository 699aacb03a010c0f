"""`policy`: the model, its optimizer and schedule, and generation; `value`: the value model of PPO (`grpo.advantage: gae`)."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from paceline.spec.sections.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Usual
from paceline.spec.sections.vllm import NOT_SPECULATED, VllmSection, check_vllm_kwargs

SchedulerName = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "cosine_with_restarts",
    "polynomial", "inverse_sqrt", "wsd",
]  # fmt: skip
USUAL_BATCH_SIZE, GPU_BATCH_SIZE = 64, 256
StopString = Annotated[str, Field(min_length=1, max_length=256)]
FALLING_SCHEDULES = ("linear", "cosine", "cosine_with_min_lr", "cosine_with_restarts", "polynomial", "wsd")


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    """AdamW, as torch names its arguments."""

    lr: Annotated[
        PositiveFloat, Usual(1e-9, 1e-2, "1e-6 in arXiv:2402.03300, 6e-4 from scratch in arXiv:2005.14165")
    ] = 1e-6
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay factors of the two moments."""
    eps: Annotated[PositiveFloat, Usual(1e-16, 1e-3, "1e-8 in arXiv:2005.14165")] = 1e-8
    """Number added to the denominator of the update."""
    weight_decay: Annotated[NonNegativeFloat, Usual(0, 1, "0.1 in arXiv:2005.14165")] = 0.01
    """Decoupled weight decay, applied to matrices only."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the two moments in memory and in checkpoints. bfloat16 halves their memory; they are rounded
    stochastically after every update, with numbers that depend only on the update and the parameter."""
    offload: bool = False
    """Keep the two moments in host memory; parts of them are moved to the GPU one after the other, each for its update.
    Unlike policy.cpu_offload, parameters stay on the GPU."""


class SchedulerSection(Section):
    """Learning rate over steps."""

    name: SchedulerName = "constant"
    """Shape after the warm-up; names and shapes as in transformers, with `wsd` for its `warmup_stable_decay`."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from 0."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The warm-up as a fraction of the run's steps, rounded up; an alternative to warmup_steps."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate of the last step as a fraction of the peak, for shapes that fall until the last step."""
    power: PositiveFloat = 1.0
    """Exponent of `polynomial`; 1 is linear."""
    num_cycles: PositiveInt = 1
    """Number of falls of `cosine_with_restarts`; after each but the last the rate returns to the peak."""
    decay_steps: PositiveInt | None = None
    """Steps over which `wsd` lowers the rate at the end."""
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """Shape of the fall at the end of `wsd`."""

    @model_validator(mode="after")
    def _check(self) -> SchedulerSection:
        for field, value, neutral, names in (
            ("min_lr_ratio", self.min_lr_ratio, 0.0, FALLING_SCHEDULES),
            ("power", self.power, 1.0, ("polynomial",)),
            ("num_cycles", self.num_cycles, 1, ("cosine_with_restarts",)),
            ("decay_steps", self.decay_steps, None, ("wsd",)),
            ("decay_type", self.decay_type, "linear", ("wsd",)),
        ):
            if value != neutral and self.name not in names:
                raise ValueError(
                    f"{field} {value} has no effect with name {self.name!r}; it applies only to {', '.join(names)}: remove {field}, or choose another name"
                )
        if self.name == "wsd" and self.decay_steps is None:
            raise ValueError("name 'wsd' without decay_steps: set decay_steps, the steps of the fall at the end")
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} and warmup_ratio {self.warmup_ratio} both set the warm-up; keep one"
            )
        if self.name == "constant_with_warmup" and not (self.warmup_steps or self.warmup_ratio):
            raise ValueError(
                "name 'constant_with_warmup' with warmup_steps 0: set warmup_steps or warmup_ratio, or name constant"
            )
        if self.name == "cosine_with_min_lr" and self.min_lr_ratio == 0:
            raise ValueError("name 'cosine_with_min_lr' with min_lr_ratio 0: set min_lr_ratio, or name cosine")
        return self

    def num_warmup_steps(self, max_num_steps: int) -> int:
        """Return the steps of the warm-up in a run of `max_num_steps`."""
        return self.warmup_steps or math.ceil(self.warmup_ratio * max_num_steps)


Ranks = PositiveInt | Literal["auto"]
"""A dimension of the mesh."""

NOT_YET = {
    "context": "one rank has a whole sequence; activation_checkpointing with a smaller train_mb_tokens makes room",
    "tensor": "a layer is computed by one rank, and its weights are divided by `shard`",
    "expert": "experts are divided by `shard` as all weights are",
    "pipeline": "docs/decisions/2026-11-23-no-pipeline.md has the reasons",
}
"""For each parallelism that is not available, what Paceline does instead, as a clause."""


class ParallelSection(Section):
    """Division of the model among the learner's ranks: replicate × shard ranks; docs/operate/hosts.md."""

    replicate: Ranks = "auto"
    """Copies of the model; the batch is divided among them and gradients are summed. auto: 1, or one copy for each host
    if the model's state fits on the GPUs of a host."""
    shard: Ranks = "auto"
    """Neighbouring ranks that divide each copy's weights, gradients and optimizer state. auto: all ranks of a copy."""
    context: PositiveInt = 1
    """Not available; must be 1."""
    tensor: PositiveInt = 1
    """Not available; must be 1."""
    expert: PositiveInt = 1
    """Not available; must be 1."""
    pipeline: PositiveInt = 1
    """Not available; must be 1."""

    @model_validator(mode="after")
    def _refuse_what_is_not_there(self) -> ParallelSection:
        for key, instead in NOT_YET.items():
            if getattr(self, key) != 1:
                raise ValueError(f"{key} {getattr(self, key)}: there is no {key} parallelism; {instead}. Leave it out")
        return self


class LoraSection(Section):
    """A LoRA adapter trained instead of the model's own weights; docs/use/lora.md."""

    enabled: bool = False
    """Train an adapter."""
    dim: Annotated[PositiveInt, Usual(1, 1024, "16 in TRL, 32 and 64 in verl")] = 8
    """Rank of the adapter."""
    alpha: Annotated[PositiveInt, Usual(1, 4096, "alpha/dim scales the update, arXiv:2106.09685")] = 32
    """Scale of the adapter: its product is multiplied by alpha / dim."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapter's inputs; for `sft` only, because other losses compare with a policy without dropout."""
    target_modules: tuple[str, ...] = ()
    """Last parts of the names of the layers to adapt (`q_proj` …); empty: every linear layer below the LM head."""
    exclude_modules: tuple[str, ...] = ()
    """Last parts of the names of layers not to adapt."""


def _not_zero(temperature: Any) -> Any:
    if temperature == 0:
        raise ValueError("0 divides the logits; for the likeliest tokens (a greedy evaluation) set top_k to 1 instead")
    return temperature


class GenerationSection(Section):
    """Sampling of completions, and the engine."""

    backend: Literal["auto", "native", "vllm"] = "auto"
    """Engine: `native` is built in and runs on any machine, `vllm` needs the extra of that name. auto: vllm if the
    rollout workers have GPUs or vllm_cfg or vllm_kwargs is set, else native; chosen when the run is submitted."""
    max_new_tokens: PositiveInt = 256
    """Longest completion, in tokens. `rest`: what the prompt leaves of policy.max_total_sequence_length."""
    min_new_tokens: NonNegativeInt = 0
    """Allow no stop token before this many tokens; this biases the ratio, see allow_biased_sampling."""
    temperature: Annotated[
        PositiveFloat,
        BeforeValidator(_not_zero),
        Usual(0.05, 2, "1.0 in arXiv:2503.14476, 0.6 in arXiv:2501.12948"),
    ] = 1.0
    """Sampling temperature; log-probabilities everywhere are at this temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the likeliest tokens up to this total probability. Below 1 biases the ratio, see allow_biased_sampling."""
    top_k: NonNegativeInt = 0
    """Keep the k likeliest tokens; 0 keeps all. A value above 0 biases the ratio, see allow_biased_sampling."""
    stall_s: PositiveFloat = 300.0
    """If an engine with sequences to decode does not answer for this many seconds, its worker ends and other workers
    get the worker's leases. Set it far above the longest decode step, weight update or prefill."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keep tokens with at least this fraction of the likeliest token's probability; a value above 0 biases the ratio,
    see allow_biased_sampling."""
    repetition_penalty: Annotated[PositiveFloat, Usual(0.5, 2, "1 is none, arXiv:1909.05858")] = 1.0
    """Repetition penalty: divides positive and multiplies negative logits of tokens already in prompt or completion;
    other values than 1 bias the ratio, see allow_biased_sampling."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, besides the tokenizer's end of sequence."""
    stop_strings: Annotated[tuple[StopString, ...], Field(max_length=16)] = ()
    """Strings that end a completion at the token that completes a string; the completion's text ends with the string.
    """
    allow_biased_sampling: bool = False
    """Accept top_p, top_k, min_p, min_new_tokens, repetition_penalty, which the learner's log-probabilities ignore."""
    max_batch_size: PositiveInt | Literal["auto"] = "auto"
    """Largest number of sequences that one engine decodes at a time; with vLLM the KV cache may hold fewer. auto: 256
    for vllm on GPUs, else 64; chosen when the run is submitted."""
    vllm_cfg: VllmSection = VllmSection()
    """The vLLM engine: parallelism and memory."""
    vllm_kwargs: dict[str, Any] = {}
    """Further engine arguments, passed to vLLM unchanged; only those that were tested (docs/reference/vllm_arguments.md)."""

    @model_validator(mode="after")
    def _check(self) -> GenerationSection:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} exceeds max_new_tokens {self.max_new_tokens}")
        check_vllm_kwargs(self.vllm_kwargs)
        for name, reason in NOT_SPECULATED.items():
            if self.vllm_cfg.speculative is not None and getattr(self, name):
                raise ValueError(f"vllm_cfg.speculative with {name} {getattr(self, name)}: {reason}; remove one")
        if self.backend == "native" and (self.vllm_cfg != VllmSection() or self.vllm_kwargs):
            given = "vllm_kwargs" if self.vllm_kwargs else "vllm_cfg"
            raise ValueError(f"{given} is set, but backend is {self.backend!r}, which would ignore it; remove it")
        biased = [
            f"{name}={value}"
            for name, value, neutral in (
                ("top_p", self.top_p, 1.0),
                ("top_k", self.top_k, 0),
                ("min_p", self.min_p, 0.0),
                ("repetition_penalty", self.repetition_penalty, 1.0),
                ("min_new_tokens", self.min_new_tokens, 0),
            )
            if value != neutral
        ]
        if biased and not self.allow_biased_sampling:
            raise ValueError(
                f"{', '.join(biased)} changes the sampler's distribution, but the learner's log-probabilities do not "
                "repeat the change, so the importance ratio would be biased; remove it, or set "
                "allow_biased_sampling=true to accept that"
            )
        return self

    def batch_size(self, *, on_gpu: bool) -> int:
        """Return max_batch_size as a number, with the default for `auto`: a GPU decodes more sequences in the same time
        until arithmetic, not reading the weights, is the limit."""
        if self.max_batch_size == "auto":
            return GPU_BATCH_SIZE if on_gpu and self.backend == "vllm" else USUAL_BATCH_SIZE
        return self.max_batch_size


DEFAULT_ROW_TOKENS = 8192


def _checkpointing_of(value: Any) -> Any:
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


Checkpointing = Annotated[Literal["auto", "none", "selective", "full"], BeforeValidator(_checkpointing_of)]


Precision = Literal["auto", "float32", "bfloat16", "float16"]


class PolicySection(Section):
    """The model, how it is trained, and how it generates."""

    model_name: str
    """A local folder, a folder at an fsspec URL (`s3://bucket/model`), a name on the Hugging Face hub, or another run's
    export: `run:ID`, or `run:ID/NAME` for an export ordered by name."""
    tokenizer_name: str | None = None
    """Folder, fsspec URL, hub name or `run:ID` of the tokenizer, if it is not with the model."""
    precision: Precision = "auto"
    """Compute type of the learner's forward and backward; masters stay float32. auto: bfloat16 on CUDA, else float32.
    float16 scales the loss; docs/use/models.md."""
    generation_precision: Precision = "auto"
    """Type of the rollout engine's weights, and of the weights on the wire. auto: float16 if precision is float16, else
    bfloat16 on CUDA and float32 elsewhere."""
    max_total_sequence_length: PositiveInt = 2048
    """Largest number of tokens of prompt and completion together; longer prompts are refused."""
    train_mb_tokens: PositiveInt | Literal["auto"] = DEFAULT_ROW_TOKENS
    """Token budget of one micro-batch; sequences are packed up to it. auto: the most that fits the memory plan, chosen
    when the run is submitted (`paceline plan`)."""
    shared_prompts: Literal["auto"] | bool = "auto"
    """Compute a prompt once in a micro-batch for all its completions, forward and backward. auto: true where the
    learner is known to run on CPUs, else false; chosen when the run is submitted. docs/operate/performance.md."""
    num_updates_per_step: Annotated[PositiveInt, Usual(1, 64, "16 in arXiv:2503.14476")] = 1
    """Optimizer updates per batch; the batch's groups are split among them."""
    max_grad_norm: Annotated[PositiveFloat, Usual(1e-3, 1e3, "1.0 in arXiv:2005.14165")] = 1.0
    """Gradients are clipped to this global norm."""
    skip_non_finite_updates: bool = False
    """Skip an optimizer update whose loss or gradient is not finite, and warn with its groups; false: pause the run."""
    activation_checkpointing: Checkpointing = "none"
    """Activations that the backward pass recomputes to save memory. full (or true): every layer. selective: all but
    matrix products and attention. none (or false): nothing. auto: the first of none, selective, full that fits the
    memory plan, chosen when the run is submitted (`paceline plan`)."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at the same time in the LM head."""
    float32_head: bool = False
    """Compute and keep the logits in float32 in learner and engine, from the same weights; docs/use/models.md."""
    compile: bool = False
    """Compile the learner's decoder layers with torch.compile; needs a C++ compiler on CPUs, Triton on GPUs."""
    deterministic: bool = False
    """Choose the learner's operations so that a GPU repeats a step bit for bit as far as torch can; slower. CPUs always
    do; docs/operate/reliability.md."""
    parallel: ParallelSection = ParallelSection()
    """Replicas and shards of the model over the learner's ranks."""
    lora_cfg: LoraSection = LoraSection()
    """An adapter instead of the model's own weights."""
    optimizer: OptimizerSection = OptimizerSection()
    """The optimizer."""
    scheduler: SchedulerSection = SchedulerSection()
    """The learning-rate schedule."""
    generation: GenerationSection = GenerationSection()
    """Sampling and engine."""

    @property
    def row_tokens(self) -> int:
        """Token budget of one micro-batch as a number, with the default for `auto`."""
        if self.train_mb_tokens == "auto":
            return max(DEFAULT_ROW_TOKENS, self.max_total_sequence_length)
        return self.train_mb_tokens

    @property
    def shares_prompts(self) -> bool:
        """Return whether rows share prompts; False for `auto` that no submission has replaced."""
        return self.shared_prompts is True

    @model_validator(mode="before")
    @classmethod
    def _sample_in_float16_too(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("precision") == "float16":
            chosen = given.get("generation_precision")
            return {**given, "generation_precision": "float16" if chosen in (None, "auto") else chosen}
        return given

    @model_validator(mode="before")
    @classmethod
    def _fill_the_sequence(cls, given: Any) -> Any:
        """Write `max_new_tokens: rest` as a number; Paceline's engines end a completion at the total in any case."""
        generation = given.get("generation") if isinstance(given, dict) else None
        if not isinstance(generation, dict) or generation.get("max_new_tokens") != "rest":
            return given
        total = given.get("max_total_sequence_length", cls.model_fields["max_total_sequence_length"].default)
        try:
            room = max(1, int(total) - 1)
        except (TypeError, ValueError, OverflowError):
            return given
        return {**given, "generation": {**generation, "max_new_tokens": room}}

    @model_validator(mode="after")
    def _check(self) -> PolicySection:
        if self.precision == "float16" and self.generation_precision == "bfloat16":
            raise ValueError(
                "precision 'float16' with generation_precision 'bfloat16': the sampler would round weights differently from the "
                "learner; leave generation_precision out, or set it to float16"
            )
        if self.compile and self.activation_checkpointing == "selective":
            raise ValueError(
                "activation_checkpointing 'selective' with compile true: the compiler chooses what a compiled layer keeps; "
                "set full or none"
            )
        lora, recomputes = self.lora_cfg, self.activation_checkpointing in ("selective", "full")
        if lora.enabled and lora.dropout and recomputes:
            raise ValueError(
                f"lora_cfg.dropout {lora.dropout} with activation_checkpointing {self.activation_checkpointing}: the "
                "recomputation would draw another mask than the forward pass; set lora_cfg.dropout to 0, or activation_checkpointing to none"
            )
        return self


class ValueSection(Section):
    """A second model of the learner that predicts the future reward at every token; never published, only saved."""

    model_name: str | None = None
    """Initial model: a language model or a reward model, with the policy's tokens, as a folder, fsspec URL, hub name or
    `run:ID`; default policy.model_name."""
    optimizer: OptimizerSection = OptimizerSection(lr=1e-5)
    """Optimizer of the value model; the shape of the schedule is the policy's."""
    max_grad_norm: Annotated[PositiveFloat, Usual(1e-3, 1e3, "1.0 in arXiv:2005.14165")] = 1.0
    """Gradients of the value model are clipped to this global norm."""
    cliprange: Annotated[PositiveFloat | None, Usual(0.01, 10, "0.2 in TRL, 0.5 in verl")] = 0.2
    """Clip of a value's change since the start of the step: a larger change does not lower the loss further; null: no
    clip."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """λ of GAE: 0 uses the next token's value, 1 the reward alone."""
    gae_gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """γ: discount of a token."""
    policy_training_start_step: NonNegativeInt = 0
    """Before this step, only the value model learns."""
