"""Models of the shapes of Qwen3 with random weights, written once for all cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.random_model import write_random_model

VOCABULARY = 151_936


def _shape(
    layers: int, hidden: int, mlp: int, heads: int, tied: bool, key_value_heads: int = 8, head_dim: int = 128
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40_960,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _shape(2, 64, 192, 4, True, 2, 16) | {"vocab_size": 512},
    "0.6B": _shape(28, 1_024, 3_072, 16, True),
    "1.7B": _shape(28, 2_048, 6_144, 16, True),
    "4B": _shape(36, 2_560, 9_728, 32, True),
    "8B": _shape(36, 4_096, 12_288, 32, False),
    "8B-12L": _shape(12, 4_096, 12_288, 32, False),
}
"""Sizes of Qwen3's dense models, by name; `8B-12L` has a third of the layers of 8B, which 80 GB can train whole, and `tiny`
checks the benchmark itself."""


def model_folder(name: str, root: Path) -> Path:
    """Return the folder of a model, written before if it is not there: bfloat16 safetensors, never held as a whole."""
    folder = root / name
    if (folder / "written").exists():
        return folder
    from transformers import Qwen3Config

    write_random_model(folder, Qwen3Config(**SHAPES[name], dtype="bfloat16"), 1 << 30)
    (folder / "written").touch()
    return folder
