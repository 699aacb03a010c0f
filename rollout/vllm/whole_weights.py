"""What comes over a weight channel, as the whole model's tensors: they are that already, or an adapter and its base.

For engines that load whole tensors only. The base is in this process's memory, in the type that is sampled in; merging
goes on while the engine decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.spec import PolicySection
from rollout.weights.adapter import AdapterSlot
from rollout.weights.layout import WeightLayout, generation_dtype


class WholeWeights(Protocol):
    """One update at a time calls `whole`; `check` may run in another thread."""

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raises InvalidInput if `weights`, as they came, do not fit."""

    def whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Checked `weights` as the model's tensors, tied ones under all their names; valid until the next call."""


class ModelWeights:
    """Where the run trains the model's own weights."""

    def __init__(self, layout: WeightLayout) -> None:
        self._layout = layout

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """See `WholeWeights.check`."""
        self._layout.check(weights)

    def whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `WholeWeights.whole`."""
        return self._layout.completed(weights)


class MergedAdapter:
    """Where the run trains an adapter (`policy.lora_cfg`): the base from `policy.model_name` with the adapter merged."""

    def __init__(self, policy: PolicySection, layout: WeightLayout, device: str) -> None:
        auto: Any = AutoModelForCausalLM
        module = auto.from_pretrained(policy.model_name, dtype=generation_dtype(policy, device))
        module.requires_grad_(False)
        self._layout = layout
        self._tensors: dict[str, Tensor] = module.state_dict()
        self._slot = AdapterSlot(module, policy.lora_cfg)

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """See `WholeWeights.check`."""
        self._slot.check(weights)

    def whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `WholeWeights.whole`."""
        self._slot.replace(weights)
        return self._layout.completed(self._tensors)


def whole_weights(policy: PolicySection, layout: WeightLayout, device: str) -> WholeWeights:
    """For the run's `policy`, sampled on `device`."""
    return MergedAdapter(policy, layout, device) if policy.lora_cfg.enabled else ModelWeights(layout)
