"""`RunSpec`: one training job, and the rules that span several sections. The section `evaluation` sets how `paceline
eval` queries a model, and which groups of problems it reports. Runs do not read that section."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from paceline.errors import SpecError
from paceline.spec.sections.algorithms import (
    WITH_GROUP_BASELINE,
    WITHOUT_GROUP,
    AlgorithmSection,
    AsyncGrpoSection,
    DistillationSection,
    DpoSection,
    ExamplesSection,
    GrpoSection,
    KtoSection,
    OfflineGrpoSection,
    OrpoSection,
    RmSection,
    SftSection,
)
from paceline.spec.sections.base import Section
from paceline.spec.sections.data import DataSection
from paceline.spec.sections.loss import LossSection, preset_of
from paceline.spec.sections.policy import PolicySection, ValueSection
from paceline.spec.sections.system import CheckpointingSection, ClusterSection, LoggerSection, WeightsSection
from paceline.spec.sections.user_code import BundleSection, EnvironmentSection, RewardFunctionSection
from paceline.spec.templates import placeholders

CONTINUATION_NAMES = frozenset({"letter", "choice"})
MAX_UNDER_WAY = 2**31 - 1
"""Most completions that a run may have under way; counts of more could overflow in the ledger."""


class EvaluationSection(Section):
    """Form of an evaluation outside of runs. Only `paceline eval` reads it."""

    method: Literal["sample", "choose", "prefer"] = "sample"
    """`sample`: the model writes completions, which the reward functions score. `choose`: the answer is the choice of
    `data.choices` whose continuation has the highest log-probability (a second metric divides it by the number of
    characters); the reward functions read the letter of this choice. `prefer`: the reward functions score
    `data.chosen_key` and `data.rejected_key`, and the metric is how often the chosen completion scores higher; --model
    is the reward model."""
    continuation: str = " {choice}"
    """Continuation whose log-probability `choose` compares: `{choice}` is an answer, `{letter}` its letter."""
    group_by: tuple[str, ...] = ()
    """Columns whose values divide the problems: each metric is also reported for each value, with the gap between the
    best and the worst value, which `paceline gate --max` can bound."""

    @field_validator("continuation")
    @classmethod
    def _check_continuation(cls, text: str) -> str:
        names = placeholders(text)
        if not names or not names <= CONTINUATION_NAMES:
            raise ValueError(
                f"continuation {text!r} must contain {{choice}} or {{letter}}, and no other name in braces"
            )
        return text


Algorithm = Literal["grpo", "sft", "dpo", "kto", "orpo", "rm", "distillation", "offline_grpo"]


class RunSpec(Section):
    """One training job: submitted once, checked as a whole, and written beside the run in resolved form."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = "run"
    """Name for people, of letters, digits, dots, dashes and underscores; the run's id and folder are made from it."""
    folder: str = ""
    """Folder of the spec's file: reward functions are loaded from it or below. Empty for a spec that a program made."""
    algorithm: Algorithm = "grpo"
    """Algorithm and its training data: `grpo` from rollouts; from a data set's examples `sft` (completions), `dpo`
    and `orpo` (preference pairs), `kto` (good and bad completions), `rm` (a reward model from pairs); `distillation`
    from rollouts that a teacher scores token by token; `offline_grpo` from recorded completions with rewards."""
    policy: PolicySection
    data: DataSection
    grpo: GrpoSection = GrpoSection()
    async_grpo: AsyncGrpoSection = AsyncGrpoSection()
    loss_fn: LossSection = LossSection()
    value: ValueSection = ValueSection()
    sft: SftSection = SftSection()
    dpo: DpoSection = DpoSection()
    kto: KtoSection = KtoSection()
    orpo: OrpoSection = OrpoSection()
    rm: RmSection = RmSection()
    distillation: DistillationSection = DistillationSection()
    offline_grpo: OfflineGrpoSection = OfflineGrpoSection()
    rewards: tuple[RewardFunctionSection, ...] = ()
    environment: EnvironmentSection = EnvironmentSection()
    evaluation: EvaluationSection = EvaluationSection()
    bundle: BundleSection = BundleSection()
    weights: WeightsSection = WeightsSection()
    checkpointing: CheckpointingSection = CheckpointingSection()
    logger: LoggerSection = LoggerSection()
    cluster: ClusterSection = ClusterSection()
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Priority in the coordinator's queue: the highest starts first, among runs of equal priority the oldest. A run of
    higher priority replaces the running run, which writes a checkpoint and continues later."""
    max_hours: Annotated[float, Field(gt=0.0)] | None = None
    """The run ends as succeeded after this many hours of training, once it has trained its last steps and has written
    its checkpoint and export. Time in the queue and in pauses does not count. None: the run trains max_num_steps."""

    @property
    def algorithm_section(self) -> AlgorithmSection:
        """The section of the algorithm in use."""
        section: AlgorithmSection = getattr(self, self.algorithm)
        return section

    @property
    def samples(self) -> bool:
        """True if the run trains on rollouts, false if on a data set's examples."""
        return self.algorithm_section.samples

    @property
    def compares_samplers(self) -> bool:
        """Return whether the learner compares samplers' log-probabilities with its own."""
        return self.samples and self.logger.verify_share > 0 and not self.policy.generation.allow_biased_sampling

    @property
    def num_kept_versions(self) -> int:
        """Return how many older versions the learner keeps for the comparisons."""
        limit, max_age = self.logger.verify_versions, self.async_grpo.max_trajectory_age_steps
        return 0 if not self.compares_samplers else max_age if limit is None else min(limit, max_age)

    @property
    def completions_per_prompt(self) -> int:
        """Return how many completions share one computation of a prompt: 1 if no prompt is shared, and for episodes."""
        shares = self.policy.shares_prompts and self.samples and not self.environment.is_used
        return self.grpo.num_generations_per_prompt if shares else 1

    @property
    def examples(self) -> ExamplesSection | None:
        """The section of an algorithm that trains on examples of a data set; None if the algorithm samples."""
        section = self.algorithm_section
        return section if isinstance(section, ExamplesSection) else None

    @property
    def trains_traces(self) -> bool:
        """Return whether the run trains on recorded completions with the policy loss."""
        return self.algorithm_section.uses_policy_loss

    @property
    def max_num_steps(self) -> int:
        """Steps that the run trains."""
        return (self.examples or self.grpo).max_num_steps

    @property
    def max_num_epochs(self) -> float | None:
        """Passes over the training data after which the run ends; None without that limit."""
        return (self.examples or self.grpo).max_num_epochs

    def with_steps_of_epochs(self, num_rows: int) -> RunSpec:
        """Return the spec with fewer steps if its epochs over `num_rows` rows end before max_num_steps. Raises
        SpecError for settings that need more steps."""
        section = self.examples or self.grpo
        if section.max_num_epochs is None:
            return self
        rows_per_step = self.grpo.num_prompts_per_step if self.examples is None else self.examples.num_examples_per_step
        steps = min(section.max_num_steps, math.ceil(section.max_num_epochs * num_rows / rows_per_step))
        name = "grpo" if self.examples is None else self.algorithm
        tree = self.model_dump()
        tree[name]["max_num_steps"] = steps
        try:
            return RunSpec.model_validate(tree)
        except ValidationError as error:
            faults = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
            raise SpecError(
                f"{name}.max_num_epochs {section.max_num_epochs:g} over {num_rows} rows are {steps} steps: {faults}"
            ) from None

    @property
    def uses_value_model(self) -> bool:
        """Return whether the learner trains a value model beside the policy (PPO)."""
        return self.algorithm_section.uses_value_model

    @property
    def has_scoring_head(self) -> bool:
        """Return whether the trained model returns scores instead of tokens."""
        return self.algorithm_section.scoring_head

    @property
    def frozen_policy(self) -> PolicySection | None:
        """The model with which the policy is compared: a teacher, or the initial policy; None without one."""
        return self.algorithm_section.frozen_policy(self.policy, self.loss_fn)

    @property
    def value_policy(self) -> PolicySection | None:
        """The model from which the value model starts; None without one."""
        name = self.value.model_name or self.policy.model_name
        return self.policy.model_copy(update={"model_name": name}) if self.uses_value_model else None

    @property
    def syncs_reference(self) -> bool:
        """Return whether the policy is mixed into its reference during the run."""
        return self.samples and not self.has_teacher and self.loss_fn.reference_policy_sync_steps is not None

    @property
    def has_teacher(self) -> bool:
        """Return whether `frozen_policy` is a different model from the policy."""
        return self.algorithm_section.has_teacher

    @property
    def export_precision(self) -> str:
        """Return the precision of exported weights."""
        evaluated = self.policy.generation_precision if self.samples else self.policy.precision
        return evaluated if self.checkpointing.export_dtype == "auto" else self.checkpointing.export_dtype

    @property
    def pool_serves_reference(self) -> bool:
        """Return whether the reward pool runs `frozen_policy`, which then sends log-probabilities with the batch."""
        return self.algorithm_section.pool_serves_reference(self.loss_fn)

    @property
    def precomputes_reference(self) -> bool:
        """Return whether the reference is computed once for the whole data set, before training."""
        return self.algorithm_section.precomputes_reference

    @property
    def seed(self) -> int:
        """The seed of the algorithm in use."""
        return (self.examples or self.grpo).seed

    @property
    def prompts_have_tools(self) -> bool:
        """Return whether the chat template gets a row's tools; false with an environment, which has other tools."""
        return self.samples and not self.environment.is_used

    @property
    def rewards_decide_advantages(self) -> bool:
        """Return whether a group whose rewards are equal has no advantage: false if completions are not compared with
        their group, or a KL is part of the reward."""
        return self.grpo.advantage not in WITHOUT_GROUP and not self.loss_fn.use_kl_in_reward

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for legal but suspicious settings, one sentence each; shown when the spec is submitted."""
        return tuple(filter(None, (self._uncorrected(), self._without_filter(), self._unread(), self._unusual())))

    def _unusual(self) -> str:
        """Return one note for all numbers outside of their usual ranges; they are accepted."""
        found = list(self.unusual())
        return f"unusual numbers, which are accepted: {'; '.join(found)}" if found else ""

    def _uncorrected(self) -> str:
        """Return a warning if samples of older weights train uncorrected (docs/use/objectives.md has the cost)."""
        loss_fn, age = self.loss_fn, self.async_grpo.max_trajectory_age_steps
        corrected = loss_fn.truncated_importance_sampling_ratio is not None or loss_fn.ratio_anchor == "behaviour"
        if age == 0 or corrected or not self.samples:
            return ""
        return (
            f"async_grpo.max_trajectory_age_steps {age} with loss_fn.truncated_importance_sampling_ratio null and "
            f"ratio_anchor {loss_fn.ratio_anchor!r}: nothing corrects for samples of older weights (masks only drop some of "
            "them), which costs accuracy from a few steps of age on; set truncated_importance_sampling_ratio to 2, or "
            "max_trajectory_age_steps to 0"
        )

    def _without_filter(self) -> str:
        """Return a warning if use_dynamic_sampling is set although groups of equal rewards have advantages."""
        if self.rewards_decide_advantages or not self.grpo.use_dynamic_sampling:
            return ""
        return (
            f"grpo.use_dynamic_sampling true with grpo.advantage {self.grpo.advantage!r} or loss_fn.use_kl_in_reward: a group of "
            "equal rewards then has advantages, so only groups without any reward are dropped; set use_dynamic_sampling false"
        )

    def _unread(self) -> str:
        """Return a warning that names the set sections that the algorithm does not read."""
        of_samples = ("rewards", "grpo", "async_grpo", "loss_fn", "value")
        read = {self.algorithm, *(of_samples if self.samples else ["loss_fn"] if self.trains_traces else [])}
        names = [name for name in (*of_samples, *get_args(Algorithm)) if name not in read]
        defaults = type(self).model_fields
        ignored = [name for name in dict.fromkeys(names) if getattr(self, name) != defaults[name].default]
        if not ignored:
            return ""
        return (
            f"algorithm {self.algorithm} does not read {', '.join(ignored)}, which the spec sets; remove them, or set "
            "another algorithm"
        )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        preset, grpo = preset_of(values.get("loss_fn")), values.get("grpo", {})
        return {**values, "grpo": {**preset.grpo, **grpo}} if preset and isinstance(grpo, dict) else values

    @model_validator(mode="before")
    @classmethod
    def _reward_by_environment(cls, values: Any) -> Any:
        """If the spec names no reward, make the environment's own reward the only one."""
        if not isinstance(values, dict) or values.get("rewards"):
            return values
        section = values.get("environment")
        keys = ("class", "class_", "tools", "agent", "command")
        if not isinstance(section, dict) or not any(section.get(key) for key in keys):
            return values
        return {**values, "rewards": [{"function": "environment"}]}

    @model_validator(mode="after")
    def _check(self) -> RunSpec:
        self._check_schedule()
        self._check_environment()
        self._check_best_metric()
        self._check_lora()
        if self.examples is None:
            self._check_grpo()
            if self.has_teacher:
                self.distillation.check_with(self.grpo, self.loss_fn)
        else:
            self._check_examples(self.examples)
        return self

    def _check_schedule(self) -> None:
        scheduler = self.policy.scheduler
        warmup = scheduler.num_warmup_steps(self.max_num_steps)
        if scheduler.name == "wsd" and warmup + (scheduler.decay_steps or 0) > self.max_num_steps:
            raise ValueError(
                f"policy.scheduler: {warmup} steps of warm-up + decay_steps {scheduler.decay_steps} exceed "
                f"the run's {self.max_num_steps} steps: 'wsd' would have no peak; reduce one of them"
            )

    def _check_environment(self) -> None:
        environment = self.environment
        if not self.data.prompt_key and not self.data.prompt_template and not environment.class_:
            raise ValueError(
                "data.prompt_key is empty, but only `reset` of an environment.class gives prompts; name the column of the prompts"
            )
        if not environment.is_used:
            if any(reward.function == "environment" for reward in self.rewards):
                raise ValueError(
                    "rewards has the function 'environment', but environment has no class, tools, agent or command to reward; set one"
                )
            return
        if self.algorithm != "grpo":
            raise ValueError(
                f"environment is set with algorithm {self.algorithm!r}, but only grpo trains on episodes; remove one"
            )
        if self.grpo.advantage == "gae":
            raise ValueError(
                "environment is set with grpo.advantage 'gae', whose value model reads no episodes; set another advantage"
            )
        if self.pool_serves_reference:
            raise ValueError(
                "environment is set, but the reward pool, which would serve the reference, reads no episodes; set "
                "loss_fn.reference_policy_kl_penalty to 0, or loss_fn.reference_policy_pool to learner"
            )
        if environment.advantage != "outcome" and self.grpo.advantage not in WITH_GROUP_BASELINE:
            raise ValueError(
                f"environment.advantage {environment.advantage!r} compares turns within the group, and grpo.advantage "
                f"{self.grpo.advantage!r} does not; set grpo.advantage to one of {', '.join(WITH_GROUP_BASELINE)}"
            )

    def _check_best_metric(self) -> None:
        """Raise ValueError if checkpoints would lack the metric's value, so that none could be the best."""
        save, metric = self.checkpointing, self.checkpointing.metric_name
        if metric is None or not metric.startswith("val:"):
            return
        period = (self.examples or self.grpo).val_period
        if not period or save.save_period % period:
            raise ValueError(
                f"checkpointing.metric_name {metric!r} with checkpointing.save_period {save.save_period} and "
                f"{self.algorithm}.val_period {period}: a checkpoint needs an evaluation at its step; make save_period a "
                "multiple of val_period"
            )

    def _check_examples(self, section: ExamplesSection) -> None:
        if self.trains_traces:
            self.offline_grpo.check_with(self.loss_fn)
            if self.data.train_weights is not None:
                raise ValueError(
                    f"data.train_weights {list(self.data.train_weights)} with algorithm 'offline_grpo', which groups the traces of "
                    "all files by their prompts; remove the weights"
                )
        if self.data.streaming:
            raise ValueError(
                f"data.streaming true with algorithm {self.algorithm!r}, which reads examples by index; set it to false"
            )
        if self.data.source_key is not None:
            raise ValueError(
                f"data.source_key {self.data.source_key!r} with algorithm {self.algorithm!r}, but only an algorithm that samples "
                "reports rewards by source; remove it"
            )
        if section.validates and self.data.validation is None:
            raise ValueError(
                f"{self.algorithm}.val_period, val_at_start or val_at_end is set, but data.validation is not; name a "
                "data set"
            )
        if self.policy.num_updates_per_step > section.num_examples_per_step:
            raise ValueError(
                f"policy.num_updates_per_step {self.policy.num_updates_per_step} exceeds "
                f"{self.algorithm}.num_examples_per_step {section.num_examples_per_step}"
            )
        if self.data.messages_key is not None and not section.reads_conversations:
            raise ValueError(
                f"data.messages_key {self.data.messages_key!r} with algorithm {self.algorithm!r}: only sft reads whole "
                "conversations; remove it"
            )

    def _check_lora(self) -> None:
        lora = self.policy.lora_cfg
        if not lora.enabled:
            return
        if self.has_scoring_head:
            raise ValueError(
                f"policy.lora_cfg.enabled true with algorithm {self.algorithm}: the score head is new and would keep its random "
                "values; train the reward model whole"
            )
        if self.syncs_reference:
            raise ValueError(
                f"policy.lora_cfg.enabled true with loss_fn.reference_policy_sync_steps "
                f"{self.loss_fn.reference_policy_sync_steps}: the reference is the base without the adapter and never "
                "changes; leave reference_policy_sync_steps out, or train the model whole"
            )
        if lora.dropout and self.algorithm_section.compares_policies:
            raise ValueError(
                f"policy.lora_cfg.dropout {lora.dropout} with algorithm {self.algorithm}: its ratio compares two "
                "policies, but only one of them would drop inputs; set the dropout to 0"
            )

    def _check_grpo(self) -> None:
        age = self.async_grpo.max_trajectory_age_steps
        if self.data.streaming and self.max_num_epochs is not None:
            raise ValueError(
                f"grpo.max_num_epochs {self.max_num_epochs:g} with data.streaming true: the length of a stream is not known before "
                "its end; set grpo.max_num_steps alone"
            )
        if not self.rewards:
            raise ValueError(f"rewards is empty, but algorithm {self.algorithm} needs at least one reward function")
        labels = [reward.label for reward in self.rewards]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"rewards has the name {label!r} {labels.count(label)} times; give each its own name")
        if not any(reward.weight_schedule or reward.weight for reward in self.rewards):
            raise ValueError("every reward has weight 0, so nothing could be learnt; set a weight")
        if all(reward.gate_min is not None for reward in self.rewards):
            raise ValueError(
                "every reward has gate_min, but a gate acts only on functions without it; remove one gate_min"
            )
        grpo = self.grpo
        most = grpo.num_prompts_per_step * grpo.num_generations_per_prompt * (age + 1)
        if most > MAX_UNDER_WAY:
            raise ValueError(
                f"grpo.num_prompts_per_step {grpo.num_prompts_per_step} × num_generations_per_prompt "
                f"{grpo.num_generations_per_prompt} × (async_grpo.max_trajectory_age_steps {age} + 1) are {most} completions under "
                f"way, but at most {MAX_UNDER_WAY} are possible; reduce one of them"
            )
        if grpo.num_generations_per_prompt == 1 and grpo.advantage not in WITHOUT_GROUP and not self.has_teacher:
            raise ValueError(
                f"grpo.num_generations_per_prompt 1 with grpo.advantage {grpo.advantage!r}: a single completion cannot be "
                f"compared; use 2 or more, or grpo.advantage {' or '.join(WITHOUT_GROUP)}"
            )
        if self.weights.publish_interval > age + 1:
            raise ValueError(
                f"weights.publish_interval {self.weights.publish_interval} exceeds "
                f"async_grpo.max_trajectory_age_steps + 1 = {age + 1}: no lease could ever be given; lower the interval"
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
                "grpo.advantage 'gdpo' with loss_fn.use_kl_in_reward true: gdpo normalises each reward "
                "separately and cannot include a KL; put the KL in the loss"
            )
        if self.loss_fn.proximal_policy == "log_linear" and self.policy.num_updates_per_step == 1:
            raise ValueError(
                "loss_fn.proximal_policy 'log_linear' with policy.num_updates_per_step 1: with one update the "
                "proximal policy is the current one, exactly and at no cost; set it to exact"
            )
        if not self.uses_value_model and self.value != ValueSection():
            raise ValueError(
                f"value is set with grpo.advantage {self.grpo.advantage!r}: only 'gae' has a value model; set 'gae', "
                "or remove value"
            )
        if self.value.policy_training_start_step >= self.grpo.max_num_steps:
            raise ValueError(
                f"value.policy_training_start_step {self.value.policy_training_start_step} leaves no step to the "
                f"policy, because grpo.max_num_steps is {self.grpo.max_num_steps}; lower the first, or raise the second"
            )
        if (self.grpo.val_period or self.grpo.val_at_start or self.grpo.val_at_end) and self.data.validation is None:
            raise ValueError(
                "grpo.val_period, val_at_start or val_at_end is set, but data.validation is not; name a data set"
            )
