"""Sizes of a transformer, from its config.json alone. Nothing heavy is imported and nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer."""

    layers: int
    hidden: int
    mlp: int
    """Width of the MLP, of all experts that a token passes through together."""
    attention: int
    """Width of the queries of all heads."""
    key_value: int
    """Width of the keys of all heads."""
    vocabulary: int
    parameters: int
    adapted_rows: int
    """Σ (inputs + outputs) of all linear layers of the model below its head; times the rank it is a LoRA adapter's size."""
    layer_parameters: int
    """Parameters of one decoder layer."""
    tied: bool = True
    """Whether the head is the embedding."""
    experts_per_token: int = 0
    """Experts that a token passes through; 0 where the MLP is dense."""
    heads: int = 1
    key_value_heads: int = 1

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; a head that is not tied to it has as many."""
        return self.vocabulary * self.hidden


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the sizes in a model's config.json; None where it has other keys than the usual ones."""
    text = config.get("text_config") or config
    try:
        layers, hidden, heads = (
            int(text[key]) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
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
    """Return the sizes of a model in a local folder or in the hub's cache on this machine; None where there is none, or where
    its config.json has other keys than the usual ones."""
    config = read_config(model_name)
    return None if config is None else shape_of(config)


def read_config(model_name: str) -> dict[str, Any] | None:
    """Return the config.json of a local folder, or of the hub's cache on this machine; None where there is none."""
    path: Path | None = Path(model_name).expanduser() / "config.json"
    if path is not None and not path.is_file():
        path = _cached_config(model_name)
    try:
        config = None if path is None else json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _cached_config(model_name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model_name, "config.json")
    except Exception:  # a name that the hub would not accept, or no such package: there is no estimate then
        return None
    return Path(found) if isinstance(found, str) else None
