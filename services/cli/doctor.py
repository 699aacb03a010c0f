"""`paceline doctor`: the findings about this machine as a list."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from services.common.options import directory_option, json_option, print_json

MARKS = {"ok": "✓", "absent": "·", "fault": "✗"}


@click.command()
@directory_option
@json_option
def doctor(directory: Path, as_json: bool) -> None:
    """Say what this machine has, what is missing and how to get it; exit status 1 if something has to be fixed."""
    from services.local.machine_checks import examine

    findings = examine(directory)
    for finding in findings:
        if as_json:
            print_json(dataclasses.asdict(finding))
        else:
            remedy = f" → {finding.remedy}" if finding.remedy else ""
            click.echo(f"{MARKS[finding.status]} {finding.name:<13} {finding.value}{remedy}")
    if any(finding.status == "fault" for finding in findings):
        raise click.exceptions.Exit(1)
