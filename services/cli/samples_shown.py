"""Samples of a data set for people: what a model reads and what it trains on, as text or as its tokens."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np

from paceline.data.conversations import encode_conversation
from paceline.data.example_rows import Demonstration, is_whole
from paceline.data.exchanges import exchange_of
from paceline.data.messages import tools_of, tools_of_prompt
from paceline.data.tokens import changed_text, encode_exchange, encode_prompt, encode_text
from paceline.spec import RunSpec

Part = tuple[str, bool]
"""Text, and whether it trains."""


def as_text(row: dict[str, Any], spec: RunSpec) -> list[Part]:
    """Return the texts of a row: messages with their roles before them."""
    prompt, completion, kind = exchange_of(row, spec)
    parts = [
        (shown(prompt or ""), False),
        (shown(completion or ""), True),
        (f"  [{kind}]" if kind else "", False),
    ]
    return [part for part in parts if part[0]]


def as_tokens(row: dict[str, Any], spec: RunSpec, tokenizer: Any) -> tuple[list[Part], int, int]:
    """Return a row as the tokenizer renders it, special tokens included; with its tokens and those that train. Raises
    InvalidInput where the chat template refuses it."""
    prompt, completion, _ = exchange_of(row, spec)
    template = spec.data.apply_chat_template, spec.data.chat_template_kwargs
    tools = None if completion is None else tools_of(row)
    if completion is None:
        ids = encode_prompt(tokenizer, prompt, *template, tools_of_prompt(prompt, row))
        trained = np.zeros(len(ids), bool)
    elif prompt is None:
        ids = encode_text(tokenizer, completion)
        trained = np.arange(len(ids)) > 0
    elif spec.algorithm == "sft" and spec.sft.loss_mask == "assistant":
        messages = [*Demonstration(prompt, completion).prompt, *completion]
        ids, trained = encode_conversation(tokenizer, messages, template[1], tools)
    else:
        before, after = encode_exchange(tokenizer, prompt, completion, *template, tools, ends=is_whole(row))
        ids, trained = np.concatenate([before, after]), np.arange(len(before) + len(after)) >= len(before)
    parts: list[Part] = []
    end, written = 0, ""
    for trains, group in groupby(trained.tolist()):
        end += len(list(group))
        text = str(tokenizer.decode(ids[:end].tolist(), skip_special_tokens=False))
        parts.append((shown(text[len(written) :]), bool(trains)))
        written = text
    return parts, len(ids), int(trained.sum())


def changed(row: dict[str, Any], spec: RunSpec, tokenizer: Any) -> str:
    """Return a sentence about a text of the row that the tokenizer does not keep; empty where it keeps all."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or (found := changed_text(backend, exchange_of(row, spec)[:2])) is None:
        return ""
    return f"the tokenizer does not keep {found[0]!r:.80}: {found[1]!r:.80} remains"


def shown(value: Any) -> str:
    """Return text or messages as one text; control characters are written out."""
    text = (
        value
        if isinstance(value, str)
        else "".join(f"<{message['role']}> {message.get('content') or ''}\n" for message in value)
    )
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )
