"""The reward: the last message of the conversation must be the answer, and a tool must have returned it."""

from typing import Any


def correct(completions: list[list[dict[str, Any]]], answer: list[str], **_: object) -> list[float]:
    """Return 1 for the right answer after a call of the calculator, else 0."""
    return [
        float(used_tool(messages) and last_text(messages) == right)
        for messages, right in zip(completions, answer, strict=True)
    ]


def used_tool(messages: list[dict[str, Any]]) -> bool:
    """Return whether a tool has answered."""
    return any(message["role"] == "tool" for message in messages)


def last_text(messages: list[dict[str, Any]]) -> str:
    """Return the text of the last message if the model wrote it."""
    last = messages[-1]
    return str(last["content"] or "") if last["role"] == "assistant" else ""
