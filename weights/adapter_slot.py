"""The adapter of a sampling model: kept apart from its base, and merged into it whenever a new one comes.

Promise: after `replace` every adapted layer has W + (alpha/dim)·B·A, computed from the base as it was loaded and
never from an earlier merge, so versions do not affect each other. With a merged adapter a decode step costs as much as
without one; merging takes a copy of the adapted layers' weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paceline.errors import InvalidInput
from paceline.spec import LoraSection
from paceline.weights.format.lora_names import FINGERPRINT, fingerprint, merged, pairs

KEPT = "the old weights go on serving"


class AdapterSlot:
    """The adapter of one model whose base weights are loaded. One thread calls `replace`; `check` may run in another."""

    def __init__(self, module: nn.Module, lora: LoraSection) -> None:
        self._layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
        self._dim = lora.dim
        self._scaling = lora.alpha / lora.dim
        self._fingerprint = fingerprint(module.state_dict())
        self._base: dict[str, Tensor] = {}

    def check(self, adapter: Mapping[str, Tensor]) -> None:
        """Raise InvalidInput if `adapter` does not fit: another base, an unknown layer, a wrong shape, a NaN."""
        if FINGERPRINT not in adapter:
            raise InvalidInput(
                f"no tensor {FINGERPRINT!r}: these are no adapter's weights, but policy.lora_cfg.enabled is true; "
                f"{KEPT}"
            )
        if not torch.equal(adapter[FINGERPRINT].cpu(), self._fingerprint):
            raise InvalidInput(
                "the adapter was trained on another base than this worker has loaded; does policy.model_name mean "
                "the same files on both machines?"
            )
        for name, a_RI, b_OR in pairs(adapter):
            layer = self._layers.get(name)
            if layer is None:
                raise InvalidInput(f"the adapter is for {name!r}, no linear layer of this model; {KEPT}")
            expected = (self._dim, layer.in_features), (layer.out_features, self._dim)
            if (tuple(a_RI.shape), tuple(b_OR.shape)) != expected:
                raise InvalidInput(
                    f"the adapter of {name!r} has shapes {tuple(a_RI.shape)} and {tuple(b_OR.shape)}, must be "
                    f"{expected[0]} and {expected[1]}; {KEPT}"
                )
            if not (torch.isfinite(a_RI).all() and torch.isfinite(b_OR).all()):
                raise InvalidInput(f"the adapter of {name!r} has NaN or infinite elements; {KEPT}")

    def replace(self, adapter: Mapping[str, Tensor]) -> None:
        """Replace the current adapter by a checked one."""
        left = set(self._base)
        for name, a_RI, b_OR in pairs(adapter):
            weight = self._layers[name].weight.data
            base = self._base.setdefault(name, weight.clone())
            weight.copy_(merged(base, a_RI, b_OR, self._scaling))
            left.discard(name)
        for name in left:
            self._layers[name].weight.data.copy_(self._base[name])
