"""Loads a model's weights into modules that are already sharded, so that each rank reads only its rows.

The modules start on the meta device, without memory; FSDP2 then decides which rows each rank has, and `fill` reads
those. As in its `from_pretrained`, transformers maps names and layouts of the files to those of the modules (files may
store experts one by one, for example); here it reads only slices of the files.

Promise: every parameter and buffer has the bits that `from_pretrained` gives it. Nothing is drawn at random except the
missing head of a reward model; `paceline/models/pretrained.py` checks that the files are the model's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.distributed.sharding_utils import DtensorShardOperation

from paceline.errors import InvalidInput
from paceline.models.pretrained import SCORE, check_finite, read_state
from paceline.models.weight_files import WeightFiles

BASE = re.compile(r"\.base_layer(?=\.)")
"""Part that an adapter inserts in the names of the layer that it wraps."""


@torch.no_grad()
def fill(
    model: Any, files: WeightFiles, device: torch.device, what: str, buffers_device: torch.device | None = None
) -> None:
    """Read every parameter of `model` that is still on the meta device, and put it on `device`; not a collective call.
    `paceline.models.pretrained.check_weights` has compared the files with the model. The buffers go to `buffers_device`
    (None: `device`). `what` names the model in messages. A head of one score that the files lack is drawn from torch's
    generator. Raises InvalidInput for a weight that is not finite, and the errors of `WeightFiles`."""
    _make_empty_parts(model, device)
    tied = _tied_locations(model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    missing = set(read_state(model, files.tensors, device, view=_BaseNames(model, device)).missing_keys)
    for locations in tied:
        loaded = [location for location in locations if _name(location) not in missing]
        if loaded:
            _, module, name = loaded[0]
            for _, other, other_name in locations:
                setattr(other, other_name, getattr(module, name))
    if SCORE in missing:
        _draw_score(model, device)
    check_finite(model, what)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    _make_buffers(model, buffers_device or device, what)


Location = tuple[str, nn.Module, str]
"""Name of a module, the module, and the name of a parameter in it."""


def _name(location: Location) -> str:
    module, _, parameter = location
    return f"{module}.{parameter}" if module else parameter


def _tied_locations(model: nn.Module) -> list[list[Location]]:
    locations: dict[int, list[Location]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            locations.setdefault(id(parameter), []).append((BASE.sub("", module_name), module, name))
    return [several for several in locations.values() if len(several) > 1]


class _BaseNames:
    """Presents the model under the names of its files: without the adapter's parameters, and with adapted layers by
    their own names. Parameters whose rows transformers makes of several tensors (q, k and v joined) look undivided,
    because transformers would divide each of those tensors; `_Placing` then divides the whole."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device, self._whole = model, device, _row_mixing(model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def state_dict(self) -> dict[str, Tensor]:
        names = {
            BASE.sub("", name): tensor
            for name, tensor in self._model.state_dict().items()
            if tensor.is_meta or (isinstance(tensor, DTensor) and tensor.to_local().is_meta)
        }
        return {name: _undivided(tensor) if self._is_whole(name) else tensor for name, tensor in names.items()}

    def _is_whole(self, name: str) -> bool:
        return self._whole is not None and self._whole.search(name) is not None

    def get_submodule(self, path: str) -> Any:
        module: nn.Module = self._model.get_submodule(path)
        base = getattr(module, "base_layer", None)
        own = base if isinstance(base, nn.Module) else module
        names = [name for name, _ in own.named_parameters(recurse=False) if self._is_whole(f"{path}.{name}")]
        return _Placing(own, self._device, frozenset(names))


def _row_mixing(model: Any) -> re.Pattern[str] | None:
    """Return a pattern of the parameters whose rows come from several tensors of the files, or from a part of one; None if
    there are none."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    patterns = []
    for mapping in get_model_conversion_mapping(model):
        kinds = {(type(each).__name__, getattr(each, "dim", None)) for each in getattr(mapping, "operations", ())}
        if kinds - KEEPING_ROWS:
            patterns += [re.sub(r"\\\d", ".*", each) for each in mapping.target_patterns]
    return re.compile("|".join(patterns)) if patterns else None


KEEPING_ROWS = frozenset({("MergeModulelist", 0), ("Concatenate", 1), ("Chunk", 1)})
"""Operations of transformers, each with its dimension, that need only a rank's rows."""


