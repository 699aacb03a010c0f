"""The one place that decides, for every role, whether files hold the weights of the model that their config describes.
Promise: a model is returned only if each of its weights comes from the files: no tensor is missing, unused, of
another shape, NaN, or stored in a type that needs the scales of a quantization. Only this module calls
`from_pretrained`, because transformers initializes a missing tensor at random and continues."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidInput
from paceline.files.model_source import model_source
from paceline.models.weight_files import StoredTensor, WeightFiles, find_weight_files, same_bits, torch_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

SCORE = "score.weight"
"""Name of the head with one score, which the files of a new reward model may lack."""
NAMES_SHOWN = 3
PLAIN_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
UNUSED = re.compile(r"(^|\.)((mtp|mtp_layers|v_head)\.|attn\.masked_bias$|rotary_emb\.(cos|sin)_cached$)")
"""Tensors that no forward pass needs: speculative decoding, a policy's value head, constants of old checkpoints."""
LM_HEADS = ("lm_head.", "embed_out.")


def load_pretrained(
    kind: Any, name: str, field: str, *, dtype: torch.dtype, source: str | None = None, **options: Any
) -> Any:
    """Return the model `name`, loaded by transformers' auto class `kind` in `dtype` on the CPU. `field` is the spec's
    key, for messages; `source` is the folder of its weights, if the caller has it. Raises InvalidInput if the files
    are not the weights of this model, and any error of transformers."""
    what = f"{field} {name!r}"
    source = source or model_source(name, field, weights=True)
    is_quantized = check_model(kind, source, field, what, **options)
    model, report = kind.from_pretrained(source, dtype=dtype, output_loading_info=True, use_safetensors=True, **options)
    if getattr(model, "_hf_peft_config_loaded", False):  # a model on the hub with an adapter beside it
        raise InvalidInput(f"{what} has a LoRA adapter beside its weights; merge it with `paceline convert`")
    _refuse_unfit(type(model).__name__, source, what, report["missing_keys"], _used(report["unexpected_keys"]))
    if not is_quantized:
        check_finite(model, what)
    return model


def check_model(kind: Any, source: str, field: str, what: str = "", **options: Any) -> bool:
    """Raise InvalidInput unless the folder `source` has the weights of the model in its config, judged by the headers
    of its files; return whether the weights are quantized, in which case only transformers can judge. `kind` is an auto
    class, or a class of transformers. Raises Unreadable for missing files."""
    from transformers import AutoConfig

    what = what or f"{field} {source!r}"
    config = AutoConfig.from_pretrained(source, **options)
    with find_weight_files(source, source, field) as files:
        if getattr(config, "quantization_config", None) is not None:
            return True
        check_weights(skeleton(kind, config), files, what)
    return False


def skeleton(kind: Any, config: Any, **options: Any) -> Any:
    """Return the modules that `config` describes, of class `kind`, on the meta device; tied weights are one object."""
    import torch
    from transformers import initialization

    build = getattr(kind, "from_config", None) or kind._from_config
    with torch.device("meta"), initialization.meta_device_safe_creation_ops():
        model = build(config, **options)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:  # drawn on a device of its choice: it would keep its random values
                setattr(module, name, torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad))
    model.tie_weights()
    return model


def check_weights(model: Any, files: WeightFiles, what: str, *, begins: bool = False) -> None:
    """Raise InvalidInput unless `files` are the weights of `model`, a `skeleton`, which is not changed. With `begins`
    the model is a reward model that starts from a language model: its head may be missing, and the LM head is
    ignored. Refused files are closed."""
    with contextlib.ExitStack() as refused:
        refused.push(files)
        _check_weights(model, files, what, begins)
        refused.pop_all()


def _check_weights(model: Any, files: WeightFiles, what: str, begins: bool) -> None:
    names = {tensor.name: tensor for tensor in files.tensors.values()}
    _refuse_scaled(names, files.place, what)
    missing, unexpected = _compared(model, names, files.place, what)
    for tied in tied_names(model):
        stored = [names[found] for name in tied if (found := _stored_name(model, name, names))]
        for other in stored[1:]:
            if not same_bits(stored[0], other):
                raise InvalidInput(
                    f"{what}: {files.place} has different values in {stored[0].name!r} and {other.name!r}, but the "
                    "config ties these tensors; set tie_word_embeddings to false in config.json, or remove one of them"
                )
    if begins and SCORE in missing:
        missing.discard(SCORE)
        unexpected = {name for name in unexpected if not name.startswith(LM_HEADS)}
    _refuse_unfit(type(model).__name__, files.place, what, missing, unexpected)


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return one list for each parameter that has several names, with these names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def is_finite(tensor: Tensor) -> bool:
    """Return whether every element is finite. For speed, elements are checked only if their sum is not finite."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def check_finite(model: nn.Module, what: str) -> None:
    """Raise InvalidInput for a loaded weight with a NaN or an infinite element."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.is_floating_point() and not is_finite(local.detach()):
            raise InvalidInput(
                f"{what}: tensor {name!r} has NaN or infinite elements in {local.dtype}; copy the files again, or load them "
                "in a type of larger range"
            )


