"""Exports of one run: the final one, and those that are ordered while it trains. All ranks make each call together:
rank 0 writes the folder from the pieces of tensors that it gathers from all ranks."""

from __future__ import annotations

import json
import logging
import os

import torch
from torch import nn

from paceline.errors import PacelineError, Unavailable
from paceline.files.names import EXPORT, EXPORTS
from paceline.files.storage import Folder
from paceline.learner.checkpoints.export import export_adapter, export_live
from paceline.learner.checkpoints.export_folder import remove_left_overs
from paceline.learner.collectives import broadcast_bytes, succeed_on_all_ranks
from paceline.learner.weights.gather import gather_weights
from paceline.models.export_origin import Origin
from paceline.models.loading import resolved_dtype
from paceline.services.learner.context import RankContext
from paceline.spec import RunSpec

log = logging.getLogger(__name__)


class RunExports:
    """Exports of one run, on each rank."""

    def __init__(self, run_id: str, directory: str | os.PathLike[str], spec: RunSpec, rank: RankContext) -> None:
        """`directory` is the path or fsspec URL of the run's large files."""
        self._run_id, self._directory = run_id, Folder(directory)
        self._spec, self._rank = spec, rank

    def remove_left_overs(self) -> None:
        """Remove the unfinished folders of exports that were killed, on rank 0. Not a collective call."""
        if self._rank.place.rank == 0:
            for folder in (self._directory, self._directory / EXPORTS):
                if folder.local is not None:
                    remove_left_overs(folder.local)

    def write_final(self, model: nn.Module, origin: Origin) -> Folder:
        """Export the trained model, with `origin` in its manifest. Raises rank 0's error on rank 0, and FailedElsewhere
        on the other ranks."""
        path = self._directory / EXPORT
        failure = self._export_model(path, model, origin)

        def check() -> None:
            if failure is not None:
                raise failure

        succeed_on_all_ranks(check, self._rank.place.device)
        return path

    def carry_out_orders(self, model: nn.Module, origin: Origin) -> None:
        """Make one export for all identical orders. A failed export fails its orders, never the run."""
        orders = self._rank.orders.take_exports()
        text = broadcast_bytes(json.dumps(orders[0][0] if orders else None).encode())
        order = json.loads(text)
        if order is None:
            return  # the client has gone
        name, adapter_only = order
        path = self._directory / EXPORTS / (name or f"step-{origin.step}")
        error = self._export(path, model, adapter_only, origin)
        if error is not None:
            log.error("run %s: an ordered export failed: %s", self._run_id, error)
        for _, waiting in orders:
            if error is not None:
                waiting.set_exception(error)
            else:
                waiting.set_result(str(path))

    def _export(self, path: Folder, model: nn.Module, adapter_only: bool, origin: Origin) -> PacelineError | None:
        """Return the error that prevented the export, if any. Raises it if the ranks may be at different points."""
        try:
            write = self._export_adapter if adapter_only else self._export_model
            failure = write(path, model, origin)
        except Exception as error:  # torch's own, for a lack of memory on the device
            if self._rank.place.world_size > 1:
                raise
            failure = error
        if failure is None or isinstance(failure, PacelineError):
            return failure
        return Unavailable(f"{path} could not be written: {type(failure).__name__}: {failure}")

    def _export_model(self, path: Folder, model: nn.Module, origin: Origin) -> Exception | None:
        """Replace the folder at `path`, if this run exported it; return rank 0's error if the replacement failed."""
        return export_live(
            path,
            model,
            self._spec.policy,
            dtype=getattr(torch, resolved_dtype(self._spec.export_precision, self._rank.place.device.type)),
            scoring=self._spec.has_scoring_head,
            origin=origin,
        )

    def _export_adapter(self, path: Folder, model: nn.Module, origin: Origin) -> Exception | None:
        adapter = gather_weights(model, None)
        if not adapter:
            return None
        policy = self._spec.policy
        try:
            export_adapter(path, adapter, policy.lora_cfg, policy.model_name, replace=True, origin=origin)
        except Exception as error:  # safetensors, the disk and the allocators raise unrelated errors
            return error
        return None
