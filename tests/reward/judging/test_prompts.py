"""Templates: values are put in once, whatever they hold."""

from __future__ import annotations

from paceline.reward.judging.settings import as_text, fill
from paceline.spec.templates import placeholders


def test_a_value_is_never_read_as_a_template() -> None:
    values = {"prompt": "{completion} {answer}", "completion": "{prompt} {0} {", "answer": "42"}
    assert fill("P {prompt} C {completion} A {answer}", values) == "P {completion} {answer} C {prompt} {0} { A 42"


def test_other_braces_are_text() -> None:
    template = 'Reply {"score": 1} {} { prompt } {x.__class__} {prompt}'
    assert placeholders(template) == {"prompt"}
    assert fill(template, {"prompt": "p", "x": 1}) == 'Reply {"score": 1} {} { prompt } {x.__class__} p'


def test_values_as_a_judge_reads_them() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert as_text(chat) == "system: Be brief.\n\nuser: Why?"
    assert as_text(["a", 1]) == '["a", 1]'
    assert as_text(7) == "7"
