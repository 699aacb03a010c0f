"""Exports the policy as a Hugging Face folder: from tensors, from the shards of a model in training, or from a
checkpoint. Also exports only the adapter, as a folder that PEFT reads.

Promise: `AutoModelForCausalLM.from_pretrained` on the folder gives the trained weights, converted to the requested
type, with tied embeddings still tied; the folder appears whole or not at all; no whole copy of the model is made.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.errors import InvalidInput
from paceline.learner.checkpoints.checkpoint import read_state
from paceline.learner.checkpoints.export_folder import written_beside
from paceline.learner.checkpoints.manifest import write_export_manifest
from paceline.learner.checkpoints.model_folder import ModelFolder, empty_model, own_names
from paceline.learner.checkpoints.verification import Location, Verified, verify
from paceline.learner.model.adapter import adapter_weights, add_adapter, is_part_of_adapter
from paceline.learner.weights.gather import gather_merged, is_first_rank
from paceline.learner.weights.stream import PIECE_BYTES, TensorRun, Weight, export_weights, pieces
from paceline.models.export_origin import Origin
from paceline.models.pretrained import load_pretrained
from paceline.spec import LoraSection, PolicySection
from paceline.weights.format.lora_names import A_SUFFIX, FINGERPRINT, PREFIX


def export_pretrained(
    directory: Location,
    tensors: Mapping[str, torch.Tensor],
    *,
    model_name: str,
    tokenizer_name: str | None = None,
    dtype: torch.dtype | None = None,
    scoring: bool = False,
    replace: bool = False,
) -> Location:
    """Write `tensors` (a whole state dict by Hugging Face names, as `gather_weights` returns it) as a model folder.
    Config and generation config come from `model_name`, the tokenizer from `tokenizer_name`, or from `model_name` if it
    has one. `dtype` None keeps the tensors' types. Raises Conflict if `directory` exists (with `replace`: only if it is
    not an export), InvalidInput if names or shapes are not the model's."""
    weights = {name: Weight(tensor.detach()) for name, tensor in tensors.items()}
    policy = PolicySection(model_name=model_name, tokenizer_name=tokenizer_name)
    _write(directory, pieces(weights, dtype), weights, policy, dtype, scoring, replace=replace)
    return directory


def _write(
    directory: Location,
    stream: Iterator[TensorRun],
    weights: Mapping[str, Weight],
    policy: PolicySection,
    dtype: torch.dtype | None,
    scoring: bool,
    *,
    replace: bool = False,
    origin: Origin | None = None,
) -> None:
    """Write the pieces of a `stream` of `weights`; tied tensors under one name only."""
    with (
        written_beside(directory, replace=replace) as partial,
        ModelFolder(partial, weights, policy, dtype, scoring) as folder,
    ):
        names = set(folder.names)
        for piece in stream:
            if piece.name in names:
                folder.add(piece)
        folder.finish(origin)


