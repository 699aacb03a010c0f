"""Reads the facts about a model that an engine needs before it has weights: names and shapes, limits, end tokens.

Both engines check new weights by these rules, so that both accept the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from paceline.errors import InvalidInput
from paceline.files.model_source import model_source, tokenizer_source
from paceline.models.loading import resolved_dtype
from paceline.models.pretrained import is_finite, skeleton
from paceline.spec import LoraSection, PolicySection
from paceline.weights.format.lora_names import FINGERPRINT, fingerprint, merged, pairs
from paceline.weights.hosts.host_weights import HostWeights

NAMES_SHOWN = 5


@dataclass(frozen=True)
class WeightLayout:
    """Names and shapes of a model's tensors."""

    shapes: dict[str, torch.Size]
    tied: list[list[str]]
    """Groups of names that share one tensor; most groups have one name."""
    architecture: str
    """Name of the model's class."""
    vocab_size: int

    @classmethod
    def of(cls, module: Any) -> WeightLayout:
        """Return the layout of `module`, which may be on the meta device."""
        shapes: dict[str, torch.Size] = {}
        groups: dict[int, list[str]] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            shapes[name] = tensor.shape
            groups.setdefault(id(tensor), []).append(name)
        vocab_size = module.get_input_embeddings().weight.shape[0]
        return cls(shapes, list(groups.values()), type(module).__name__, vocab_size)

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise InvalidInput if `weights` do not fit: an unknown or missing name, a wrong shape, a NaN. Of the names
        that share one tensor (tied embeddings) any may be left out; the tensors under the others must be equal.
        `HostWeights` are not checked for NaN here, because their verification does that."""
        _refuse("unknown weights", [name for name in weights if name not in self.shapes])
        _refuse("missing weights", [names[0] for names in self.tied if not any(name in weights for name in names)])
        for name, tensor in weights.items():
            if tensor.shape != self.shapes[name]:
                raise InvalidInput(
                    f"weight {name!r} has shape {tuple(tensor.shape)}, but the model's has "
                    f"{tuple(self.shapes[name])}; the old weights stay in use"
                )
            if not isinstance(weights, HostWeights) and not is_finite(tensor):
                raise InvalidInput(f"weight {name!r} has NaN or infinite elements; the old weights stay in use")
        for names in self.tied:
            first, *others = (name for name in names if name in weights)
            for other in others:
                if not _is_equal(weights[first], weights[other]):
                    raise InvalidInput(
                        f"weights {first!r} and {other!r} differ, but the model ties them; was the learner's "
                        "model loaded with tie_word_embeddings off?"
                    )

    def completed(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return checked `weights` under all names: omitted tied names get the tensor that they share."""
        sent = {
            name: next(alias for alias in (name, *names) if alias in weights) for names in self.tied for name in names
        }
        if isinstance(weights, HostWeights):
            return weights.under_names(sent)
        return {name: weights[alias] for name, alias in sent.items()}


def meta_layout(config: PreTrainedConfig) -> WeightLayout:
    """Return the layout of the model that `config` describes, without memory for weights."""
    return WeightLayout.of(skeleton(AutoModelForCausalLM, config))


def read_config(policy: PolicySection) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.from_pretrained(model_source(policy.model_name))
    return config


def longest_sequence(policy: PolicySection, config: PreTrainedConfig) -> int:
    """Return the largest number of prompt and completion tokens together that the run allows and the model supports."""
    return min(
        policy.max_total_sequence_length,
        getattr(config, "max_position_embeddings", None) or policy.max_total_sequence_length,
    )


def generation_dtype(policy: PolicySection, device: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, resolved_dtype(policy.generation_precision, torch.device(device).type))
    return dtype


def end_token_ids(policy: PolicySection, config: PreTrainedConfig, generation_config: Any) -> tuple[int, ...]:
    """Return the end tokens of config, generation config and tokenizer: many chat models name them in only one
    place."""
    token_ids: set[int] = set()
    sources = [config.eos_token_id, getattr(generation_config, "eos_token_id", None)]
    folder = Path(model_source(policy.model_name))
    bare = folder.is_dir() and not any(folder.glob("tokenizer*"))
    if policy.tokenizer_name is not None or not bare:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_source(policy.tokenizer_name or policy.model_name))
        sources.append(tokenizer.eos_token_id)
    for ids in sources:
        token_ids.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return tuple(sorted(token_ids))


def _is_equal(first: Tensor, second: Tensor) -> bool:
    first_key, second_key = ((tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in (first, second))
    return first_key == second_key or torch.equal(first, second)


def _refuse(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        raise InvalidInput(f"{what}: {', '.join(names[:NAMES_SHOWN])}{more}; the old weights stay in use")


KEPT = "the old weights stay in use"


class AdapterSlot:
    """The adapter of one model whose base weights are loaded. One thread calls `replace`; `check` may run in another.
    Promise: after `replace` every adapted layer has W + (alpha/dim)·B·A, computed from the base as it was loaded and
    never from an earlier merge, so versions do not affect each other. With a merged adapter a decode step costs as
    much as without one; merging takes a copy of the adapted layers' weights."""

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
                f"no tensor {FINGERPRINT!r}: these weights are not an adapter, but policy.lora_cfg.enabled is true; "
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
                raise InvalidInput(f"the adapter is for {name!r}, which is not a linear layer of this model; {KEPT}")
            expected = (self._dim, layer.in_features), (layer.out_features, self._dim)
            if (tuple(a_RI.shape), tuple(b_OR.shape)) != expected:
                raise InvalidInput(
                    f"the adapter of {name!r} has shapes {tuple(a_RI.shape)} and {tuple(b_OR.shape)}, but must have "
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
