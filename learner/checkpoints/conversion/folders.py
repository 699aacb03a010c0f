"""`paceline convert`: converts model folders to and from checkpoints of torch.distributed.checkpoint, or to folders
with converted, merged or quantized weights.

Promise: the weights keep their names and layouts, and also their bits if neither a type nor an adapter is given. The
result appears whole or not at all. Peak memory does not grow with the model, unless the weights are quantized.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from paceline.errors import InvalidInput
from paceline.files.model_source import model_source
from paceline.files.storage import Folder, is_url
from paceline.learner.checkpoints.conversion.dcp import DcpCheckpoint, write_dcp
from paceline.learner.checkpoints.conversion.weights import BLOCK_BYTES, ModelWeights, refuse_not_finite
from paceline.learner.checkpoints.export_folder import written_beside
from paceline.learner.checkpoints.manifest import write_export_manifest
from paceline.learner.checkpoints.metadata import METADATA
from paceline.learner.checkpoints.model_folder import (
    MAX_FILE_BYTES,
    SafetensorsWriter,
    TensorHeader,
    empty_model,
    misfits,
    stored_tensors,
)
from paceline.learner.checkpoints.other_files import CONFIG, check_tokenizer, copy_other_files
from paceline.learner.checkpoints.verification import Location
from paceline.models.pretrained import check_model, check_weights, skeleton
from paceline.models.weight_files import WeightFiles, find_weight_files


def is_dcp(source: Location) -> bool:
    """Return whether a folder or URL has a checkpoint of torch.distributed.checkpoint."""
    return Folder(source).exists(METADATA)


def to_dcp(
    source: str,
    destination: Location,
    *,
    dtype: torch.dtype | None = None,
    adapter: Path | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Write a model folder's weights as a checkpoint, with config and tokenizer. `dtype` None keeps types; a LoRA
    adapter in peft's folder is merged. Raises Conflict if `destination` exists, InvalidInput if the model is damaged or
    the adapter is of another model, and Unreadable."""
    with _weight_files(source, changed=bool(dtype or adapter)) as files, written_beside(destination) as partial:
        write_dcp(partial, ModelWeights(files, dtype, adapter, block_bytes))
        _copy_other_files(Path(model_source(source, "SOURCE")), partial, dtype)


def to_folder(
    source: str,
    destination: Location,
    *,
    dtype: torch.dtype | None = None,
    adapter: Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a model folder with converted or merged weights. Raises the errors of `to_dcp`."""
    with _weight_files(source, changed=bool(dtype or adapter)) as files, written_beside(destination) as partial:
        weights = ModelWeights(files, dtype, adapter)
        headers = weights.headers()
        with SafetensorsWriter(partial, headers, max_file_bytes) as writer:
            for header in headers:
                for begin, end in weights.blocks(header):
                    first = begin * math.prod(header.shape[1:])
                    writer.write(header.name, first, weights.read(header.name, begin, end))
            writer.finish()
        _copy_other_files(Path(model_source(source, "SOURCE")), partial, dtype)
        _check_result(partial, f"the conversion of {source!r}")
        write_export_manifest(partial)


def from_dcp(
    checkpoint: Location,
    destination: Location,
    *,
    config: str | None = None,
    key: str | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the weights of a checkpoint as a model folder. Config and tokenizer come from the model `config`, or from
    the checkpoint's folder if it is None. `key` is the entry of the state dict that has the weights (None: `model`, or
    the whole dict). Raises Conflict if `destination` exists, InvalidInput if the weights are not those of the model
    that the config describes, Unavailable."""
    folder = Folder(checkpoint)
    stored = DcpCheckpoint(folder, key)
    if config is None and not folder.exists(CONFIG):
        raise InvalidInput(
            f"{folder} has no {CONFIG} beside its weights; name with --config the model folder that training began from"
        )
    described = Path(model_source(config or str(folder), "--config"))
    headers = [TensorHeader(h.name, _converted(h.dtype, dtype), h.shape) for h in stored.headers()]
    _check_names(headers, described, folder)
    with written_beside(destination) as partial:
        with SafetensorsWriter(partial, headers, max_file_bytes) as writer:
            shapes = {header.name: header.shape for header in headers}

            def take(name: str, offsets: tuple[int, ...], values: Tensor) -> None:
                values = values.to(_converted(values.dtype, dtype))
                refuse_not_finite(values, name, str(folder))
                write_box(writer, name, shapes[name], offsets, values)

            stored.read(take)
            writer.finish()
        _copy_other_files(described, partial, dtype)
        _check_result(partial, str(folder))
        write_export_manifest(partial)


def _weight_files(source: str, *, changed: bool) -> WeightFiles:
    """Return a model folder's weight files, checked. With `changed`, quantized weights raise InvalidInput."""
    if not is_url(source) and not Path(source).is_dir():
        raise InvalidInput(f"SOURCE {source!r} is not a folder; fetch a model of the hub with `hf download` first")
    local = model_source(source, "SOURCE")
    files = find_weight_files(source, local, "SOURCE")
    if not check_described(local, files, f"SOURCE {source!r}") and changed:
        files.__exit__()
        raise InvalidInput(
            f"SOURCE {source!r} is quantized (quantization_config in its config.json), so its values and scales cannot be "
            "converted or merged; use the 16-bit or 32-bit model"
        )
    return files


def check_described(folder: str, files: WeightFiles, what: str) -> bool:
    """Raise InvalidInput unless `files` are the weights of the model that the config in `folder` describes; return
    False if the weights are quantized. Nothing is checked if they are, or if transformers lacks the model."""
    content = json.loads((Path(folder) / CONFIG).read_bytes())
    if content.get("quantization_config") is not None:
        return False
    if content.get("model_type") in CONFIG_MAPPING:
        config = AutoConfig.from_pretrained(folder)
        named = [getattr(transformers, name, None) for name in config.architectures or ()]
        if kind := next(iter(named), AutoModelForCausalLM):
            check_weights(skeleton(kind, config), files, what)
    return True


def _check_result(folder: Path, what: str) -> None:
    """Raise InvalidInput if the weights are not the model's: an adapter may have changed one of two tied weights."""
    with find_weight_files(str(folder), str(folder), "DESTINATION") as files:
        check_described(str(folder), files, what)


def _converted(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and stored.is_floating_point else stored


def write_box(
    writer: SafetensorsWriter, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], values: Tensor
) -> None:
    """Write a part of a tensor, which may be cut along any axis, as the longest contiguous runs of elements."""
    axes = len(shape)
    whole = next((axis for axis in range(axes) if tuple(values.shape[axis + 1 :]) == shape[axis + 1 :]), axes)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(axes)]
    for index in itertools.product(*(range(size) for size in values.shape[:whole])):
        at = [*index, *[0] * (axes - whole)]
        first = sum((o + i) * stride for o, i, stride in zip(offsets, at, strides, strict=True))
        writer.write(name, first, values[index])


def _check_names(headers: list[TensorHeader], described: Path, checkpoint: Folder) -> None:
    """Raise InvalidInput unless the names and shapes are those in the files of the model that the config describes."""
    config = json.loads((described / CONFIG).read_bytes())
    scoring = any("SequenceClassification" in name for name in config.get("architectures") or ())
    stored = stored_tensors(empty_model(str(described), scoring))
    expected = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    if wrong := misfits({header.name: header.shape for header in headers}, expected):
        raise InvalidInput(
            f"{checkpoint}: its weights are not those of the model in {described}: {wrong}. "
            "Export a run's checkpoint with `paceline export RUN`; for other checkpoints name the model with --config, and "
            "with --key the entry that has the weights"
        )


def _copy_other_files(source: Path, folder: Path, dtype: torch.dtype | None) -> None:
    """Copy all files but weights; set the config's new type. Raises InvalidInput if the tokenizer's copy differs."""
    copy_other_files(source, folder)
    if dtype is not None:
        path = folder / CONFIG
        config = json.loads(path.read_bytes())
        named = [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]
        config |= dict.fromkeys(named, str(dtype).removeprefix("torch."))
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    check_tokenizer(str(source), folder)


def quantize_folder(source: str, destination: Location, kind: Literal["int8", "float8"]) -> None:
    """Write the model of a folder with the weights of its linear layers, except the LM head, in eight bits with a scale
    for each output; activations keep their type. The whole model is in memory. Raises InvalidInput if torchao is not
    installed, Conflict if `destination` exists."""
    if importlib.util.find_spec("torchao") is None:
        raise InvalidInput("--quantize needs torchao: pip install 'paceline[quantize]'")
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = Int8WeightOnlyConfig() if kind == "int8" else Float8WeightOnlyConfig()
    auto: Any = AutoModelForCausalLM
    folder = model_source(source, "SOURCE", weights=True)
    if check_model(auto, folder, "SOURCE"):
        raise InvalidInput(f"SOURCE {source!r} is quantized already; use its 16-bit or 32-bit version")
    model = auto.from_pretrained(folder, dtype="auto", quantization_config=TorchAoConfig(config))
    with written_beside(destination) as partial:
        model.save_pretrained(partial)
        for file in partial.glob("*.safetensors"):
            # safetensors makes its files readable only for their owner, but a server of another user must read these.
            shutil.copymode(partial / "config.json", file)
        copy_other_files(Path(folder), partial, {CONFIG})
        check_tokenizer(source, partial)
        write_export_manifest(partial)
