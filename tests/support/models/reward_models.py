"""Tiny classification models with random weights and the demo's tokenizer of single characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification, Qwen3ForTokenClassification

from paceline.services.demo.task import make_tokenizer

MAX_TOKENS = 64


def save_classifier(folder: Path, *, seed: int = 0, labels: int = 1, by_token: bool = False, **changes: Any) -> Path:
    """Write a classification of sequences, or with `by_token` of tokens, whose scores differ clearly by the text."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16, **changes}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.3,
        num_labels=labels,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **sizes,
    )
    model: Any = (Qwen3ForTokenClassification if by_token else Qwen3ForSequenceClassification)(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
