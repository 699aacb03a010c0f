"""What `paceline gate` and `paceline traces compare` have in common: options, a report that is written and printed, exit statuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from paceline.services.common.options import json_option, print_json

STATUS = {"passed": 0, "failed": 1, "undecided": 2, "promote": 0, "roll back": 1, "hold": 2}
"""Exit status of each outcome of a gate, and of each decision by traces."""
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def decision_options(command: CommandT) -> CommandT:
    """Add --max-drop, --margin, --seed, --output and --json."""
    for option in reversed(
        (
            click.option(
                "--max-drop",
                default=0.0,
                show_default=True,
                type=click.FloatRange(0),
                help="Drop that is accepted.",
            ),
            click.option(
                "--margin",
                default=0.05,
                show_default=True,
                type=click.FloatRange(0),
                help="Further drop that the interval must exclude, else nothing is decided.",
            ),
            click.option("--seed", default=0, show_default=True, help="Seed of the intervals."),
            click.option(
                "--output",
                type=click.Path(path_type=Path, dir_okay=False),
                help="File for the report, JSON.",
            ),
            json_option,
        )
    ):
        command = option(command)
    return command


def end(
    report: dict[str, Any], outcome: str, lines: Sequence[str], output: Path | None, as_json: bool
) -> NoReturn:
    """Write the report to a file, if one is named, print it or its lines, and end with the outcome's exit status."""
    from paceline.files.whole_file import write_whole

    if output is not None:
        write_whole(output, json.dumps(report, indent=2) + "\n")
    if as_json:
        print_json(report)
    else:
        click.echo("\n".join(lines))
    raise click.exceptions.Exit(STATUS[outcome])
