"""Exports of one run: the final one, and those that were ordered while it trains.

All ranks make each call together: they gather the weights, and rank 0 writes the folder.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
from torch import nn

from learner.checkpoints.export import export_policy
from learner.checkpoints.export_folder import remove_left_overs
from learner.collectives import FailedElsewhere, broadcast_bytes, succeed_on_all_ranks
from learner.weights.gather import gather_export, merged_export
from paceline.errors import PacelineError, Unavailable
from paceline.files.names import EXPORT, EXPORTS
from paceline.spec import RunSpec
from services.learner.context import RankContext

log = logging.getLogger(__name__)


class RunExports:
    """Exports on the ranks beside rank 0, which take part in gathering alone."""

    def __init__(self, run_id: str, directory: Path, spec: RunSpec, rank: RankContext) -> None:
        self._run_id, self._directory = run_id, directory
        self._spec, self._rank = spec, rank

    def remove_left_overs(self) -> None:
        """Remove the unfinished folders of exports that were killed. Not a collective call."""

    def write_final(self, model: nn.Module) -> Path:
        """Export the trained model and return the folder. Raises what rank 0 met, and FailedElsewhere on the other ranks."""
        path = self._directory / EXPORT
        tensors = self._gather(model)
        succeed_on_all_ranks(lambda: self._write(path, model, tensors), self._rank.device)
        return path

    def carry_out_orders(self, model: nn.Module, step: int) -> None:
        """Make one export for all orders that want the same. One that cannot be written fails its orders, never the run."""
        orders = self._rank.orders.take_exports()
        wanted = broadcast_bytes(json.dumps(orders[0][0] if orders else None).encode())
        order = json.loads(wanted)
        if order is None:
            return  # the client has gone
        name, adapter_only = order
        path = self._directory / EXPORTS / (name or f"step-{step}")
        error = self._export(path, model, adapter_only)
        if error is not None:
            log.error("run %s: an ordered export failed: %s", self._run_id, error)
        for _, waiting in orders:
            if error is not None:
                waiting.set_exception(error)
            else:
                waiting.set_result(str(path))

    def _export(self, path: Path, model: nn.Module, adapter_only: bool) -> PacelineError | None:
        """Return the error that prevented the export, if any. Raises an error after which the ranks may be at different
        points of their collectives."""
        try:
            tensors = self._gather(model, adapter_only)
        except (Unavailable, FailedElsewhere) as error:
            return error  # raised on every rank, before anything travelled
        except Exception as error:  # torch's own, for a lack of memory on the device
            if self._rank.world_size > 1:
                raise
            return _not_written(path, error)
        try:
            self._write(path, model, tensors, adapter_only)
        except PacelineError as error:
            return error
        except (
            Exception
        ) as error:  # transformers, safetensors, the disk and the allocators raise errors of their own
            return _not_written(path, error)
        return None

    def _gather(self, model: nn.Module, adapter_only: bool = False) -> dict[str, torch.Tensor]:
        return gather_export(model, self._rank.device, adapter_only=adapter_only)

    def _write(
        self, path: Path, model: nn.Module, tensors: dict[str, torch.Tensor], adapter_only: bool = False
    ) -> None:
        """Write the gathered weights, on rank 0."""


class Rank0RunExports(RunExports):
    """Exports on rank 0, which writes them as Hugging Face folders."""

    def remove_left_overs(self) -> None:
        """See `RunExports.remove_left_overs`."""
        for folder in (self._directory, self._directory / EXPORTS):
            remove_left_overs(folder)

    def _write(
        self, path: Path, model: nn.Module, tensors: dict[str, torch.Tensor], adapter_only: bool = False
    ) -> None:
        """Replace the folder at `path`, if this run exported it."""
        if not adapter_only:
            tensors = merged_export(model, tensors)
        scoring = self._spec.has_scoring_head
        export_policy(
            path, tensors, self._spec.policy, scoring=scoring, adapter_only=adapter_only, replace=True
        )


def _not_written(path: Path, error: Exception) -> PacelineError:
    return Unavailable(f"{path} could not be written: {type(error).__name__}: {error}")
