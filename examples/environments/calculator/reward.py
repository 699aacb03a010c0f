"""The reward: the last message of the conversation has to be the answer, and it has to come from the tool."""

from typing import Any


def correct(completions: list[list[dict[str, Any]]], answer: list[str], **_: object) -> list[float]:
    """1 for the right answer after a call of the calculator, else 0."""
    return [
        float(used_tool(messages) and said(messages) == right)
        for messages, right in zip(completions, answer, strict=True)
    ]


def used_tool(messages: list[dict[str, Any]]) -> bool:
    """Whether a tool has answered."""
    return any(message["role"] == "tool" for message in messages)


def said(messages: list[dict[str, Any]]) -> str:
    """The text of the last message, if the model wrote it."""
    last = messages[-1]
    return str(last["content"] or "") if last["role"] == "assistant" else ""
