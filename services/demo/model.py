"""The demo's model and tokenizer, made on the spot: a two-layer Qwen3 with random weights, one token a character."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from paceline.services.demo.task import DIGITS

CHARACTERS = DIGITS + "+="
END, PAD = "<end>", "<pad>"


def make_tokenizer(characters: str = CHARACTERS) -> Any:
    """Return a tokenizer of these characters, each a token, whose end of sequence is `<end>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, END, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, unk_token=PAD)


def make_model(
    directory: Path,
    *,
    seed: int,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    characters: str = CHARACTERS,
) -> None:
    """Write a randomly initialised model with its tokenizer to `directory`.

    initializer_range 0.05: at the usual 0.02 a model this small stays on a plateau for thousands of steps.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    tokenizer = make_tokenizer(characters)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=256,
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    disable_progress_bar()  # type: ignore[no-untyped-call]
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # safetensors lets nobody but the owner read its files; containers read this one as another user.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")
