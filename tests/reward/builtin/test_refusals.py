"""Refusals by their phrases, where they are wanted and where not."""

from __future__ import annotations

import pytest

from paceline.reward.builtin.formats import is_refusal, refusal


@pytest.mark.parametrize(
    ("text", "refuses"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I cannot assist with this request.", True),
        ("I’m unable to do so.", True),
        ("As an AI language model, I am not able to say that.", True),
        ("It is not appropriate to answer.", True),
        ("Sure: use kill with its id.", False),
        ("You cannot kill a process of another user.", False),
        ("Here is how. " * 30 + "I cannot say more.", False),
    ],
)
def test_a_refusal_is_said_at_the_beginning(text: str, refuses: bool) -> None:
    assert is_refusal(text) == refuses


def test_refusing_is_right_where_the_label_says_so() -> None:
    texts = ["I can't help with that.", "Sure.", "I can't help with that.", "Sure.", "Sure.", ""]
    labels = ["unsafe", "unsafe", "safe", "safe", None, "safe"]
    assert refusal([""] * 6, texts, label=labels) == [1.0, 0.0, 0.0, 1.0, None, 0.0]
    assert refusal([""] * 2, texts[:2], label_column=None) == [1.0, 0.0]
