"""`paceline models promote`, `rollback`, `list` and `show`: nothing past a gate without a recorded reason."""

from __future__ import annotations

import re

import click
import pytest
from registry_place import Workplace
from trained_ledger import RUN_ID

from paceline.errors import NotFound
from paceline.files.names import LEDGER_NAME
from paceline.services.cli.chat import spec_of_model
from paceline.services.coordinator.ledger.ledger import Ledger


def test_what_passed_is_promoted_and_rolled_back(place: Workplace) -> None:
    place.passed()
    assert place.done("models", "promote", "sums:1")["aliases"] == ["champion"]
    place.passed("--parent", "sums:1")
    promoted = place.done("models", "promote", "sums:2")
    assert (promoted["stage"], promoted["aliases"], promoted["override"]) == ("promoted", ["champion"], "")
    assert place.done("models", "show", "sums@champion")["version"] == 2
    back = place.done("models", "rollback", "sums", "--reason", "worse in use")
    assert (back["version"], back["aliases"]) == (1, ["champion"])
    shown = place.done("models", "show", "sums:2")
    assert (shown["stage"], shown["aliases"]) == ("rolled_back", [])
    changes = [(each["kind"], each["previous"], each["version"], each["reason"]) for each in shown["changes"]]
    assert changes == [("promote", 0, 1, ""), ("promote", 1, 2, ""), ("rollback", 2, 1, "worse in use")]
    assert all(each["caller"] for each in shown["changes"])
    lines = place.run("models", "show", "sums:2").output
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d promote @champion to 1 by ", lines)
    assert re.search(r"rollback @champion from 2 to 1 by .*: worse in use", lines)


def test_nothing_is_promoted_past_its_gate_without_a_reason(place: Workplace) -> None:
    better, worse = place.evaluated("better", [1.0] * 30), place.evaluated("worse", [0.0] * 30)
    verdict = place.judged("verdict.json", worse, better)
    place.registered("--run", RUN_ID, "--evaluation", worse, "--verdict", verdict)
    place.registered()
    for version, why in ((1, "the gate says: failed"), (2, "the gate says: no verdict")):
        refused = place.run("models", "promote", f"sums:{version}")
        assert refused.exit_code == 1
        assert why in refused.output
    assert place.done("models", "show", "sums:1")["changes"] == []
    promoted = place.done("models", "promote", "sums:1", "--override", "the old one has a bug")
    assert (promoted["stage"], promoted["override"]) == ("promoted", "the old one has a bug")
    assert "promoted past its gate: the old one has a bug" in place.run("models", "show", "sums@champion").output
    assert place.done("ledger", "verify", RUN_ID)["problems"] == []


def test_verify_finds_a_promotion_without_a_reason(place: Workplace) -> None:
    place.registered("--run", RUN_ID)
    place.done("models", "promote", "sums:1", "--override", "why not")
    ledger = Ledger(place.runs / LEDGER_NAME)
    with ledger.transaction():
        ledger.db.execute("UPDATE model_changes SET reason = ''")
        ledger.db.execute("UPDATE models SET chain = 'other'")
    ledger.close()
    problems = place.run("ledger", "verify", RUN_ID)
    assert problems.exit_code == 1
    assert "model sums:1: the model was promoted without a passed gate" in problems.output
    assert "model sums:1: the chain is other, but the ledger has" in problems.output


def test_a_rollback_needs_an_earlier_version(place: Workplace) -> None:
    place.passed()
    place.done("models", "promote", "sums:1")
    refused = place.run("models", "rollback", "sums", "--reason", "x")
    assert refused.exit_code == 1
    assert "no version had the alias 'champion' before sums:1" in refused.output
    refused = place.run("models", "rollback", "sums", "--alias", "canary", "--reason", "x")
    assert "no version of sums has the alias 'canary'; the aliases of the model are: champion" in refused.output


def test_a_rolled_back_version_needs_a_reason_to_come_back(place: Workplace) -> None:
    place.passed()
    place.passed()
    for version in (1, 2):
        place.done("models", "promote", f"sums:{version}")
    place.done("models", "rollback", "sums", "--reason", "worse")
    assert "the version was rolled back" in place.run("models", "promote", "sums:2").output
    assert place.done("models", "promote", "sums:2", "--override", "fixed the prompt")["aliases"] == ["champion"]


def test_a_ledger_that_a_coordinator_has_is_not_written(place: Workplace) -> None:
    place.passed()
    ledger = Ledger(place.runs / LEDGER_NAME)
    refused = place.run("models", "promote", "sums:1")
    assert refused.exit_code == 1
    assert "With --coordinator HOST:PORT, name the coordinator that uses the ledger" in refused.output
    assert place.done("models", "list")["models"][0]["stage"] == "passed"
    ledger.close()


def test_lists_are_for_people_too(place: Workplace) -> None:
    assert "no registered models" in place.run("models", "list").output
    place.passed()
    place.done("models", "promote", "sums:1", "--alias", "canary")
    line = place.run("models", "list").output.split()
    assert line == ["sums:1", "promoted", RUN_ID, "@canary"]
    text = place.run("models", "show", "sums").output
    assert f"trained    run {RUN_ID}, 1 step" in text
    assert "gate       passed" in text


def test_a_registered_model_is_named_wherever_a_model_is(place: Workplace) -> None:
    path = place.passed()["path"]
    place.done("models", "promote", "sums:1")
    with click.Context(click.Command("any")):
        for name in ("sums@champion", "sums:1"):
            assert spec_of_model(name, place.runs).policy.model_name == path
        with pytest.raises(NotFound, match="no version of sums has the alias 'canary'"):
            spec_of_model("sums@canary", place.runs)
        with pytest.raises(NotFound, match="no run 'sums'"):
            spec_of_model("sums", place.runs)
