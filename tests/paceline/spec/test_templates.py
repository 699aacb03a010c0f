"""Templates: names in braces, and values that are inserted once."""

from __future__ import annotations

from paceline.spec.templates import as_lines, fill, placeholders


def test_values_are_put_in_once() -> None:
    template = "{question} {choices} { } {a b} {missing}"
    assert placeholders(template) == {"question", "choices", "missing"}
    values = {"question": "{choices}?", "choices": ["A. one", "B. two"]}
    assert fill(template, values, as_lines) == "{choices}? A. one\nB. two { } {a b} {missing}"
    assert as_lines(7) == "7"
