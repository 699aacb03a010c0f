"""The commands of docs/operate/security_setup.md, and the short form of `make campaign NAME=strangers`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from isolated_host import missing
from secure_deployment import ROLES, documented
from strangers import run_campaign

from paceline.services.cli.main import main


def test_the_page_has_a_command_for_each_role_and_the_command_line_knows_them() -> None:
    commands = [shlex.split(line) for line in documented() if line.startswith("paceline ")]
    served = {command[2] for command in commands if command[1] == "serve"}
    assert served == set(ROLES.values())
    for command in commands:
        words = command[1:3] if command[1] in ("serve", "token", "certs") else command[1:2]
        answer = CliRunner().invoke(main, [*words, "--help"])
        assert answer.exit_code == 0, answer.output
        options = [word for word in command if word.startswith("--")]
        assert [option for option in options if option not in answer.output] == []


@pytest.mark.slow
def test_strangers_are_refused_and_the_run_is_not_disturbed(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(f"hosts with namespaces of their own: {why}")
    outcome = run_campaign(2.0, tmp_path)
    assert outcome.problems == []
    assert outcome.is_good, outcome
