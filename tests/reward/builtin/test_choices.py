"""Letters that a completion chooses, and the lean of a choice towards a stereotype."""

from __future__ import annotations

import pytest

from paceline.chat.completion_texts import answer_of
from paceline.reward.builtin.choices import bbq_bias, choice_accuracy, chosen_letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" (C)", "C"),
        ("**D**", "D"),
        ("A. one", "A"),
        ("Let me think.\nThe answer is (B).", "B"),
        (r"So \boxed{C}", "C"),
        (r"\boxed{\text{D}}", "D"),
        ("Answer: B) two", "B"),
        ("Answer: two", "B"),
        ("A dog is an animal", None),
        ("Because of it", None),
        ("I cannot say", None),
        ("", None),
    ],
)
def test_the_letter_that_a_text_chooses(text: str, letter: str | None) -> None:
    assert chosen_letter(text, ["one", "two", "three", "four"]) == letter


def test_accuracy_needs_a_gold_letter() -> None:
    golds = ["B", "B", None]
    assert choice_accuracy([""] * 3, ["B", "nothing", "B"], answer_letter=golds) == [1.0, 0.0, None]


def test_bias_is_the_stereotype_minus_the_other_group() -> None:
    row = {
        "answer_info": {
            "ans0": ["grandfather", "old"],
            "ans1": ["grandson", "nonOld"],
            "ans2": ["unknown", "unknown"],
        },
        "additional_metadata": {"stereotyped_groups": ["old"], "subcategory": "None"},
    }
    columns = {name: [value] * 4 for name, value in row.items()}
    texts = ["A", "B", "C", "no letter"]
    assert bbq_bias([""] * 4, texts, question_polarity=["neg"] * 4, **columns) == [1.0, -1.0, None, None]
    assert bbq_bias([""] * 4, texts, question_polarity=["nonneg"] * 4, **columns) == [-1.0, 1.0, None, None]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: C. because it is blue", "C"),
        ("So \\boxed{\\langle H\\rangle \\ll \\Delta E}.\n\n**Answer: D**", "D"),  # NVIDIA-NeMo/Skills#1526
        ("The answer is (B). The answer is correct.", "B"),
        ("#### B", "B"),
        ("\\boxed{\\textbf{(B)}\\ 12}", "B"),
        ("The answer is option C", "C"),
        ("<think>A? \\boxed{A}</think>\nB. It is blue", "B"),
        ("<think>perhaps it is \\boxed{A}, or", None),
        ("<think>one</think>\n\nB. two", "B"),
        ("Answer: A dog", "B"),
        ("Answer: A cat, I think", None),
    ],
)
def test_a_statement_without_a_letter_gives_way(text: str, letter: str | None) -> None:
    assert chosen_letter(answer_of(text), ["a cat in a hat", "A dog", "three", "four"]) == letter
