"""Splits a number of GPUs between learner and engines, and estimates the resulting step. Pure.

Each number of learner ranks that the memory plan has room for is tried, with engines on the other GPUs. With η > 0
generation and training overlap, so a step takes the longer of the two; with η = 0, or if learner and engine share one
GPU, it takes their sum. The split with the shortest step wins; among equal splits, the one with fewer ranks wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.apps.planning.processors import Processor, Work, generation_seconds, training_seconds
from paceline.errors import InvalidInput, SpecError
from paceline.models.memory_plan import Plan, Room, plan, planned, refusal
from paceline.models.shape import ModelShape
from paceline.spec import RunSpec

RECOMPUTED = {"full": 1.0, "selective": 0.1}
"""Share of the forward pass that checkpointing computes again; `selective` computes only attention and activations
again."""

SEQUENCES_OF_ENGINE = 1_024
"""Largest number of sequences that one vLLM engine runs at a time, even if its cache has room for more."""

SPLIT_SHARE = 0.85
"""Assumed speed of each GPU of an engine with several GPUs, as a share of a single GPU's speed. Unmeasured."""

TOKEN_BYTES = 12
"""Number of bytes of a token that passes through the coordinator: its id, log-probability and text."""

MEASURED_GROUPS_PER_S, MEASURED_MB_PER_S = 730.0, 172.0
"""Measured commits of a coordinator on two cores in a second: number of groups of 100 kB, and MB in groups of 400 kB
(docs/operate/performance.md)."""

ENGINE_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Capacity:
    """A split and its estimated step."""

    processor: Processor
    number: int
    """Number of GPUs, or of cores."""
    ranks: int
    engines: int
    """Number of engines; 0 for a run on examples."""
    gpus_per_engine: int
    is_shared: bool
    """True if learner and engine take turns on the same GPU."""
    work: Work
    generation_s: float
    training_s: float
    step_s: float
    age: float
    """Expected age of the trained tokens."""
    sequences_per_engine: float
    memory: Plan
    cost_per_hour: float | None
    """Cost of all GPUs for an hour; None without a price."""

    @property
    def sampled_tokens_per_s(self) -> float:
        """Return the tokens that all engines together sample in a second of generation."""
        return self.work.sampled_tokens / self.generation_s if self.generation_s else 0.0

    @property
    def trained_tokens_per_s(self) -> float:
        return self.work.sampled_tokens / self.step_s

    @property
    def groups_per_s(self) -> float:
        return self.work.groups / self.step_s if self.engines else 0.0

    @property
    def coordinator_mb_per_s(self) -> float:
        size = self.work.completions * (self.work.prompt_tokens + self.work.completion_tokens) * TOKEN_BYTES
        return self.groups_per_s * size / 1e6

    @property
    def coordinator_load(self) -> float:
        """Return the coordinator's load, as a share of the measured capacity."""
        return max(self.groups_per_s / MEASURED_GROUPS_PER_S, self.coordinator_mb_per_s / MEASURED_MB_PER_S)

    @property
    def cost_per_million_tokens(self) -> float | None:
        if self.cost_per_hour is None:
            return None
        return self.cost_per_hour / 3600 / self.trained_tokens_per_s * 1e6

    @property
    def limit(self) -> str:
        if self.coordinator_load > 1:
            return (
                f"the coordinator: {self.groups_per_s:,.0f} groups/s with {self.coordinator_mb_per_s:,.0f} MB/s exceed "
                "what one coordinator was measured to commit; use several runs, each with its own coordinator"
            )
        if not self.engines:
            return "training: a run on examples has no generation"
        if self.is_shared or not self.age:
            longer = "generation" if self.generation_s > self.training_s else "training"
            return f"{longer}: generation and training take turns, and {longer} takes longer"
        if self.generation_s > self.training_s:
            return f"generation: the learner waits {1 - self.training_s / self.step_s:.0%} of a step"
        return f"training: the engines are idle for {1 - self.generation_s / self.step_s:.0%} of a step"


def work_of(spec: RunSpec, prompt_tokens: float | None = None, completion_tokens: float | None = None) -> Work:
    """Return the work of a step. Lengths that are not given are half of the spec's limits."""
    policy = spec.policy
    longest = policy.max_total_sequence_length
    answer = min(policy.generation.max_new_tokens, longest) if spec.samples else longest / 2
    completion = answer / 2 if completion_tokens is None else completion_tokens
    prompt = max(longest - answer, 1) / 2 if prompt_tokens is None else prompt_tokens
    if not (completion > 0 and prompt > 0 and completion + prompt <= longest):
        raise InvalidInput(
            f"mean prompts of {prompt:g} and completions of {completion:g} tokens do not fit into "
            f"policy.max_total_sequence_length {longest}"
        )
    groups, completions = spec.grpo.num_prompts_per_step, spec.grpo.num_generations_per_prompt
    if spec.examples is not None:
        groups, completions = spec.examples.num_examples_per_step, 1
    recomputed = RECOMPUTED.get(str(policy.activation_checkpointing), 0.0)
    return Work(groups, completions, prompt, completion, max(policy.row_tokens, longest), recomputed)


