"""Names of columns that are read without a key of the spec, because TRL and NeMo RL give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.spec import DataSection


def conversation_key(row: Mapping[str, Any], data: DataSection) -> str | None:
    """Return the column of whole conversations: `data.messages_key`, or TRL's `messages` where a row has no prompt."""
    if data.messages_key is not None:
        return data.messages_key
    return "messages" if "messages" in row and data.prompt_key not in row else None


def has_text(row: Mapping[str, Any], data: DataSection) -> bool:
    """Return whether a row is TRL's text to imitate as a whole: it has the column `text` and no prompt."""
    return "text" in row and data.prompt_key not in row and data.messages_key is None


def with_keys_of_row(row: Mapping[str, Any], data: DataSection) -> DataSection:
    """Return `data` with NeMo RL's columns `input` and `output` as prompt and completion, where a row has them and not those
    that `data` names."""
    if data.prompt_key == "prompt" and "prompt" not in row and {"input", "output"} <= row.keys():
        return data.model_copy(update={"prompt_key": "input", "completion_key": "output"})
    return data
