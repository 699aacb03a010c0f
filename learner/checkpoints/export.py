"""Exporting the policy as a Hugging Face folder: safetensors, config, generation config and tokenizer files.

Promise: `AutoModelForCausalLM.from_pretrained` on the folder gives the trained weights, converted to the wanted type, tied
embeddings still tied; the folder appears whole under its name or not at all.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from learner.checkpoints.adapter_export import export_adapter
from learner.checkpoints.checkpoint import read_state
from learner.checkpoints.export_folder import written_beside
from learner.checkpoints.export_manifest import write_export_manifest
from learner.checkpoints.verification import Location, verify
from learner.model.adapter import adapter_weights, add_adapter, is_part_of_adapter
from learner.weights.gather import gather_merged
from paceline.data.tokens import padding_token_id
from paceline.errors import InvalidInput
from paceline.spec import PolicySection

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)
"""Names of a tokenizer's files in the libraries that write them."""


def export_pretrained(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    model_name: str,
    tokenizer_name: str | None = None,
    dtype: torch.dtype | None = None,
    scoring: bool = False,
    replace: bool = False,
) -> Path:
    """Write `tensors` (a whole state dict by Hugging Face names, as `gather_weights` gives it) as a model folder.

    Config and generation config come from `model_name`, the tokenizer from `tokenizer_name`, or from `model_name`
    if it has one. `dtype` None keeps the tensors' types. Raises Conflict when `directory` exists (with `replace`: and is no
    export), InvalidInput when names or shapes are not the model's.
    """
    model = _skeleton(model_name, scoring)
    if scoring:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name or model_name)
        model.config.pad_token_id = padding_token_id(tokenizer)  # transformers scores the last other token
    converted = {name: _converted(tensor, dtype) for name, tensor in tensors.items()}
    _fill(model, converted, model_name)
    with written_beside(directory, replace=replace) as partial:
        model.save_pretrained(partial)
        _copy_tokenizer(tokenizer_name or model_name, partial, required=tokenizer_name is not None)
        write_export_manifest(partial)
    return directory


def export_checkpoint(
    checkpoint: Location,
    directory: Path,
    *,
    expected_sha256: str,
    policy: PolicySection,
    dtype: torch.dtype | None = None,
    scoring: bool = False,
    adapter_only: bool = False,
) -> Path:
    """Export a checkpoint's folder, in one process and without a process group.

    An adapter is merged into its base; with `adapter_only` it is written alone, in peft's format. Host memory must hold
    the float32 weights. Raises also what `learner.checkpoints.verification.verify` raises.
    """
    if adapter_only:
        check_has_adapter(policy)
        tensors = adapter_weights(_adapted_model(checkpoint, expected_sha256, policy))
    else:
        tensors = checkpoint_weights(checkpoint, expected_sha256, policy, scoring=scoring)
    return export_policy(directory, tensors, policy, dtype=dtype, scoring=scoring, adapter_only=adapter_only)


def export_policy(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    policy: PolicySection,
    *,
    dtype: torch.dtype | None = None,
    scoring: bool = False,
    adapter_only: bool = False,
    replace: bool = False,
) -> Path:
    """Export `tensors` as the trained model of `policy`, or with `adapter_only` as an adapter to it. Raises as
    `export_pretrained` and `export_adapter` do."""
    if adapter_only:
        return export_adapter(directory, tensors, policy.lora_cfg, policy.model_name, replace=replace)
    return export_pretrained(
        directory,
        tensors,
        model_name=policy.model_name,
        tokenizer_name=policy.tokenizer_name,
        dtype=dtype,
        scoring=scoring,
        replace=replace,
    )


def check_has_adapter(policy: PolicySection) -> None:
    """Raise InvalidInput for a run that trains no adapter."""
    if not policy.lora_cfg.enabled:
        raise InvalidInput("the run trains no adapter (policy.lora_cfg.enabled is false); export the model")


def checkpoint_weights(
    checkpoint: Location, expected_sha256: str, policy: PolicySection, *, scoring: bool = False
) -> dict[str, torch.Tensor]:
    """Return the whole state dict of a checkpoint by Hugging Face names, in float32, in one process without a process group.

    An adapter is merged into its base. Raises what `learner.checkpoints.verification.verify` raises.
    """
    if policy.lora_cfg.enabled:
        return gather_merged(_adapted_model(checkpoint, expected_sha256, policy))
    verified = verify(checkpoint, expected_sha256)
    wanted = {
        name: torch.empty(tensor.shape, dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in _skeleton(policy.model_name, scoring).state_dict().items()
    }
    read_state(verified, {"model": wanted})
    return wanted


def _adapted_model(checkpoint: Location, expected_sha256: str, policy: PolicySection) -> PreTrainedModel:
    """Return the base with the checkpoint's adapter."""
    verified = verify(checkpoint, expected_sha256)
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_pretrained(policy.model_name, dtype=torch.float32)
    add_adapter(model, policy.lora_cfg, seed=0)
    state = {name: tensor for name, tensor in model.state_dict().items() if is_part_of_adapter(name)}
    read_state(verified, {"model": state})
    return model


def compare_weights(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
) -> tuple[list[str], float]:
    """Return the names of the tensors whose bits differ (or that only one side has), and the largest absolute difference."""
    names = sorted(first.keys() ^ second.keys())
    largest = 0.0
    for name in sorted(first.keys() & second.keys()):
        a, b = first[name].contiguous(), second[name].contiguous()
        if (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        ):
            continue
        names.append(name)
        if a.shape == b.shape:
            largest = max(largest, float((a.double() - b.double()).abs().max()))
    return names, largest


def _skeleton(model_name: str, scoring: bool) -> PreTrainedModel:
    """Return the model's modules without memory for weights."""
    options = {"num_labels": 1} if scoring else {}
    config = AutoConfig.from_pretrained(model_name, **options)
    kind = AutoModelForSequenceClassification if scoring else AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(config)  # type: ignore[no-untyped-call]
    model.tie_weights()
    return model


def _fill(model: PreTrainedModel, tensors: dict[str, torch.Tensor], model_name: str) -> None:
    try:
        model.load_state_dict(cast(dict[str, Any], tensors), assign=True)
    except RuntimeError as error:
        raise InvalidInput(f"these weights are not of model {model_name!r}: {error}") from error
    model.tie_weights()
    floating = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(floating) == 1:
        model.config.dtype = floating.pop()
    if model.can_generate():
        _copy_generation_config(model, model_name)


def _copy_generation_config(model: PreTrainedModel, model_name: str) -> None:
    try:
        model.generation_config = GenerationConfig.from_pretrained(model_name)
    except OSError:
        return  # the model has none; transformers derives it from the config


def _converted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _copy_tokenizer(source: str, directory: Path, *, required: bool) -> None:
    """Copy a local folder's files byte for byte, or save a hub model's tokenizer with its class."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        AutoTokenizer.from_pretrained(source).save_pretrained(directory)
        return
    files = sorted({file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)})
    if required and not files:
        raise InvalidInput(f"tokenizer_name {source!r}: no tokenizer files in that folder")
    for file in files:
        if file.is_dir():
            shutil.copytree(file, directory / file.name)
        else:
            shutil.copyfile(file, directory / file.name)
