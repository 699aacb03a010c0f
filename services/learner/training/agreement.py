"""The ranks' agreement before a step, which keeps them at one point of their collectives."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from paceline.learner.collectives import any_over_ranks


@dataclass(frozen=True)
class StepAgreement:
    """Facts that decide what happens before the next step: of one rank, or of any."""

    batch_missing: bool
    """No rank trains before every rank has its part of the batch."""
    run_ended: bool
    """The run, or this session of it, has ended."""
    run_complete: bool
    """The run ends in good order before this step."""
    stopping: bool
    """The learner ends after this step."""
    checkpoint_ordered: bool
    export_ordered: bool
    checkpoint_unwritten: bool
    """A checkpoint is in the making, so that `SessionCheckpoints.finish` would wait."""
    snapshot_wanted: bool
    """A member needs the newest version in full from the object store."""

    def on_any_rank(self, device: torch.device) -> StepAgreement:
        """Return the facts that are true on at least one rank. A collective call."""
        return StepAgreement(*any_over_ranks(astuple(self), device))
