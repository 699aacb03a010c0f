"""Reports of vLLM's scheduler after each step: a stat logger that keeps the latest numbers for the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from paceline.rollout.vllm.concurrency import StepReport


class Reports(StatLoggerBase):  # type: ignore[misc]
    """The reports of one engine core (several with data parallelism), on the engine's loop. `on_step` is called with
    the number of sequences that were preempted in the step."""

    def __init__(self, on_step: Callable[[int], None], vllm_config: Any, engine_index: int = 0) -> None:
        self._on_step = on_step
        cache = vllm_config.cache_config
        self.kv_tokens = (cache.num_gpu_blocks or 0) * (cache.block_size or 0)
        self.latest = StepReport(0, 0, 0.0, 0)
        self.prefix_hits = 0
        """Number of prompt tokens that were in the prefix cache."""
        self.drafted, self.accepted = 0, 0
        """Numbers of tokens that speculative decoding drafted, and of those that the policy accepted."""
        self.last_token_s = 0.0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Store a step's numbers; vLLM calls it after each step's output."""
        preempted = 0
        if iteration_stats is not None:
            preempted = iteration_stats.num_preempted_reqs
            if iteration_stats.num_generation_tokens:
                self.last_token_s = time.monotonic()
        if scheduler_stats is not None:
            self.prefix_hits += scheduler_stats.prefix_cache_stats.hits
            if (drafts := scheduler_stats.spec_decoding_stats) is not None:
                self.drafted += drafts.num_draft_tokens
                self.accepted += drafts.num_accepted_tokens
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.latest = StepReport(
                scheduler_stats.num_running_reqs, waiting, scheduler_stats.kv_cache_usage, preempted
            )
            self._on_step(preempted)

    def log_engine_initialized(self) -> None:
        """Do nothing."""
