"""The LM head in float32 (`policy.float32_head`): logits that are not rounded to the type of the weights.

Promise: the weights are the model's, in its type, and the product with them is summed in and rounded to float32, as the
learner's is with the same setting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Float32Head:
    """Replaces the forward of an LM head of a shorter type. On a CPU it keeps a copy of the weights in float32."""

    def __init__(self, head: Any) -> None:
        self._head = head
        self._copy_VH: Tensor | None = None
        if head.weight.dtype != torch.float32:
            head.forward = self._logits

    def refresh(self) -> None:
        """Take over changed weights."""
        self._copy_VH = None

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return [..., V] float32 logits of [..., H] hidden states."""
        weight_VH: Tensor = self._head.weight
        bias_V = None if self._head.bias is None else self._head.bias.float()
        if hidden.is_cuda:
            flat_NV = torch.mm(hidden.flatten(0, -2), weight_VH.T, out_dtype=torch.float32)
            logits: Tensor = flat_NV.view(*hidden.shape[:-1], -1)
            return logits if bias_V is None else logits + bias_V
        if self._copy_VH is None:
            self._copy_VH = weight_VH.float()
        return torch.nn.functional.linear(hidden.float(), self._copy_VH, bias_V)
