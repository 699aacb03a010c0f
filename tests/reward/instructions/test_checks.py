"""Every kind of instruction of IFEval: a text that follows it, and one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from reward.instructions.checks import CHECKS, follows

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["sun", "Moon"]}, "The moon and the Sun.", "The sunny moon."),
    (
        "keywords:frequency",
        {"keyword": "sun", "frequency": 2, "relation": "at least"},
        "Sun, sun!",
        "Sun and sunny.",
    ),
    (
        "keywords:frequency",
        {"keyword": "sun", "frequency": 2, "relation": "less than"},
        "One sun.",
        "Sun, sun!",
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["bad"]}, "A badge.", "Bad luck."),
    (
        "keywords:letter_frequency",
        {"letter": "E", "let_frequency": 3, "let_relation": "at least"},
        "Eleven trees",
        "Two",
    ),
    ("language:response_language", {"language": "de"}, "Das ist der Hund und die Katze.", "This is the dog."),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        'One here. "Two!" he said',
        "Only 3.5 of them.",
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        "One\n\n***\n\nTwo",
        "One *** Two *** Three",
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "less than"},
        "It's two.",
        "One two three.",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        "First one.\n\nthen two.",
        "Then one.\n\nLast two.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name] at []"),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        "Bye.\nP. S. One more",
        "Bye. No more PS",
    ),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n - two\n**bold**", "* one"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*one* and **two**",
        "* one\n* two",
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1\na",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A poem>>\nText", "<< >>\nText"),
    ("combination:two_responses", {}, "One\n******\nTwo", "One\n******\nOne"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "Say it. Done.", "Done. Say it."),
    ("startend:end_checker", {"end_phrase": "Any more?"}, 'Yes. any more?"', "Any more? Yes."),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "GO NOW please",
        "GO now",
    ),
    ("change_case:english_capital", {}, "ALL OF IT, 3 TIMES", "ALL of it"),
    ("change_case:english_lowercase", {}, "all of it", "All of it"),
    ("punctuation:no_comma", {}, "one and two", "one, two"),
    ("startend:quotation", {}, ' "quoted" ', '"not at the end'),
]


@pytest.mark.parametrize(("instruction", "arguments", "good", "bad"), CASES)
def test_a_text_follows_or_does_not(instruction: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    arguments = {**arguments, "another": None}
    assert follows(good, instruction, arguments)
    assert not follows(bad, instruction, arguments)
    assert not follows(" ", instruction, arguments)


def test_every_kind_has_a_case() -> None:
    assert {case[0] for case in CASES} == CHECKS.keys()
    assert len(CHECKS) == 25


def test_loose_ignores_an_opening_a_closing_and_asterisks() -> None:
    text = "Sure, here it is:\n**no comma here**\nDone, bye."
    assert not follows(text, "punctuation:no_comma", {})
    assert follows(text, "punctuation:no_comma", {}, loose=True)


def test_an_unknown_instruction_or_a_missing_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="'keywords:exist' is unknown; known are"):
        follows("text", "keywords:exist", {})
    with pytest.raises(ValueError, match="has no argument 'keywords'"):
        follows("text", "keywords:existence", {"keywords": None})
    with pytest.raises(ValueError, match="relation is 'more than'"):
        follows("text", "keywords:frequency", {"keyword": "text", "frequency": 1, "relation": "more than"})