@dataclass(frozen=True)
class _Header:
    """A tensor whose content is not read: its slices are on the meta device."""

    tensor: StoredTensor

    def get_shape(self) -> list[int]:
        return self.tensor.get_shape()

    def get_dtype(self) -> str:
        return self.tensor.dtype

    def __getitem__(self, index: EllipsisType | tuple[slice, ...]) -> Tensor:
        import torch

        return torch.empty(self.tensor.shape, dtype=torch_dtype(self.tensor.dtype), device="meta")[index]


def read_state(model: Any, tensors: Mapping[str, Any], device: Any, *, view: Any = None) -> Any:
    """Fill `model` on `device` by transformers' mapping of the files' names and layouts; return transformers' report.
    `view` is the model under the files' names (None: `model`)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    dtype = model.config.dtype
    config = LoadStateDictConfig(
        device_map={"": device},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=get_model_conversion_mapping(model),  # type: ignore[arg-type]
    )
    info, _ = convert_and_load_state_dict_in_model(view or model, dict(tensors), config)
    return info


@contextlib.contextmanager
def _without_progress() -> Iterator[None]:
    """Disable transformers' progress bars within the `with` block."""
    from transformers.utils import logging

    bars: Any = logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _compared(model: Any, tensors: Mapping[str, StoredTensor], place: str, what: str) -> tuple[set[str], set[str]]:
    """Return the tensors that the files lack and those that the model lacks. Raises InvalidInput for wrong shapes."""
    tied = tied_names(model)
    filled = copy.deepcopy(model)
    with _without_progress():
        info = read_state(filled, {name: _Header(tensor) for name, tensor in tensors.items()}, "meta")
    missing = set(info.missing_keys)
    for name, found, expected in sorted(info.mismatched_keys, key=str):
        raise InvalidInput(
            f"{what}: tensor {name!r} in {place} has shape {tuple(found)}, but config.json makes it {tuple(expected)}; use the "
            "config.json of these files"
        )
    for name, error in sorted(info.conversion_errors.items()):
        raise InvalidInput(f"{what}: tensor {name!r} cannot be made from {place}: {str(error).strip()[-300:]}")
    filled._adjust_missing_and_unexpected_keys(info)
    for names in tied:
        missing.difference_update(names[1:] if missing.issuperset(names) else names)
    return missing, _used(info.unexpected_keys)


def _used(names: Iterable[str]) -> set[str]:
    return {name for name in names if not UNUSED.search(name)}


def _stored_name(model: Any, name: str, tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return a parameter's name in the files, where the names of a base model lack the model's prefix."""
    names = (name, name.removeprefix(f"{model.base_model_prefix}."))
    return next((found for found in names if found in tensors), None)


def _refuse_scaled(tensors: Mapping[str, StoredTensor], place: str, what: str) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype.startswith("F8") or (name.endswith("weight") and tensor.dtype not in PLAIN_TYPES):
            raise InvalidInput(
                f"{what}: tensor {name!r} in {place} has type {tensor.dtype}, and config.json has no quantization_config that "
                "says what its values mean; copy the config of these files, or use the model in a 16-bit or 32-bit type"
            )


def _refuse_unfit(kind: str, place: str, what: str, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    lacking, extra = sorted(missing), sorted(unexpected)
    if not lacking and not extra:
        return
    faults = [f"lacks tensor {_shown(lacking)} of a {kind}"] if lacking else []
    faults += [f"has {_shown(extra)}, which a {kind} of this config.json does not have"] if extra else []
    remedy = "copy the files again, or use the files of a whole model of this architecture"
    if extra and (prefix := _wrapper(lacking, extra)):
        remedy = f"names begin with {prefix!r}, as in a wrapped model: save the model inside the wrapper"
    elif extra:
        remedy = "use the config.json that belongs to these files, or the files of a whole model of this architecture"
    raise InvalidInput(f"{what}: {place} {', and '.join(faults)}; {remedy}")


def _wrapper(lacking: list[str], extra: list[str]) -> str | None:
    """Return a wrapper's prefix in the unexpected names, if a name without this prefix is that of a missing tensor."""
    prefixes = (name.removesuffix(missing) for missing in lacking[-1:] for name in extra if name.endswith(missing))
    return next((prefix for prefix in prefixes if prefix.endswith(".")), None)


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{', '.join(map(repr, names[:NAMES_SHOWN]))}{more}"
