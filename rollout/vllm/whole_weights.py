"""The whole model's tensors from a weight channel's: the channel sends them whole, or sends an adapter to the base.

For engines that load only whole tensors. The base is in this process's memory, in the type that the engine samples in; the
merge runs while the engine decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.models.pretrained import load_pretrained
from paceline.rollout.weights.adapter import AdapterSlot
from paceline.rollout.weights.layout import WeightLayout, generation_dtype
from paceline.spec import PolicySection
from paceline.weights.host_weights import HostWeights


class WholeWeights(Protocol):
    """Conversion to whole tensors. One update at a time calls `whole`; `check` may run in another thread."""

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise InvalidInput if the channel's `weights` do not fit."""

    def whole(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return checked `weights` as the model's tensors, tied ones under all their names; valid until the next call."""


class ModelWeights:
    """Whole weights of a run that trains all of them."""

    def __init__(self, layout: WeightLayout) -> None:
        self._layout = layout

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """See `WholeWeights.check`."""
        self._layout.check(weights)

    def whole(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `WholeWeights.whole`."""
        return self._layout.completed(weights)


class MergedAdapter:
    """Whole weights of a run that trains an adapter (`policy.lora_cfg`): the base from `policy.model_name` with the adapter merged."""

    def __init__(self, policy: PolicySection, layout: WeightLayout, device: str) -> None:
        auto: Any = AutoModelForCausalLM
        dtype = generation_dtype(policy, device)
        module = load_pretrained(auto, policy.model_name, "policy.model_name", dtype=dtype)
        module.requires_grad_(False)
        self._layout = layout
        self._tensors: dict[str, Tensor] = module.state_dict()
        self._slot = AdapterSlot(module, policy.lora_cfg)

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """See `WholeWeights.check`."""
        if isinstance(weights, HostWeights):
            weights.verify()  # the engine's workers see the merged weights only
        self._slot.check(weights)

    def whole(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `WholeWeights.whole`."""
        self._slot.replace(weights)
        return self._layout.completed(self._tensors)


def whole_weights(policy: PolicySection, layout: WeightLayout, device: str) -> WholeWeights:
    """Return the conversion for the run's `policy`, sampled on `device`."""
    return MergedAdapter(policy, layout, device) if policy.lora_cfg.enabled else ModelWeights(layout)
