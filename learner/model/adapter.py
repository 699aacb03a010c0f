"""Adds a LoRA adapter to the policy, switches it off for the reference, and extracts or merges it for publishing and
export.

Promise: the base's weights never change and have no gradient; only A and B of each adapted layer are trained,
checkpointed and published. The modules are peft's, injected in place, so the model stays a transformers model.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.errors import InvalidInput, first_line
from paceline.spec import LoraSection
from paceline.weights.format.lora_names import FINGERPRINT, fingerprint, merged, wire_names

NAME = "default"
BASE = ".base_layer."
READS = re.compile("Mamba|FalconH1Mixer|BambaMixer|AltUp")
"""Classes of modules that read weights of READ_DIRECTLY."""


def add_adapter(model: Any, lora: LoraSection, seed: int) -> None:
    """Freeze `model`, and add an adapter to the layers that `lora` names: A is drawn at random from `seed`, B is zero.
    Raises InvalidInput if `lora` names no layer of the model, or a layer that is not a plain linear layer below the
    head."""
    from peft import LoraConfig, inject_adapter_in_model

    fit = _adaptable(model)
    _refuse_targets(model, lora, lambda name, module: name not in fit)
    config = LoraConfig(
        r=lora.dim,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules) or fit,
        exclude_modules=list(lora.exclude_modules) or None,
    )
    shell = nn.Module()  # without the model's config, for which peft would adapt experts too
    shell._modules = model._modules
    with torch.random.fork_rng(devices=[]):
        # Every rank starts from the same adapter, whatever the state of its generators.
        torch.manual_seed(seed)
        try:
            with _weights_in_memory(model):
                inject_adapter_in_model(config, shell, adapter_name=NAME)
        except ValueError as error:
            raise InvalidInput(
                f"policy.lora_cfg.target_modules {list(lora.target_modules)}: {first_line(error)}"
            ) from None
    for name, layer in _adapted(model):
        if type(layer.base_layer) is not nn.Linear:
            raise InvalidInput(
                f"policy.lora_cfg would adapt {name!r}, a {type(layer.base_layer).__name__}, not a linear layer; "
                "name only linear layers in target_modules"
            )
    model.base_fingerprint = None


@contextlib.contextmanager
def _weights_in_memory(model: nn.Module) -> Iterator[None]:
    """Temporarily replace weights by expanded one-element CPU tensors if they are on the meta device or not float32,
    because peft copies A and B to the device and dtype of the layer that they adapt."""
    kept: list[tuple[nn.Linear, nn.Parameter]] = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and (module.weight.is_meta or module.weight.dtype != torch.float32):
            kept.append((module, cast(nn.Parameter, module.weight)))
            module.weight = nn.Parameter(torch.zeros(()).expand(module.weight.shape))
    try:
        yield
    finally:
        for module, weight in kept:
            weight.requires_grad_(False)
            module.weight = weight


def has_adapter(model: nn.Module) -> bool:
    return hasattr(model, "base_fingerprint")


@contextlib.contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapter off, so that the model is π_ref. Do nothing to a model without an adapter."""
    layers = [layer for _, layer in _adapted(model)] if has_adapter(model) else []
    # Not peft's enable_adapters, which also changes `requires_grad` of parameters that FSDP holds.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return A and B of every adapted layer under their published names, and the base's fingerprint. Tensors are live.
    The first call is collective: all ranks compute the fingerprint from their shards."""
    weights: dict[str, Tensor] = {}
    for name, layer in _adapted(model):
        name_a, name_b = wire_names(name)
        weights[name_a], weights[name_b] = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    adapted: Any = model
    if adapted.base_fingerprint is None:
        adapted.base_fingerprint = _base_fingerprint(model)
    return weights | {FINGERPRINT: adapted.base_fingerprint}


@torch.no_grad()
def _base_fingerprint(model: nn.Module) -> Tensor:
    """Return the base's fingerprint, with only one whole tensor in memory at a time."""
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    base = {name.replace(BASE, "."): kept for name, kept in state.items() if not is_part_of_adapter(name)}
    return fingerprint(base, identity=id, whole=_whole)


def _whole(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    rounded = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
    return cast(Tensor, rounded.full_tensor())  # type: ignore[attr-defined]


def adapted_parts(model: nn.Module) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Return a mapping from adapted layer names to (A [R, I], B [O, R], scaling). The tensors are live."""
    return {
        name: (layer.lora_A[NAME].weight, layer.lora_B[NAME].weight, float(layer.scaling[NAME]))
        for name, layer in _adapted(model)
    }


def merged_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the architecture's state dict from the whole `state` of the adapted `model`. Tied names stay tied."""
    merged_by_name: dict[str, Tensor] = {}
    for name, tensor in state.items():
        layer_name = name.removesuffix(f"{BASE}weight")
        if layer_name != name:
            layer: Any = model.get_submodule(layer_name)
            a_RI, b_OR = (state[f"{layer_name}.lora_{part}.{NAME}.weight"] for part in "AB")
            tensor = merged(tensor.float(), a_RI, b_OR, float(layer.scaling[NAME]))
        if not is_part_of_adapter(name):
            merged_by_name[name.replace(BASE, ".")] = tensor
    return merged_by_name


def is_part_of_adapter(name: str) -> bool:
    return f".lora_A.{NAME}." in name or f".lora_B.{NAME}." in name


def _adapted(model: nn.Module) -> list[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def set_dropout(model: nn.Module, active: bool) -> None:
    """Turn the adapter's dropout on or off. Turn off everything else that models do only in training (dropout, noise of
    routers), because the sampler does none of it."""
    model.eval()
    for name, module in model.named_modules():
        if "lora_dropout" in name.split("."):
            module.train(active)


READ_DIRECTLY = frozenset({"out_proj", "dt_proj", "correction_coefs", "prediction_coefs"})
"""Linear layers of state-space mixers and of Gemma 3n's streams whose weights are read without a call of the layer (on
GPUs, one kernel for the whole mixer reads them). An adapter of such a layer would have no effect."""


def _adaptable(model: Any) -> list[str]:
    """Return the names of the plain linear layers below the head that can be adapted."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    reading = [name for name, module in model.named_modules() if READS.search(type(module).__name__)]
    left_out = {f"{name}.{layer}" for name in reading for layer in READ_DIRECTLY}
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module not in ends and name not in left_out
    ]


def _refuse_targets(model: nn.Module, lora: LoraSection, unfit: Callable[[str, nn.Module], bool]) -> None:
    for name, module in model.named_modules():
        if name.split(".")[-1] in lora.target_modules and unfit(name, module):
            raise InvalidInput(
                f"policy.lora_cfg.target_modules would adapt {name!r}, a {type(module).__name__}; only linear layers "
                "below the LM head can be adapted"
            )
