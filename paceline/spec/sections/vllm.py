"""`policy.generation.vllm_cfg`, and the arguments that `vllm_kwargs` may not set."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from paceline.spec.sections.base import PositiveInt, Section


class VllmSection(Section):
    """Settings of the vLLM engine that have a name in NeMo RL or that Paceline gives another default."""

    tensor_parallel_size: PositiveInt = 1
    """Workers that share each layer."""
    pipeline_parallel_size: PositiveInt = 1
    """Stages that the layers are divided into."""
    data_parallel_size: PositiveInt = 1
    """Replicas of the model within one rollout worker."""
    enforce_eager: bool | None = None
    """Run without graph capture and compilation; unset: true on a CPU, false on GPUs."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of a GPU's memory for weights and KV cache; unset: what the learner leaves on a GPU that both share, by the memory
    plan when the run is submitted, else vLLM's default."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Memory of each worker's KV cache; unset: 1 GiB on a CPU, what gpu_memory_utilization leaves on GPUs."""


RESERVED = {
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer_name",
    "dtype": "policy.generation_precision",
    "max_model_len": "policy.max_total_sequence_length",
    "max_num_seqs": "policy.generation.max_batch_size",
    **{name: f"policy.generation.vllm_cfg.{name}" for name in VllmSection.model_fields},
    **dict.fromkeys(
        (
            "generation_config",
            "load_format",
            "logprobs_mode",
            "skip_tokenizer_init",
            "weight_transfer_config",
            "worker_extension_cls",
        ),
        "",
    ),
}
"""Engine arguments that `vllm_kwargs` may not set, and the setting to use instead; empty for arguments that Paceline
sets."""


def check_vllm_kwargs(kwargs: dict[str, Any]) -> None:
    """Raise ValueError for an argument of RESERVED."""
    for name, value in kwargs.items():
        if name in RESERVED:
            remedy = f"set {RESERVED[name]} instead" if RESERVED[name] else "remove it, Paceline sets it"
            raise ValueError(f"vllm_kwargs has {name}={value!r}; {remedy}")
