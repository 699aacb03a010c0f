"""A reward function besides the environment's: it checks for the answer in the last message."""

from typing import Any


def answered(completions: list[list[dict[str, Any]]], answer: list[str], **_: object) -> list[float]:
    """Return 1 if the model's last message has the answer, else 0."""
    return [
        float(messages[-1]["role"] == "assistant" and right.lower() in str(messages[-1]["content"] or "").lower())
        for messages, right in zip(completions, answer, strict=True)
    ]
