"""vLLM's engine arguments, and the environment of its processes, from a run's spec."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from paceline.errors import InvalidInput
from paceline.files.model_source import model_source
from paceline.rollout.vllm.process_guard import ProcessGuard
from paceline.rollout.vllm.requests import LOWEST_TEMPERATURE
from paceline.spec import PolicySection, RunSpec
from paceline.spec.sections.vllm import SpeculativeSection
from paceline.weights.model_layout import generation_dtype, longest_sequence

CPU_KV_CACHE_BYTES = 1 << 30
"""Default size of the KV cache on a CPU, because vLLM would take a fraction of all memory."""
CPU_BATCHED_TOKENS = 4096
"""Largest number of tokens in one step on a CPU, unless the longest sequence has more."""
TRANSFER = "paceline"
"""Name of the weight transfer that `rollout/vllm/worker.py` registers."""


def require_vllm() -> None:
    """Raise InvalidInput, with the remedy, if vLLM cannot run."""
    if importlib.util.find_spec("vllm") is None:
        raise InvalidInput(
            "policy.generation.backend is 'vllm', but vLLM is not installed here; `pip install 'paceline[vllm]'` brings "
            "it for GPUs, docs/use/vllm.md describes vLLM for CPUs, and backend 'native' needs no vLLM"
        )
    if not sys.platform.startswith("linux"):
        raise InvalidInput(
            f"policy.generation.backend is 'vllm', which needs Linux; this is {sys.platform}; use backend 'native'"
        )


def engine_arguments(
    spec: RunSpec, config: PreTrainedConfig, architecture: str, device: str, load_weights: bool
) -> dict[str, Any]:
    """Return the arguments for `vllm.AsyncEngineArgs`, for the model of `config` and of the class `architecture`. vLLM
    gets and returns token ids, so it needs no tokenizer."""
    policy, generation = spec.policy, spec.policy.generation
    if generation.temperature < LOWEST_TEMPERATURE:
        raise InvalidInput(
            f"policy.generation.temperature is {generation.temperature}, but vLLM samples only at {LOWEST_TEMPERATURE} "
            "or above, so the importance ratios would be wrong; raise the temperature, or use backend 'native'"
        )
    settings, on_cpu = generation.vllm_cfg, device == "cpu"
    arguments: dict[str, Any] = {
        "model": model_source(policy.model_name, weights=load_weights),
        "skip_tokenizer_init": True,
        "load_format": "auto" if load_weights else "dummy",
        "dtype": str(generation_dtype(policy, device)).removeprefix("torch."),
        "max_model_len": longest_sequence(policy, config),
        "max_num_seqs": generation.batch_size(on_gpu=not on_cpu),
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # sampling defaults come with each request
        "enable_prefix_caching": True,  # each request salts it with the version of the weights
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "data_parallel_size": settings.data_parallel_size,
        "enforce_eager": on_cpu if settings.enforce_eager is None else settings.enforce_eager,
        "worker_extension_cls": "paceline.rollout.vllm.worker.WorkerExtension",
        "weight_transfer_config": {"backend": TRANSFER},
        "seed": spec.seed,
    }
    if settings.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
    if settings.kv_cache_memory_bytes is not None or on_cpu:
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_memory_bytes or CPU_KV_CACHE_BYTES
    if on_cpu:
        # A prompt in parts requires that seeded generators step back, which PyTorch's generators on CPUs cannot.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(CPU_BATCHED_TOKENS, arguments["max_model_len"])
    if settings.speculative is not None:
        arguments["speculative_config"] = _speculative_config(settings.speculative, config)
    overrides: dict[str, Any] = {}
    if not config.architectures:  # as in a config that was saved without its model
        overrides["architectures"] = [architecture]
    if policy.float32_head:
        overrides["head_dtype"] = "float32"
    if overrides:
        arguments["hf_overrides"] = overrides
    if on_cpu and generation.vllm_kwargs.get("enable_chunked_prefill"):
        raise InvalidInput(
            "policy.generation.vllm_kwargs has enable_chunked_prefill=True, but on a CPU vLLM cannot compute a seeded "
            "prompt in parts; remove it"
        )
    return arguments | generation.vllm_kwargs


def _speculative_config(speculative: SpeculativeSection, policy: PreTrainedConfig) -> dict[str, Any]:
    """Return vLLM's settings of speculative decoding for the policy's config. Drafts are the draft model's likeliest
    tokens, because vLLM draws others without the request's seed. Raises InvalidInput if the draft model does not have
    the policy's tokens."""
    config: dict[str, Any] = {
        "method": speculative.method,
        "num_speculative_tokens": speculative.num_speculative_tokens,
    }
    if speculative.model is None:
        lookup = {
            "prompt_lookup_max": speculative.prompt_lookup_max,
            "prompt_lookup_min": speculative.prompt_lookup_min,
        }
        return config | lookup
    field = "policy.generation.vllm_cfg.speculative.model"
    folder = model_source(speculative.model, field, weights=True)
    sizes = [each.get_text_config().vocab_size for each in (AutoConfig.from_pretrained(folder), policy)]
    if sizes[0] != sizes[1]:
        raise InvalidInput(
            f"{field} {speculative.model!r} has {sizes[0]} tokens, but the policy has {sizes[1]}; name a model with the "
            "policy's tokenizer"
        )
    draft = {"model": folder, "draft_load_config": {"load_format": "auto"}, "draft_sample_method": "greedy"}
    return config | draft


def engine_config(arguments: dict[str, Any], guard: ProcessGuard, device: str) -> Any:
    """Return vLLM's configuration, made in its processes' environment. Raises InvalidInput with vLLM's message."""
    _set_environment(guard, device)
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        return AsyncEngineArgs(**arguments).create_engine_config()
    except (TypeError, ValueError, NotImplementedError) as error:
        raise InvalidInput(f"vLLM refuses the settings of policy.generation: {error}") from error


def _set_environment(guard: ProcessGuard, device: str) -> None:
    """Set the environment that vLLM's processes inherit. The user's variables stay, unless the guard sets them too."""
    os.environ.update(guard.environment)
    os.environ["VLLM_RPC_BASE_PATH"] = guard.directory
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if device == "cpu":
        # nobind: otherwise several engines of one host would all be bound to the first cores. No compilation, because
        # the engine runs eagerly, and the sampler's log-probabilities alone would need a C++ compiler and 15 s.
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def replicas(policy: PolicySection) -> int:
    config = policy.generation.vllm_cfg
    return config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
