"""Estimates a run's memory from its spec and the model's sizes alone, without loading anything. A GB is 10⁹ bytes.
`docs/operate/performance.md`, "Memory plan", compares the figures with measurements."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import counted
from paceline.models.loading import resolved_dtype
from paceline.models.shape import ModelShape, read_shape
from paceline.spec import PolicySection, RunSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PROCESS_BYTES = 300_000_000
"""Bytes of a process on CPUs with torch and transformers, before it loads a model."""
CONTEXT_BYTES = 1_000_000_000
"""Bytes that CUDA, NCCL and cuBLAS take on a GPU for each process."""
SAMPLER_BYTES = 500_000_000
"""Bytes of a rollout worker on CPUs, before it loads a model."""

HEAD_COPIES = 3
"""Number of tiles of float32 logits that exist at the same time."""
HEAD_TILE = 16_384
"""Width of a tile of logits, in tokens of the vocabulary (`paceline.learner.model.logprobs.VOCABULARY_TILE`)."""
LARGE_TENSOR_BYTES = 8 << 20
"""The memory of a tensor of at least this size returns to the host when freed (`paceline.host.resources`)."""
HEAP_WASTE = 1.3
"""Bytes of holes in the heap on CPUs for each byte of a pass's tensors below LARGE_TENSOR_BYTES. glibc before 2.38
never reuses an aligned block for one of the same size (https://sourceware.org/bugzilla/show_bug.cgi?id=14581)."""
LEAST_CACHE_ROWS = 8
GATHERED_LAYERS = 2
"""Number of layers whose weights FSDP has gathered at the same time: the current one and the next."""

REMEDIES = (
    "policy.activation_checkpointing=full, policy.optimizer.state_dtype=bfloat16, a smaller policy.train_mb_tokens or "
    "policy.lora_cfg.enabled=true need less memory"
)


@dataclass(frozen=True)
class Estimate:
    """Estimated bytes of each process for each purpose."""

    shape: ModelShape
    learner: Mapping[str, int]
    """Bytes of one learner rank by purpose, without activations; for a rank on a GPU, bytes in the GPU's memory."""
    activations: int
    """Bytes of the activations of a rank's full micro-batch and a tile of logits, beyond what gradients use later."""
    micro_batch_tokens: int
    sampler: Mapping[str, int] = field(default_factory=dict)
    """Bytes of one rollout worker with the native engine, by purpose; empty for vLLM, which uses a given share."""
    learner_on_gpu: bool = False
    sampler_on_gpu: bool = False
    offloaded: int = 0
    """Bytes of host memory of a rank on a GPU with `policy.cpu_offload` or `policy.optimizer.offload`."""
    kept_versions: int = 0
    """Bytes of host memory of a rank for the comparison of samplers: its shards of older versions and, during a
    comparison, of the current version. On CPUs these bytes are part of `learner`."""

    @property
    def learner_bytes(self) -> int:
        """Bytes of a learner rank with a full micro-batch."""
        return sum(self.learner.values()) + self.activations

    @property
    def sampler_bytes(self) -> int:
        return sum(self.sampler.values())


def estimate(
    spec: RunSpec,
    shape: ModelShape,
    *,
    shards: int | None = None,
    learner_on_gpu: bool | None = None,
    sampler_on_gpu: bool | None = None,
) -> Estimate:
    """Return the memory of a learner's rank and of a rollout worker. Each of S shards holds 1/S of weights, gradients
    and moments: 4·P, 4·T and 2·s·T bytes for P parameters of which T are trained, with s bytes of
    `optimizer.state_dtype`. On CPUs rank 0 also holds the published version, as wide as the sampler's weights. A
    sampler holds its weights, the next version's weights during a transfer, and keys and values of sequences: of all
    sequences of the run, as if no other worker had any, and of requests from outside the run, up to max_batch_size
    sequences in all. `shards` ranks divide a copy of the model; None: as in `policy.parallel`, by default all ranks.
    `learner_on_gpu` and `sampler_on_gpu` say where both compute; None: on GPUs if the spec names GPUs for them."""
    policy = spec.policy
    shards = shards or shards_of(policy, spec.cluster.learner_ranks)
    on_gpu = bool(spec.cluster.learner_gpus) if learner_on_gpu is None else learner_on_gpu
    if sampler_on_gpu is None:
        sampler_on_gpu = bool(spec.cluster.rollout_gpus)
    compute = _bytes_of(policy.precision, on_gpu)
    generation = _bytes_of(policy.generation_precision, sampler_on_gpu)
    lora = policy.lora_cfg
    trained = lora.dim * shape.adapted_rows if lora.enabled else shape.parameters
    learner = _state(spec, shape, trained, shards, compute)
    offloaded = sum(learner.values()) if on_gpu and policy.cpu_offload else 0
    if offloaded:
        learner = {}
    elif on_gpu and policy.optimizer.offload:
        offloaded = learner.pop("moments")
    if spec.frozen_policy is not None and not spec.pool_serves_reference and not lora.enabled:
        learner["reference"] = compute * shape.parameters // shards
    is_sharded = shards > 1 or compute < DTYPE_BYTES["float32"]
    if is_sharded:
        learner["gathered"] = _gathered_bytes(shape, compute, on_gpu)
    if spec.samples and not on_gpu and spec.weights.channel == "collective":
        learner["published"] = generation * trained  # the next one is gathered while there are no gradients
    width = DTYPE_BYTES["float32"] if lora.enabled else generation
    kept = spec.num_kept_versions * width * trained // shards
    if kept and on_gpu:
        kept += DTYPE_BYTES["float32"] * trained // shards
    elif kept:  # there are no gradients during a comparison, so the current version finds room
        learner["older versions"] = kept
    whole = tokens_of_update(spec)
    tokens = max(min(policy.row_tokens, whole), policy.max_total_sequence_length)
    if not on_gpu:
        learner["holes in the heap"] = _heap_waste(shape, tokens, compute)
    learner = {"process": CONTEXT_BYTES if on_gpu else PROCESS_BYTES, **learner}
    sampler = {}
    if spec.samples and policy.generation.backend != "vllm":
        sampler = {
            "process": CONTEXT_BYTES if sampler_on_gpu else SAMPLER_BYTES,
            "weights": generation * shape.parameters,
            "incoming": 0 if sampler_on_gpu else generation * trained,
            "key-value cache": cache_rows(_sequences(spec), policy.generation.batch_size(on_gpu=sampler_on_gpu))
            * policy.max_total_sequence_length
            * key_value_bytes(shape, generation),
        }
    at_the_head = _activation_bytes(policy, shape, tokens, compute)
    if on_gpu:
        at_the_head += _copied_prompt_bytes(spec, shape, tokens, compute)
    # Gradients of the embedding in addition to earlier micro-batches': the head's at the start, the lookup's at the
    # end.
    embedding = 0 if is_sharded or lora.enabled else compute * shape.embedding
    if whole <= tokens:  # gradients of a single micro-batch grow while its activations are freed
        at_the_head -= min(at_the_head, learner.get("gradients", 0) - embedding)
    activations = max(at_the_head + embedding, (2 if shape.tied else 1) * embedding)
    return Estimate(shape, learner, activations, tokens, sampler, on_gpu, sampler_on_gpu, offloaded, kept)


def shards_of(policy: PolicySection, ranks: int) -> int:
    """Return the number of ranks that divide one copy of the model, as in `policy.parallel`; by default all ranks."""
    replicate, shard = policy.parallel.replicate, policy.parallel.shard
    if shard != "auto":
        return shard
    return max(ranks // (1 if replicate == "auto" else replicate), 1)


def tokens_of_update(spec: RunSpec) -> int:
    """Return the largest number of tokens that a rank trains in one update."""
    policy = spec.policy
    sequences = (
        spec.examples.num_examples_per_step
        if spec.examples is not None
        else spec.grpo.num_prompts_per_step * spec.grpo.num_generations_per_prompt
    )
    return (
        -(-sequences // (spec.cluster.learner_ranks * policy.num_updates_per_step)) * policy.max_total_sequence_length
    )


def cache_rows(sequences: int, most: int) -> int:
    """Return the rows of the native engine's cache for this number of sequences: 8 and its doubles, but not over `most`."""
    rows = LEAST_CACHE_ROWS
    while rows < min(sequences, most):
        rows *= 2
    return min(rows, most)


def _sequences(spec: RunSpec) -> int:
    """Return how many sequences the run samples at most at a time: all open groups, as the exchange's `admissible` bounds
    them, and one evaluation. An agent's program may send any number of requests."""
    grpo = spec.grpo
    if spec.environment.agent or spec.environment.command:
        return sys.maxsize
    groups = (spec.async_grpo.max_trajectory_age_steps + 1) * grpo.num_prompts_per_step
    is_evaluated = grpo.val_period or grpo.val_at_start or grpo.val_at_end
    evaluated = grpo.max_val_samples * grpo.val_samples_per_prompt if is_evaluated else 0
    return groups * grpo.num_generations_per_prompt + evaluated


def _activation_bytes(policy: PolicySection, shape: ModelShape, tokens: int, compute: int) -> int:
    """Return the bytes for the backward pass of a micro-batch, with a tile of logits; `compute` is a number's bytes."""
    layer, hidden = _saved_bytes(policy, shape, compute), compute * shape.hidden
    # backward pass of a layer, in bytes per token: arrays of the MLP's width in addition to the saved ones
    if policy.activation_checkpointing == "none":
        kept, backward = shape.layers * layer, 6 * compute * shape.mlp
    else:  # one layer is recomputed, and its saved arrays are freed along the way
        kept, backward = shape.layers * hidden, layer + 3 * compute * shape.mlp
    if policy.activation_checkpointing == "selective":  # results of the products, in addition to the layer's input
        products = 2 * shape.hidden + _heads_width(shape) + 2 * shape.mlp
        kept += shape.layers * compute * (products + shape.experts_per_token * shape.hidden)
    kept += 3 * 4 * shape.hidden  # the last hidden states, those that predict, and their gradient
    tile = 4 * min(policy.logprob_chunk_tokens, tokens) * min(shape.vocabulary, HEAD_TILE)
    return tokens * kept + max(HEAD_COPIES * tile, tokens * backward)


def _copied_prompt_bytes(spec: RunSpec, shape: ModelShape, tokens: int, compute: int) -> int:
    """Return the most bytes of the copies of shared prompts before each further completion on a GPU: keys and values,
    and in float32, without flash attention, queries and results too. Each layer that is kept or recomputed has these
    copies, and one layer has their gradient too."""
    completions = spec.completions_per_prompt
    prompts = min(tokens, -(-tokens_of_update(spec) // completions))
    layers = 1 + (shape.layers if spec.policy.activation_checkpointing == "none" else 1)
    width = 2 * shape.key_value if compute < DTYPE_BYTES["float32"] else _heads_width(shape)
    return (completions - 1) * prompts * layers * width * compute


def _heap_waste(shape: ModelShape, tokens: int, compute: int) -> int:
    """Return the bytes of holes that the tensors below LARGE_TENSOR_BYTES leave in the heap."""
    widths = [*[shape.hidden] * 8, *[shape.attention] * 2, *[shape.key_value] * 2, *[shape.mlp] * 4]
    small = sum(width for width in widths if tokens * width * compute < LARGE_TENSOR_BYTES)
    return int(HEAP_WASTE * shape.layers * tokens * small * compute)


def _heads_width(shape: ModelShape) -> int:
    """Return the width of queries, keys, values and the heads' results together."""
    return 2 * (shape.attention + shape.key_value)


def _saved_bytes(policy: PolicySection, shape: ModelShape, compute: int) -> int:
    """Return the bytes per token that one layer keeps for the backward pass, as measured with autograd's hooks."""
    heads = _heads_width(shape)
    experts = 2 * shape.experts_per_token * shape.hidden
    if compute == DTYPE_BYTES["float32"]:
        streams = 5 if policy.lora_cfg.enabled else 8
        return 4 * (streams * shape.hidden + heads + experts + 4 * shape.mlp)
    return 16 * shape.hidden + compute * (2 * shape.hidden + heads + experts + 4 * shape.mlp)


def _state(spec: RunSpec, shape: ModelShape, trained: int, shards: int, compute: int) -> dict[str, int]:
    policy = spec.policy
    weights = 4 * trained + compute * shape.parameters if policy.lora_cfg.enabled else 4 * shape.parameters
    state = {
        "weights": weights // shards,
        "gradients": 4 * trained // shards,
        "moments": 2 * DTYPE_BYTES[policy.optimizer.state_dtype] * trained // shards,
    }
    if spec.value_policy is not None:
        moments = 2 * DTYPE_BYTES[spec.value.optimizer.state_dtype]
        size = _size_of_value_model(spec, shape)
        state["value model"] = (8 + moments) * size // shards
    return state


def _size_of_value_model(spec: RunSpec, shape: ModelShape) -> int:
    assert spec.value_policy is not None
    name = spec.value_policy.model_name
    other = None if name == spec.policy.model_name else read_shape(name)
    return shape.parameters if other is None else other.parameters


def _gathered_bytes(shape: ModelShape, compute: int, on_gpu: bool) -> int:
    """Return the bytes of gathered weights and of gradients before they are sharded; on CPUs all weights stay gathered."""
    unit = max(shape.layer_parameters, shape.embedding)
    weights = GATHERED_LAYERS * shape.layer_parameters + shape.embedding if on_gpu else shape.parameters
    return compute * weights + (compute + 4) * unit


def key_value_bytes(shape: ModelShape, generation: int) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    return 2 * shape.key_value * shape.layers * generation


def _bytes_of(precision: str, on_gpu: bool) -> int:
    return DTYPE_BYTES[resolved_dtype(precision, "cuda" if on_gpu else "cpu")]


def shortage(spec: RunSpec, free_bytes: int) -> str:
    """Return a warning with numbers if the run's processes on CPUs take more than `free_bytes`; else, and for a model
    whose config.json is not on this machine, an empty text."""
    shape = read_shape(spec.policy.model_name)
    if shape is None:
        return ""
    needed = estimate(spec, shape)
    learners = 0 if needed.learner_on_gpu else spec.cluster.learner_ranks * needed.learner_bytes
    samplers = 0 if needed.sampler_on_gpu else spec.cluster.rollout_workers * needed.sampler_bytes
    if learners + samplers <= free_bytes:
        return ""
    return f"{sentence(needed, spec)}; {gigabytes(free_bytes)} are free here. {REMEDIES}"


def sentence(needed: Estimate, spec: RunSpec) -> str:
    roles = [
        f"{counted(spec.cluster.learner_ranks, 'learner rank')} with {gigabytes(needed.learner_bytes)}, of which "
        f"{gigabytes(needed.activations)} in a full micro-batch of {needed.micro_batch_tokens:,} tokens"
    ]
    if needed.sampler:
        roles.append(
            f"{counted(spec.cluster.rollout_workers, 'rollout worker')} with {gigabytes(needed.sampler_bytes)}"
        )
    return f"a model of {needed.shape.parameters / 1e6:,.0f} M parameters takes an estimated {' and '.join(roles)}"


def gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
