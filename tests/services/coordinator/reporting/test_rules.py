"""Rules on metrics, and the warnings that the exchange's steps lead to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from exchange_drivers import World

from paceline.services.common.reporting.metric_table import PARTS
from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.members.registry import Members
from paceline.services.coordinator.reporting.rules import Rules, rules_of
from paceline.services.coordinator.reporting.run_log import RunLog
from paceline.spec.sections.system import DEFAULT_RULES, LoggerSection, parsed_rule


def broken(rules: Rules, *steps: dict[str, float | None]) -> list[list[str]]:
    """Return the messages of each step."""
    return [[each.message for each in rules.check(step)] for step in steps]


def test_a_rule_warns_once_after_its_steps_and_again_after_it_was_kept() -> None:
    rules = Rules([parsed_rule("truncated_fraction > 0.5 for 3 steps")])
    values = [0.6, 0.7, 0.8, 0.9, 0.5, 0.6, 0.6, 0.6]
    found = broken(rules, *({"truncated_fraction": value} for value in values))
    assert [bool(messages) for messages in found] == [False, False, True, False, False, False, False, True]
    assert found[2] == ["truncated_fraction has been > 0.5 for 3 steps: it is 0.8 now"]


def test_a_step_without_the_metric_changes_nothing() -> None:
    rules = Rules([parsed_rule("loss < 0 for 2 steps")])
    found = broken(rules, {"loss": -1.0}, {"other": 1.0}, {"loss": None}, {"loss": float("nan")}, {"loss": -2.0})
    assert [len(messages) for messages in found] == [0, 0, 0, 0, 1]


def test_every_metric_of_a_pattern_counts_by_itself() -> None:
    rules = Rules([parsed_rule("failed_calls/* > 0 for 2 steps")])
    found = broken(
        rules,
        {"failed_calls/a": 1.0, "failed_calls/b": 0.0},
        {"failed_calls/a": 0.0, "failed_calls/b": 2.0},
        {"failed_calls/a": 1.0, "failed_calls/b": 2.0},
    )
    assert found == [[], [], ["failed_calls/b has been > 0 for 2 steps: it is 2 now"]]


def test_a_change_is_the_difference_to_the_step_before() -> None:
    rules = Rules([parsed_rule("change of dropped/stale > 1")])
    found = broken(rules, {}, {"dropped/stale": 3.0}, {"dropped/stale": 4.0}, {"dropped/stale": 6.0})
    assert [len(messages) for messages in found] == [0, 1, 0, 1]
    assert found[3] == ["the change of dropped/stale has been > 1: it is 2 now"]


def test_own_rules_join_the_usual_ones() -> None:
    assert rules_of(LoggerSection()) == list(DEFAULT_RULES)
    own = LoggerSection(rules=("loss > 3", str(DEFAULT_RULES[0])))
    assert rules_of(own) == [parsed_rule("loss > 3"), DEFAULT_RULES[0], *DEFAULT_RULES[1:]]
    assert rules_of(LoggerSection(default_rules=False)) == []


def test_usual_rules_are_about_metrics_that_exist() -> None:
    known = {metric.name for part in PARTS for metric in part.metrics}
    for rule in DEFAULT_RULES:
        name = rule.metric.replace("*/", "<pool>/").replace("/*", "/<function>")
        assert name in known or (name.startswith("dropped/") and "dropped/<reason>" in known), rule


def test_the_page_names_the_usual_rules() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "operate" / "alerts.md").read_text()
    assert re.findall(r"^\| `([^`]+ [<>]=? [^`]+)` \|", page, flags=re.M) == [str(rule) for rule in DEFAULT_RULES]


def warnings(world: World) -> list[dict[str, Any]]:
    rows = world.ledger.events(world.run_id, 0)
    return [json.loads(row["json"]) for row in rows if row["kind"] == "warning"]


def test_steps_of_a_run_lead_to_warnings_once_through_a_restart(make_world: Any) -> None:
    world = make_world(logger={"rules": ["kl_reference > 0.25 for 3 steps"], "default_rules": False})
    log = RunLog(world.ledger, world.exchange, Members(60.0))
    for step, value in enumerate((0.5, 0.5, 0.5, 0.5)):
        if step in (2, 3):  # as a new coordinator
            log = RunLog(world.ledger, world.exchange, Members(60.0))
        with world.ledger.transaction():
            log.write_down([Notice("step", {"step": step, "metrics": {"kl_reference": value}})])
    (found,) = [each for each in warnings(world) if "rule" in each]
    assert found == {
        "message": "step 2: kl_reference has been > 0.25 for 3 steps: it is 0.5 now",
        "rule": "kl_reference > 0.25 for 3 steps",
        "metric": "kl_reference",
        "value": 0.5,
    }


def test_a_metric_at_the_number_of_a_rule_is_equal_to_it() -> None:
    stored = 0.699999988079071  # 0.7 as float32
    found = {
        op: broken(Rules([parsed_rule(f"reward {op} 0.7")]), {"reward": stored})[0] for op in ("<", "<=", ">", ">=")
    }
    assert [op for op, messages in found.items() if messages] == ["<=", ">="]
