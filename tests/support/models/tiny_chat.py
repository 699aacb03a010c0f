"""A tiny Qwen3 over bytes with random weights and a chat template of one token for each mark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def make_chat_tokenizer() -> Any:
    """Return the tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    fast.chat_template = TEMPLATE
    return fast


def save_tiny_chat(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write model and tokenizer to `folder`."""
    fast = make_chat_tokenizer()
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
    }
    made = Qwen3Config(
        vocab_size=len(fast),
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        **{**sizes, **config},
    )
    Qwen3ForCausalLM(made).save_pretrained(folder)
    return folder
