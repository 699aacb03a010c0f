"""Computes a transformer's sizes from its config.json, the mesh of the learner's ranks, and the FLOPs of training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import InvalidInput
from paceline.host.regular_file import read_named
from paceline.models.architectures import MIXERS
from paceline.spec import ParallelSection


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer."""

    layers: int
    hidden: int
    mlp: int
    """Width of the MLP; with experts, the sum of the widths of those that a token passes through."""
    attention: int
    """Width of the queries of all heads."""
    key_value: int
    """Width of the keys of all heads."""
    vocabulary: int
    parameters: int
    adapted_rows: int
    """Σ (inputs + outputs) of all linear layers below the head. The rank times this is the size of a LoRA adapter."""
    layer_parameters: int
    """Number of parameters of one decoder layer."""
    tied: bool = True
    """True if the head shares the embedding's matrix."""
    experts_per_token: int = 0
    """Number of experts that a token passes through; 0 for a dense MLP."""
    heads: int = 1
    key_value_heads: int = 1

    @property
    def embedding(self) -> int:
        """Number of parameters of the embedding; an untied head has the same number."""
        return self.vocabulary * self.hidden


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the sizes in a model's config.json; None if it has unusual keys, latent attention or layers with states."""
    text = config.get("text_config") or config
    if text.get("kv_lora_rank") or {config.get("model_type"), text.get("model_type")} & set(MIXERS):
        return None
    try:
        layers, hidden, heads = (int(text[key]) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        vocabulary, dense = int(text["vocab_size"]), int(text["intermediate_size"])
        head = int(text.get("head_dim") or hidden // heads)
        key_value_heads = int(text.get("num_key_value_heads") or heads)
        attention, key_value = heads * head, key_value_heads * head
        experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
        each = int(text.get("moe_intermediate_size") or dense)
        chosen = int(text.get("num_experts_per_tok") or 1) if experts else 0
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    if min(layers, hidden, heads, vocabulary, dense) < 1:
        return None
    width = each * experts if experts else dense
    layer = 2 * hidden * (attention + key_value) + 3 * hidden * width + hidden * experts + 2 * hidden
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    rows = 2 * (hidden + attention) + 2 * (hidden + key_value) + 3 * (hidden + width)
    return ModelShape(
        layers,
        hidden,
        each * chosen if experts else dense,
        attention,
        key_value,
        vocabulary,
        parameters=layers * layer + vocabulary * hidden * (1 if tied else 2) + hidden,
        adapted_rows=layers * rows,
        layer_parameters=layer,
        tied=tied,
        experts_per_token=chosen,
        heads=heads,
        key_value_heads=key_value_heads,
    )


def read_shape(model_name: str) -> ModelShape | None:
    """Return a model's sizes from a local folder or this machine's hub cache; None without a usual config.json."""
    config = read_config(model_name)
    return None if config is None else shape_of(config)


def read_config(model_name: str) -> dict[str, Any] | None:
    """Return the config.json of a local folder or of this machine's hub cache; None if there is none."""
    path: Path | None = Path(model_name).expanduser() / "config.json"
    if path is not None and not path.is_file():
        path = _cached_config(model_name)
    try:
        config = None if path is None else json.loads(read_named(path))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _cached_config(model_name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model_name, "config.json")
    except Exception:  # a name that the hub would refuse, or a missing package: no estimate then
        return None
    return Path(found) if isinstance(found, str) else None


STATE_BYTES = 16
"""Bytes of a parameter with its gradient and moments, all in float32."""
HOST_SHARE = 0.7
"""`auto` makes replicas only if the state fills at most this share of a host's GPU memory; the rest is activations."""


class MeshShape(NamedTuple):
    """Sizes of the dimensions of the mesh; the product of the sizes is the number of ranks."""

    replicate: int
    shard: int


def mesh_shape(parallel: ParallelSection, ranks: int, hosts: int, fits_host: Callable[[], bool]) -> MeshShape:
    """Return the sizes for `ranks` ranks on `hosts` hosts. `auto` divides a model by all ranks. If there are several
    hosts and `fits_host` says that the model fits on one host, each host gets a replica instead. Raises InvalidInput if
    the sizes do not match the number of ranks."""
    replicate, shard = parallel.replicate, parallel.shard
    if replicate == "auto" and shard == "auto":
        replicate = hosts if hosts > 1 and ranks % hosts == 0 and fits_host() else 1
    if replicate == "auto":
        assert shard != "auto"
        replicate = ranks // shard
    if shard == "auto":
        shard = ranks // replicate
    if replicate * shard != ranks:
        raise InvalidInput(
            f"policy.parallel.replicate {parallel.replicate} and shard {parallel.shard} do not multiply to {ranks}, "
            "the number of the learner's ranks; set one of them to auto, or to a divisor of that number"
        )
    return MeshShape(replicate, shard)


def state_room(ranks: int, gpu_bytes: int) -> int:
    """Return the bytes for the state of a replica on a host whose `ranks` GPUs have `gpu_bytes` each."""
    return int(HOST_SHARE * ranks * gpu_bytes)


DENSE_BFLOAT16_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""Peak FLOP/s in dense bfloat16 of GPUs whose names contain the key, from NVIDIA's data sheets."""


def training_flops(
    shape: ModelShape, runs: Iterable[tuple[int, int]], predicted: int, *, frozen_base: bool = False
) -> float:
    """Return the FLOPs of one forward and backward pass, as for the model FLOPs utilisation of PaLM (Chowdhery et al.
    2022, arXiv 2204.02311, appendix B): per weight and token 2 forward and 4 backward (2 with LoRA), and the
    products of causal attention. Recomputed activations and frozen policies do not count, so they lower the
    utilisation. `runs` are (count, length) of the sequences, as in a packed row; `predicted` counts tokens whose
    logits are computed; `frozen_base` (LoRA): the model's own weights have no gradients."""
    layer = 2 * shape.hidden * (shape.attention + shape.key_value) + 3 * shape.hidden * shape.mlp
    passes = 4 if frozen_base else 6
    total = 0.0
    for count, length in runs:
        # Scores and values: 2 products of 2·width operations for each pair, half of which are masked; three times with
        # backward.
        attention = 6 * shape.attention * length * length
        total += count * shape.layers * (passes * layer * length + attention)
    return total + passes * shape.embedding * predicted


def peak_flops(device_name: str) -> float | None:
    """Return the peak FLOP/s of a GPU in dense bfloat16; None for an unknown GPU."""
    return next((peak for name, peak in DENSE_BFLOAT16_FLOPS.items() if name in device_name), None)