def export_live(
    directory: Location,
    model: nn.Module,
    policy: PolicySection,
    *,
    dtype: torch.dtype,
    scoring: bool = False,
    origin: Origin | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> Exception | None:
    """Export the trained `model` from its shards, an adapter merged into its base; replace an earlier export. `origin`
    is the run. A collective call of all ranks, in which only rank 0 writes. If rank 0 cannot write, it returns the
    error after all ranks have gone through every tensor; otherwise return None. Raises errors of the collectives, after
    which the ranks cannot go on together. The model is unchanged, and rank 0 holds a few pieces of it at a time."""
    weights = export_weights(model)
    apart: list[Exception] = []
    stream = _watched(pieces(weights, dtype, piece_bytes), apart)
    failure: Exception | None = None
    if is_first_rank():
        try:
            _write(directory, stream, weights, policy, dtype, scoring, replace=True, origin=origin)
        except Exception as error:  # of transformers, the disk and the allocators, without a common base
            failure = error
    for _ in stream:
        pass  # so that the other ranks can continue to gather
    if apart:
        raise apart[0]
    return failure


def _watched(stream: Iterator[TensorRun], errors: list[Exception]) -> Iterator[TensorRun]:
    try:
        yield from stream
    except Exception as error:
        errors.append(error)
        raise


def export_checkpoint(
    checkpoint: Location,
    directory: Location,
    *,
    expected_sha256: str,
    policy: PolicySection,
    dtype: torch.dtype | None = None,
    scoring: bool = False,
    adapter_only: bool = False,
    origin: Origin | None = None,
) -> Location:
    """Export a checkpoint as a folder at a path or an fsspec URL, in one process and without a process group; `dtype`
    None is float32. `origin` is the checkpoint's run. An adapter is merged into its base; with `adapter_only` only the
    adapter is written, in peft's format. Host memory must hold one tensor; if the run trains an adapter, its whole
    base. Also raises the errors of `paceline.learner.checkpoints.verification.verify`."""
    target_dtype = dtype or torch.float32
    if adapter_only:
        check_has_adapter(policy)
        adapter = adapter_weights(_adapted_model(checkpoint, expected_sha256, policy))
        return export_adapter(directory, adapter, policy.lora_cfg, policy.model_name, origin=origin)
    if policy.lora_cfg.enabled:
        weights = export_weights(_adapted_model(checkpoint, expected_sha256, policy))
        stream = pieces(weights, target_dtype)
    else:
        verified = verify(checkpoint, expected_sha256)
        model = empty_model(policy.model_name, scoring)
        state = model.state_dict()
        weights = {name: Weight(state[name]) for name in own_names(model)}
        stream = _pieces_of_checkpoint(verified, weights, target_dtype)
    _write(directory, stream, weights, policy, target_dtype, scoring, origin=origin)
    return directory


def _pieces_of_checkpoint(verified: Verified, weights: Mapping[str, Weight], dtype: torch.dtype) -> Iterator[TensorRun]:
    for name, weight in weights.items():
        stored = torch.float32 if weight.tensor.is_floating_point() else weight.tensor.dtype
        tensor = torch.empty(weight.tensor.shape, dtype=stored)
        read_state(verified, {"model": {name: tensor}})
        yield TensorRun(name, 0, tensor.to(weight.dtype(dtype)).reshape(-1))


def check_has_adapter(policy: PolicySection) -> None:
    if not policy.lora_cfg.enabled:
        raise InvalidInput("the run trains no adapter (policy.lora_cfg.enabled is false); export the model")


def checkpoint_weights(
    checkpoint: Location, expected_sha256: str, policy: PolicySection, *, scoring: bool = False
) -> dict[str, torch.Tensor]:
    """Return the whole state dict of a checkpoint by Hugging Face names, in float32, in one process without a process
    group. An adapter is merged into its base. Raises as `paceline.learner.checkpoints.verification.verify`."""
    if policy.lora_cfg.enabled:
        return gather_merged(_adapted_model(checkpoint, expected_sha256, policy))
    verified = verify(checkpoint, expected_sha256)
    state = {
        name: torch.empty(tensor.shape, dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in empty_model(policy.model_name, scoring).state_dict().items()
    }
    read_state(verified, {"model": state})
    return state


def _adapted_model(checkpoint: Location, expected_sha256: str, policy: PolicySection) -> PreTrainedModel:
    verified = verify(checkpoint, expected_sha256)
    name = policy.model_name
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = load_pretrained(auto, name, "policy.model_name", dtype=torch.float32)
    add_adapter(model, policy.lora_cfg, seed=0)
    state = {name: tensor for name, tensor in model.state_dict().items() if is_part_of_adapter(name)}
    read_state(verified, {"model": state})
    return model


def compare_weights(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> tuple[list[str], float]:
    """Return the names of tensors that differ in bits or are in only one of the two, and the largest absolute
    difference."""
    names = sorted(first.keys() ^ second.keys())
    largest = 0.0
    for name in sorted(first.keys() & second.keys()):
        a, b = first[name].contiguous(), second[name].contiguous()
        alike = a.dtype == b.dtype and a.shape == b.shape
        if alike and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            continue
        names.append(name)
        if a.shape == b.shape:
            largest = max(largest, float((a.double() - b.double()).abs().max()))
    return names, largest


def export_adapter(
    directory: str | os.PathLike[str],
    adapter: Mapping[str, Tensor],
    lora: LoraSection,
    model_name: str,
    *,
    replace: bool = False,
    origin: Origin | None = None,
) -> str | os.PathLike[str]:
    """Write `adapter` (whole, as `gather_weights` returns it) as a folder that `PeftModel.from_pretrained` reads, for
    the run `origin`, if any. Raises Conflict if `directory` exists; with `replace`, only if it is not an export."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().clone() for name, tensor in adapter.items() if name != FINGERPRINT}
    layers = [name.removeprefix(PREFIX).removesuffix(A_SUFFIX) for name in tensors if name.endswith(A_SUFFIX)]
    config = LoraConfig(
        r=lora.dim,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        # Whole names if layers were excluded, because the last part of a name would include them again.
        target_modules=sorted(set(layers if lora.exclude_modules else (n.split(".")[-1] for n in layers))),
        base_model_name_or_path=model_name,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    with written_beside(directory, replace=replace) as partial:
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(partial))
        # safetensors makes its files readable only for their owner, but a server of another user must read this one.
        shutil.copymode(partial / "adapter_config.json", partial / "adapter_model.safetensors")
        write_export_manifest(partial, origin)
    return directory
