"""Extension of vLLM's worker processes: it reads new weights, and loads them while generation is paused.

vLLM imports this module in every worker, because it is named as `worker_extension_cls`; the import registers the weight
transfer. An update has two parts. `paceline_read_weights` maps the weights and verifies this worker's part on a thread,
while the worker continues to decode. Then, between `start_weight_update` and `finish_weight_update`, each worker loads
its part of all tensors at once. So no step that can fail for an external reason happens while the model has weights of
two versions.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config.utils import replace
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from paceline.rollout.vllm.receipts import ReadOrder, ReadWeights, SegmentReader

BACKEND = "paceline"
"""Name of the transfer within vLLM."""


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: the transfer needs no preparation."""


@dataclass
class LoadRead(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Order to load the weights that `paceline_read_weights` has read."""


class SegmentTransfer(WeightTransferEngine[NoInit, LoadRead]):  # type: ignore[misc]
    """Transfer of weights from a segment of host memory; see the module."""

    init_info_cls = NoInit
    update_info_cls = LoadRead
    reader: SegmentReader | None = None
    """Reader of this worker; made when the first order arrives, because the order has the worker's number."""

    def read(self, order: ReadOrder, reader: int) -> None:
        """Begin to map and verify weights; `receive_weights` finds the outcome as soon as the receipt is written."""
        if self.reader is None:
            self.reader = SegmentReader(reader, self.device)
        self._weights: Future[ReadWeights] = Future()

        def run(reader: SegmentReader, outcome: Future[ReadWeights]) -> None:
            try:
                reader.read(order, outcome.set_result)
            except BaseException as error:
                if not outcome.done():
                    outcome.set_exception(error)

        threading.Thread(target=run, args=(self.reader, self._weights), name="paceline-weights", daemon=True).start()

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Put every layer into the state in which a checkpoint's tensors can be loaded."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: LoadRead) -> None:
        """Load this worker's part of every tensor. The receipts came first, so the tensors are mapped."""
        weights = self._weights.result(timeout=0)
        del self._weights
        assert self.reader is not None
        self.reader.load(self.model, weights)

    def finish_weight_update(self) -> None:
        """Bring the layers back into the form that the kernels use."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        assert self.reader is not None
        self.reader.finish(lambda: finalize_layerwise_reload(self.model, self.model_config))

    def shutdown(self) -> None:
        """Do nothing: mappings end with the process."""


class WorkerExtension:
    """Mixed into vLLM's worker class; its methods are called through `collective_rpc`."""

    rank: int
    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: SegmentTransfer

    def paceline_make_stage_buffers(self) -> None:
        """Make the memory in which a later pipeline stage receives the earlier stage's output. vLLM makes this memory
        only during its warm-up, and skips the warm-up on CPUs if compilation is off."""
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def paceline_read_weights(self, **order: Any) -> None:
        """Begin to read weights, see `ReadOrder`. Readers are numbered through all replicas of data parallelism."""
        parallel = self.vllm_config.parallel_config
        reader = parallel.data_parallel_index * parallel.world_size + self.rank
        self.weight_transfer_engine.read(ReadOrder(**order), reader)

    def paceline_loaded_bytes(self) -> int:
        """Return the bytes that this worker loads of a version; 0 before the first."""
        reader = self.weight_transfer_engine.reader
        return reader.loaded_bytes if reader is not None else 0


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Return [num_tokens]: each sequence's entry of `x`, once for each of its drafted tokens. `cu_num_tokens` has the
    cumulative numbers of drafted tokens."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def repair_rejection_sampler(sampler: Any) -> None:
    """Repair two faults of vLLM 0.32 on CPUs without Triton, in its module `sampler`: temperature and top_p of drafted
    tokens are undefined memory, and top_k ends the engine in a step without drafts."""
    constrained = sampler.apply_sampling_constraints

    def apply_sampling_constraints(logits: Tensor, *others: Any) -> Tensor:
        result: Tensor = constrained(logits, *others) if len(logits) else logits
        return result

    sampler.expand_batch_to_tokens = expand_batch_to_tokens
    sampler.apply_sampling_constraints = apply_sampling_constraints


def repair_draft_model(proposer: Any) -> None:
    """Repair a fault of vLLM 0.32 in its class `proposer`: a draft model gets random weights if the policy's weights
    come later."""
    config_of = proposer._create_draft_vllm_config

    def create_draft_vllm_config(self: Any) -> Any:
        return replace(config_of(self), load_config=get_draft_load_config(self.vllm_config))

    proposer._create_draft_vllm_config = create_draft_vllm_config


repair_draft_model(DraftModelProposer)
if current_platform.is_cpu():
    repair_rejection_sampler(rejection_sampler)

if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SegmentTransfer)