def _undivided(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if isinstance(tensor, DTensor) else tensor


class _Placing:
    """A module whose new parameters go to `device`. `DTensor.from_local` would put a sharded parameter on the device of
    its mesh, a GPU, even if the parameter belongs on the host (policy.cpu_offload). Parameters named in `whole` come
    undivided."""

    def __init__(self, module: nn.Module, device: torch.device, whole: frozenset[str] = frozenset()) -> None:
        vars(self).update(_module=module, _device=device, _whole=whole)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _undivided(value) if name in vars(self)["_whole"] else value

    def __setattr__(self, name: str, value: Any) -> None:
        divided = getattr(self._module, name, None)
        if name in self._whole and isinstance(divided, DTensor):
            value = nn.Parameter(_part_of(value.detach(), divided, value.device), requires_grad=value.requires_grad)
        if isinstance(value, nn.Parameter) and value.device.type != self._device.type:
            value = nn.Parameter(value.detach().to(self._device), requires_grad=value.requires_grad)
        setattr(self._module, name, value)


def _make_empty_parts(model: nn.Module, device: torch.device) -> None:
    """Create empty shards for parameters that this rank has no rows of (more ranks than experts)."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(parameter, DTensor) and parameter.numel() and not parameter.to_local().numel():
                if id(parameter) not in made:
                    part = torch.empty_like(parameter.to_local(), device=device)
                    value = _with_part(parameter, part)
                    made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                setattr(module, name, made[id(parameter)])


def _with_part(like: DTensor, part: Tensor) -> Tensor:
    """Return a tensor that is sharded as `like` and whose part on this rank is `part`."""
    divided = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return divided.to(part.device)


def _part_of(value: Tensor, like: DTensor, device: torch.device) -> Tensor:
    """Return the whole `value` sharded as `like`, with this rank's part on `device`."""
    local = DtensorShardOperation(like).shard_tensor(value, device=device)
    assert local is not None
    return _with_part(like, local)


def _draw_score(model: Any, device: torch.device) -> None:
    """Initialize a missing head of one score as `from_pretrained` does."""
    reference = model.score.weight
    outputs, inputs = reference.shape
    drawn = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=reference.dtype)
    drawn.to_empty(device="cpu")
    model._init_weights(drawn)
    value = drawn.weight.detach()
    if isinstance(reference, DTensor):
        value = _part_of(value, reference, device)
    model.score.weight = nn.Parameter(value.to(device))


def _make_buffers(model: Any, device: torch.device, what: str) -> None:
    """Compute on the CPU the buffers that no file has (rotary frequencies), as `from_pretrained` does."""
    for owner, name, module in _modules_with_owner(model):
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if not names:
            continue
        for buffer in names:
            empty = torch.empty_like(module.get_buffer(buffer), device="cpu")
            module.register_buffer(
                buffer, empty.fill_(float("nan")) if empty.is_floating_point() else empty, persistent=False
            )
        for parameter in module.parameters():
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers draws no value for it
        with init.guard_torch_init_functions():
            owner._init_weights(module)
            if any(module.get_buffer(buffer).isnan().any() for buffer in names):
                owner._init_weights(owner)  # some models compute their layers' buffers
        for buffer in names:
            value = module.get_buffer(buffer)
            if value.is_floating_point() and value.isnan().any():
                raise InvalidInput(
                    f"{what}: transformers does not compute buffer {name}.{buffer} of a {type(module).__name__}, so this "
                    "architecture cannot be loaded"
                )
            setattr(module, buffer, value.to(device))


def _modules_with_owner(model: Any) -> Iterator[tuple[Any, str, nn.Module]]:
    """Yield each module with its name and the closest transformers model around it, whose rules initialize it."""
    models = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    for name, module in model.named_modules():
        parts = name.split(".")
        around = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        yield next((models[path] for path in around if path in models), model), name, module
