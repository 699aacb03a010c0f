"""Tokenizers of every kind that models have, as small as they can be: a few pieces, and a fallback to bytes or characters."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPACE = "▁"
"""SentencePiece's mark of a white space."""
MARKS = ("<|user|>", "<|assistant|>", "<|im_start|>", "<|im_end|>")
WORDS = ("The", "answer", "is", "yes", "42", "no", "user", "assistant", "say")
KINDS = (
    "byte_level", "byte_level_prefix", "metaspace_first", "metaspace_always", "metaspace_never", "legacy_llama", "unigram",
    "unigram_always", "strips", "characters",
)  # fmt: skip
EXACT = tuple(
    kind for kind in KINDS if kind not in ("metaspace_always", "legacy_llama", "unigram_always", "byte_level_prefix")
)
"""Kinds that put no white space of their own behind a mark."""


def tokenizer_of(kind: str, added: str = "", pad: str = "<pad>", template: str | None = None) -> Any:
    """Return a tokenizer. `added` are the special tokens that it adds to a text: "b", "e" or "be" (begin, end)."""
    tokenizer = _MAKERS[kind]()
    specials = ["<s>", "<|im_end|>", "<pad>", *MARKS]
    tokenizer.add_special_tokens(list(dict.fromkeys(specials)))
    single = " ".join((["<s>"] if "b" in added else []) + ["$A"] + (["<|im_end|>"] if "e" in added else []))
    if added:
        numbers = [(mark, tokenizer.token_to_id(mark)) for mark in ("<s>", "<|im_end|>")]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=numbers)
    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token=pad,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def _byte_level(prefix: bool = False) -> Tokenizer:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(_merged(symbols, "Ġ"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merged(symbols: list[str], space: str, **options: Any) -> models.BPE:
    """BPE with the words, each with a space before it and without."""
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        for end in range(2, len(word) + 1):
            merges[word[: end - 1], word[end - 1]] = None
    merges |= {(space, word): None for word in WORDS}
    pieces = [*symbols, *("".join(pair) for pair in merges)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return models.BPE(vocabulary, list(merges), **options)


def _pieces() -> tuple[list[str], list[str]]:
    return [f"<0x{byte:02X}>" for byte in range(256)], [
        SPACE,
        *string.ascii_letters,
        *string.digits,
        *string.punctuation,
    ]


def _sentence_piece(scheme: str | None) -> Tokenizer:
    fallback, characters = _pieces()
    tokenizer = Tokenizer(_merged([*fallback, *characters], SPACE, byte_fallback=True, fuse_unk=True))
    ends: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme is None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        ends.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
        if scheme != "never":
            ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(ends)
    return tokenizer


def _unigram(scheme: str, strips: bool = False) -> Tokenizer:
    _, characters = _pieces()
    words = [*WORDS, *(SPACE + word for word in WORDS)]
    scores = [
        ("<unk>", -20.0),
        *((piece, -8.0) for piece in [*characters, "\n"]),
        *((word, -4.0) for word in words),
    ]
    tokenizer = Tokenizer(models.Unigram(scores, 0, byte_fallback=False))
    if strips:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(left=False, right=True)]
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
    return tokenizer


def _characters() -> Tokenizer:
    tokenizer = Tokenizer(
        models.WordLevel({character: number for number, character in enumerate(string.printable)}, string.printable[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


_MAKERS = {
    "byte_level": _byte_level,
    "byte_level_prefix": lambda: _byte_level(prefix=True),
    "metaspace_first": lambda: _sentence_piece("first"),
    "metaspace_always": lambda: _sentence_piece("always"),
    "metaspace_never": lambda: _sentence_piece("never"),
    "legacy_llama": lambda: _sentence_piece(None),
    "unigram": lambda: _unigram("first"),
    "unigram_always": lambda: _unigram("always"),
    "strips": lambda: _unigram("first", strips=True),
    "characters": _characters,
}
