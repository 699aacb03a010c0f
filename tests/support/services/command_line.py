"""The command line in the process of the test."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from paceline.services.cli.main import main

NOBODY = "127.0.0.1:1"
"""Address at which no coordinator listens."""


def paceline(*arguments: str | Path, coordinator: str = NOBODY) -> Result:
    """Run `paceline` with these arguments, against the coordinator at that address."""
    texts = [str(argument) for argument in arguments]
    return CliRunner().invoke(main, texts, env={"PACELINE_COORDINATOR": coordinator})
