"""Rules and webhooks of a spec."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from paceline.spec.sections.system import DEFAULT_RULES, LoggerSection, Rule, WebhookSection, parsed_rule


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("loss > 1e3", Rule("loss", ">", 1000.0)),
        ("reward  <=  -0.5  for 10 steps", Rule("reward", "<=", -0.5, 10)),
        ("failed_calls/* >= 1 for 1 step", Rule("failed_calls/*", ">=", 1.0)),
        ("change of dropped/stale > 0 for 5 steps", Rule("dropped/stale", ">", 0.0, 5, True)),
    ],
)
def test_a_rule_is_a_sentence(text: str, rule: Rule) -> None:
    assert parsed_rule(text) == rule
    assert parsed_rule(str(rule)) == rule


@pytest.mark.parametrize(
    "text",
    ["", "loss", "loss = 3", "loss > many", "loss > nan", "loss > 1 for 0 steps", "loss > 1 for x steps"],
)
def test_a_malformed_rule_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValidationError, match="is not a rule; write"):
        LoggerSection(rules=(text,))


def test_default_rules_are_written_as_users_write_theirs() -> None:
    assert [parsed_rule(str(rule)) for rule in DEFAULT_RULES] == list(DEFAULT_RULES)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "either url or url_variable"),
        ({"url": "http://a", "url_variable": "B"}, "either url or url_variable"),
        ({"url": "ftp://a"}, "http"),
        ({"url": "https://me:secret@a/b"}, "without a password"),
        ({"url": "http://a", "events": []}, "at least 1 item"),
        ({"url_variable": "lower"}, "pattern"),
    ],
)
def test_a_webhook_without_a_usable_address_is_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        WebhookSection.model_validate(values)
