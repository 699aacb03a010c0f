"""`paceline doctor` on what isolates programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.reward.sandbox import choosing
from paceline.reward.sandbox.protocol import SandboxFailed
from paceline.services.cli import doctor as sandbox_checks
from paceline.services.cli.doctor import examine_sandbox, examine_user_code
from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec


def spec_with(**kwargs: Any) -> RunSpec:
    return parse_spec(
        {
            "policy": {"model_name": "m"},
            "data": {"train": "t.jsonl"},
            "rewards": [{"function": "exact_match"}, {"function": "code_tests", "kwargs": kwargs}],
        },
        base=Path("/"),
    )


def test_what_isolates_is_told() -> None:
    found = {finding.name: finding for finding in examine_sandbox()}
    if found["sandbox"].status != "ok":
        pytest.skip(found["sandbox"].value)
    assert list(found) == ["sandbox", "files", "network", "processes", "memory limit", "kernel"]
    assert "no sockets" in found["network"].value


def test_a_spec_whose_sandbox_does_not_hold_here_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(readable: object) -> Any:
        raise SandboxFailed("it is not installed")

    monkeypatch.setattr(choosing, "LOCAL", dict.fromkeys(choosing.AUTO, absent))
    (alone,) = examine_sandbox()
    assert (alone.status, alone.name) == ("absent", "sandbox")
    assert "bwrap: it is not installed" in alone.value
    _, fault = examine_sandbox(spec_with())
    assert (fault.status, fault.name) == ("fault", "rewards.1")
    assert "sandbox auto does not hold on this host" in fault.value
    assert len(examine_sandbox(spec_with(sandbox="none"))) == 1


def test_whether_user_code_can_be_isolated_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_checks, "why_no_isolation", lambda: "")
    assert examine_user_code().status == "ok"
    monkeypatch.setattr(sandbox_checks, "why_no_isolation", lambda: "this kernel has no Landlock")
    found = examine_user_code()
    assert (found.status, found.value) == ("absent", "not isolated: this kernel has no Landlock")
