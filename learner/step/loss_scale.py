"""Scale of the loss in float16, whose gradients would vanish below 6·10⁻⁸ without one.

Dynamic loss scaling (Micikevicius et al. 2018, arXiv 1710.03740): the loss is multiplied by a power of two, and the gradients are
divided by it. Where a gradient overflows, the scale is halved and the update is computed again, so every sample is trained. After
UPDATES_TO_DOUBLE updates without an overflow the scale is doubled.

The scale is an entry of the optimizer's first group: checkpoints have it, so a run that is resumed or replayed goes on with it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

FIRST, LARGEST = 2.0**16, 2.0**24
UPDATES_TO_DOUBLE = 1_000
SCALE, UPDATES = "loss_scale", "updates_at_loss_scale"


class LossScale:
    """The scale of one optimizer's loss; 1 for other types than float16. All ranks call it alike."""

    def __init__(self, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
        self._optimizer = optimizer
        self.is_dynamic = dtype == torch.float16
        if self.is_dynamic:
            optimizer.param_groups[0] |= {SCALE: FIRST, UPDATES: 0}

    @property
    def factor(self) -> float:
        """What the loss is multiplied by."""
        return float(self._optimizer.param_groups[0][SCALE]) if self.is_dynamic else 1.0

    def divide(self, models: Iterable[nn.Module]) -> None:
        """Divide the gradients by the scale, which is exact for a power of two."""
        if self.factor != 1.0:
            for model in models:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(1.0 / self.factor)

    def lower(self) -> bool:
        """Halve the scale because of an overflow; return False where it is 1 already, so that another cause is to be looked for."""
        if self.factor <= 1.0:
            return False
        self._set(self.factor / 2, 0)
        return True

    def note_update(self) -> None:
        """Count an update without an overflow."""
        if self.is_dynamic:
            updates = int(self._optimizer.param_groups[0][UPDATES]) + 1
            if updates < UPDATES_TO_DOUBLE:
                self._set(self.factor, updates)
            else:
                self._set(min(2 * self.factor, LARGEST), 0)

    def _set(self, factor: float, updates: int) -> None:
        self._optimizer.param_groups[0] |= {SCALE: factor, UPDATES: updates}
