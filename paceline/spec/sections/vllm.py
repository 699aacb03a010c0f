"""`policy.generation.vllm_cfg` and `vllm_kwargs`: the vLLM engine, speculative decoding, and its engine arguments."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline.spec.sections.base import PositiveInt, Section

NOT_SPECULATED = {
    "min_p": "vLLM does not apply it to drafted tokens",
    "min_new_tokens": "vLLM forbids stop tokens at other positions than without drafts",
}
"""Sampling parameters that are refused with speculative decoding, with the reason as a clause."""


class SpeculativeSection(Section):
    """Speculative decoding: cheap drafts of the next tokens, which one pass of the policy accepts or replaces by
    rejection sampling (arXiv:2211.17192), so that the distribution stays the policy's; docs/use/vllm.md."""

    method: Literal["ngram", "draft_model"]
    """Source of the drafts. ngram: the tokens after the last earlier occurrence of the newest tokens, in the same
    sequence. draft_model: the likeliest tokens of a smaller model, which is not trained."""
    num_speculative_tokens: Annotated[int, Field(gt=0, le=32)]
    """Number of drafted tokens of each sequence in one pass."""
    model: str | None = None
    """The draft model of `draft_model`, with the policy's tokens: a local folder, a folder at an fsspec URL, or a name
    on the Hugging Face hub."""
    prompt_lookup_max: PositiveInt = 4
    """For ngram: largest number of newest tokens that are searched for."""
    prompt_lookup_min: PositiveInt = 2
    """For ngram: smallest number of newest tokens that are searched for."""

    @model_validator(mode="after")
    def _check(self) -> SpeculativeSection:
        if (self.method == "draft_model") != (self.model is not None):
            raise ValueError(
                f"method {self.method!r} with model {self.model!r}; only draft_model takes a model, and it needs one"
            )
        if self.model is not None and self.model.startswith("run:"):
            raise ValueError(f"model {self.model!r}: run:ID cannot name a draft model; write the export's folder")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} exceeds prompt_lookup_max {self.prompt_lookup_max}"
            )
        return self


class VllmSection(Section):
    """Settings of the vLLM engine that have a name in NeMo RL, or a default that differs from vLLM's."""

    tensor_parallel_size: PositiveInt = 1
    """Workers that share each layer."""
    pipeline_parallel_size: PositiveInt = 1
    """Stages into which the layers are divided."""
    data_parallel_size: PositiveInt = 1
    """Replicas of the model within one rollout worker."""
    enforce_eager: bool | None = None
    """Run without graph capture and compilation; unset: true on a CPU, false on GPUs."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of a GPU's memory for weights and KV cache. Unset: vLLM's default, or, on a GPU shared with the learner,
    the rest of the memory, chosen by the memory plan when the run is submitted."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Memory of each worker's KV cache; unset: 1 GiB on a CPU, on GPUs the rest of gpu_memory_utilization."""
    speculative: SpeculativeSection | None = None
    """Speculative decoding; unset: off."""

    @model_validator(mode="after")
    def _check(self) -> VllmSection:
        for axis in ("tensor", "pipeline", "data"):
            size = getattr(self, f"{axis}_parallel_size")
            if self.speculative is not None and size > 1:
                raise ValueError(
                    f"speculative with {axis}_parallel_size {size}: log-probabilities were not tested with both; remove one"
                )
        return self