def plan_capacity(
    spec: RunSpec,
    shape: ModelShape,
    processor: Processor,
    number: int,
    *,
    price: float | None = None,
    prompt_tokens: float | None = None,
    completion_tokens: float | None = None,
) -> Capacity:
    """Return the best split. `price` is the price of one GPU for an hour. Raises SpecError with the reason if no split
    fits, InvalidInput for impossible lengths."""
    best: Capacity | None = None
    reasons: list[str] = []
    for ranks, engines, gpus, is_shared in splits(spec, processor, number):
        try:
            made = _capacity(
                spec, shape, processor, number, (ranks, engines, gpus, is_shared), prompt_tokens, completion_tokens
            )
        except SpecError as error:
            reasons.append(str(error))
            continue
        if best is None or made.step_s < best.step_s * (1 - 1e-9):
            best = made
    if best is None:
        reason = reasons[-1] if reasons else "policy.parallel names more ranks than there are processors"
        raise SpecError(f"no division of {number} {processor.name} between learner and engines fits: {reason}")
    return best if price is None else replace(best, cost_per_hour=price * number)


def splits(spec: RunSpec, processor: Processor, number: int) -> Iterator[tuple[int, int, int, bool]]:
    """Yield (learner ranks, engines, GPUs of an engine, whether learner and engine share a GPU), fewer ranks first."""
    if not spec.samples:
        yield number, 0, 0, False
        return
    config = spec.policy.generation.vllm_cfg
    named = config.tensor_parallel_size * config.pipeline_parallel_size
    is_vllm = processor.is_gpu and spec.policy.generation.backend == "vllm"
    sizes = [size for size in ENGINE_SIZES if size >= named] if is_vllm else [1]
    if number == 1:
        yield 1, 1, 1, True
        return
    for ranks in range(1, number):
        if (ranks > 8 and ranks % 8) or (ranks & (ranks - 1) and ranks < 8):
            continue
        for gpus in sizes:
            if engines := (number - ranks) // gpus:
                yield ranks, engines, gpus, False


def _capacity(
    spec: RunSpec,
    shape: ModelShape,
    processor: Processor,
    number: int,
    split: tuple[int, int, int, bool],
    prompt_tokens: float | None,
    completion_tokens: float | None,
) -> Capacity:
    ranks, engines, gpus, is_shared = split
    spec, room = _placed(spec, processor, split), Room(processor.memory_bytes)
    try:
        spec, _ = planned(spec, shape, room, has_vllm=True)
        memory = plan(spec, shape, room)
    except InvalidInput as error:
        raise SpecError(str(error)) from None
    if why_not := refusal(spec, shape, room):
        raise SpecError(why_not)
    work = work_of(spec, prompt_tokens, completion_tokens)
    of_rank = replace(work, groups=max(1, math.ceil(work.groups / ranks)))
    training_s = training_seconds(shape, of_rank, processor.training)
    if not engines:
        return Capacity(
            processor, number, ranks, 0, 0, False, work, 0.0, training_s, training_s, 0.0, 0.0, memory, None
        )
    held = _sequences(spec, memory, work, processor)
    ahead = spec.async_grpo.max_trajectory_age_steps
    slots = min(held, (ahead + 1) * work.sequences / engines)
    speed = gpus if gpus == 1 else gpus * SPLIT_SHARE
    part = replace(work, groups=max(1, math.ceil(work.groups / engines)))
    share = work.groups / engines / part.groups
    generation_s = share * generation_seconds(shape, part, processor.generation, slots) / speed
    in_turn = is_shared or not ahead
    step_s = generation_s + training_s if in_turn else max(generation_s, training_s)
    latency_s = generation_s * min(1.0, slots * engines / work.sequences) if slots else generation_s
    age = float(ahead) if training_s > generation_s else min(float(ahead), 1 + latency_s / step_s)
    return Capacity(
        processor, number, ranks, engines, gpus, is_shared, work, generation_s, training_s, step_s,
        0.0 if not ahead else age, held, memory, None,
    )  # fmt: skip


def _sequences(spec: RunSpec, memory: Plan, work: Work, processor: Processor) -> float:
    if memory.cached_tokens is None:
        return float(spec.policy.generation.batch_size(on_gpu=processor.is_gpu))
    return min(memory.cached_tokens / (work.prompt_tokens + work.completion_tokens), SEQUENCES_OF_ENGINE)


def _placed(spec: RunSpec, processor: Processor, split: tuple[int, int, int, bool]) -> RunSpec:
    """Return the spec with the sizes of a split, for GPUs that are not on this machine."""
    ranks, engines, gpus, is_shared = split
    named: dict[str, object] = {
        "learner_ranks": ranks,
        "rollout_workers": max(engines, 1),
        "learner_gpus": (0,) if processor.is_gpu and is_shared else (),
        "rollout_gpus": (0,) if processor.is_gpu and is_shared else (),
        "reward_gpus": (),
        "device": "auto" if processor.is_gpu else "cpu",
        "gpu_gb": processor.memory_bytes / 1e9 if processor.memory_bytes else None,
    }
    policy = spec.policy
    config = policy.generation.vllm_cfg
    if gpus > config.tensor_parallel_size * config.pipeline_parallel_size:
        size = gpus // config.pipeline_parallel_size
        config = config.model_copy(update={"tensor_parallel_size": size})
        generation = policy.generation.model_copy(update={"vllm_cfg": config})
        policy = policy.model_copy(update={"generation": generation})
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update=named), "policy": policy})