SET = "remove it, Paceline sets it"
WEIGHTS = "remove it: weights come from the learner, and files only from policy.model_name"
MODEL = "remove it: the learner would compute another model than the engine"
ROUNDS = "remove it: sampled log-probabilities would not be those of a full forward pass"
TEXT = "remove it: the engine gets token ids of text, and returns token ids"
LORA = "set policy.lora_cfg instead, whose adapter is merged before it is loaded"
PROCESSES = "remove it: a rollout worker starts all processes of its engine on its own host"
SERVER = "remove it: it belongs to vLLM's server, which Paceline does not use"
UNTESTED = "remove it: log-probabilities and versions were not tested with it"
SPECULATIVE = "set policy.generation.vllm_cfg.speculative instead"
_REFUSED: tuple[tuple[str, str], ...] = (
    ("set policy.model_name instead", "model"),
    ("set policy.tokenizer_name instead", "tokenizer"),
    ("set policy.generation_precision instead", "dtype"),
    ("set policy.max_total_sequence_length instead", "max_model_len"),
    ("set policy.generation.max_batch_size instead", "max_num_seqs"),
    (SPECULATIVE, "speculative_config spec_method spec_model spec_tokens"),
    (
        SET,
        """generation_config override_generation_config load_format logprobs_mode max_logprobs skip_tokenizer_init
        weight_transfer_config worker_extension_cls worker_cls scheduler_cls runner convert disable_log_stats
        shutdown_timeout stream_interval""",
    ),
    (
        WEIGHTS,
        """model_weights download_dir safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size ignore_patterns model_loader_extra_config use_tqdm_on_load pt_load_map_location
        max_parallel_loading_workers revision code_revision tokenizer_revision enable_ep_weight_filter""",
    ),
    ("remove it: set the environment variable HF_TOKEN of the worker", "hf_token"),
    (
        MODEL,
        """hf_config_path hf_overrides model_class_overrides config_format model_impl trust_remote_code
        disable_sliding_window swa_bounded_replay kv_sharing_fast_prefill diffusion_config engram_config pooler_config
        logits_processors watermark_config reasoning_config""",
    ),
    (
        ROUNDS,
        """quantization quantization_config allow_deprecated_quantization kv_cache_dtype kv_cache_dtype_skip_layers
        mamba_cache_dtype mamba_ssm_cache_dtype enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds""",
    ),
    (
        TEXT,
        """tokenizer_mode enable_prompt_embeds allowed_local_media_path allowed_media_domains language_model_only
        limit_mm_per_prompt enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_kwargs
        mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb
        mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin io_processor_plugin renderer_num_workers
        skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device
        mm_ipc_gpu_memory_gb mm_device_do_normalize disable_chunked_mm_input enable_mm_processor_stats
        structured_outputs_config aux_output_config reasoning_parser reasoning_parser_plugin tokens_only
        return_sampling_mask enable_return_routed_experts enable_trace_replay""",
    ),
    (
        LORA,
        """enable_lora max_loras max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype
        lora_target_modules enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format
        enable_moe_shared_loras max_lora_cls_labels""",
    ),
    (
        PROCESSES,
        """distributed_executor_backend master_addr master_port nnodes node_rank device_ids data_parallel_rank
        data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
        data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend
        _api_process_count _api_process_rank ray_workers_use_nsight enable_elastic_ep elastic_ep_max_dp_size
        enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator
        enable_nccl_comm_suspend fault_tolerance_config enable_fault_tolerance kv_transfer_config kv_events_config
        ec_transfer_config ec_manager_config fail_on_environ_validation""",
    ),
    (
        SERVER,
        """served_model_name max_num_active_seqs max_num_queued_reqs max_num_queued_tokens aggregate_engine_logging
        show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics
        kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics
        enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details jit_monitor_mode
        jit_monitor_verbose profiler_config logging_config log_level log_config_file enable_log_requests
        additional_config""",
    ),
    (
        UNTESTED,
        """cudagraph_capture_sizes max_cudagraph_capture_size ir_op_priority numa_bind numa_bind_nodes numa_bind_cpus
        prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend dcp_q_replicate
        dcp_kv_cache_interleave_size cp_kv_cache_interleave_size enable_hc_sp enable_expert_parallel
        enable_batch_sharded_sampling moe_backend linear_backend sparse_indexer_topk_backend all2all_backend enable_dbo
        ubatch_size dbo_decode_token_threshold dp_sync_interval dbo_prefill_token_threshold
        disable_nccl_for_dp_synchronization eplb_config enable_eplb expert_placement_strategy prefix_caching_hash_algo
        prefix_cache_retention_interval prefix_match_unit disable_cascade_attn offload_backend cpu_offload_gb
        cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step offload_params
        max_num_scheduled_tokens long_prefill_token_threshold long_prefill_token_threshold_adaptive use_fp64_gumbel
        enable_shm_tensor_arena disable_hybrid_kv_cache_manager compilation_config attention_config mamba_config
        kernel_config enable_flashinfer_autotune attention_backend mamba_block_size mamba_cache_mode
        enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm mamba_backend mamba_ssu_algorithm
        scheduling_policy optimization_level performance_mode kv_offloading_size kv_offloading_backend
        gdn_prefill_backend kda_prefill_backend kda_decode_backend""",
    ),
)
REFUSED: dict[str, str] = {
    **{name: reason for reason, names in _REFUSED for name in names.split()},
    **{
        name: f"set policy.generation.vllm_cfg.{name} instead"
        for name in VllmSection.model_fields
        if name != "speculative"
    },
}
"""Arguments of vLLM's `AsyncEngineArgs` (0.32) that `vllm_kwargs` may not have, each with the remedy."""
ALLOWED: dict[str, str] = {
    "async_scheduling": "prepare the next step during the current one",
    "block_size": "tokens in a block of the KV cache",
    "cpu_distributed_timeout_seconds": "limit of a wait between processes on CPUs",
    "disable_custom_all_reduce": "let NCCL add up the parts of a layer",
    "distributed_timeout_seconds": "limit of a wait between processes",
    "enable_chunked_prefill": "compute a long prompt in several steps; only false on a CPU",
    "enable_prefix_caching": "keep the keys and values of shared prompts",
    "max_num_batched_tokens": "limit of the tokens of a step",
    "num_gpu_blocks_override": "number of blocks of the KV cache",
    "prefill_schedule_interval": "steps between two new prompts",
    "scheduler_reserve_full_isl": "begin a prompt only if the KV cache has room for all of it",
    "seed": "seed of random numbers that no request sets; every request sets its own",
    "watermark": "share of the KV cache that is kept free for running sequences",
}
"""Arguments that `vllm_kwargs` may have, with their meaning: each was tested for exact log-probabilities and versions."""


def check_vllm_kwargs(kwargs: dict[str, Any]) -> None:
    """Raise ValueError for an argument that is not in ALLOWED."""
    for name, value in kwargs.items():
        if name in ALLOWED:
            continue
        given = name if name == "hf_token" else f"{name}={value!r:.80}"
        known = get_close_matches(name, ALLOWED, 1) or sorted(ALLOWED)
        remedy = REFUSED.get(name, f"no such argument was tested; remove it, or write {', '.join(known)}")
        raise ValueError(f"vllm_kwargs has {given:.200}; {remedy}")
