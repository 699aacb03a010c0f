"""`paceline doctor`: the findings about this machine as a list."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from paceline.services.common.options import directory_option, json_option, print_json

MARKS = {"ok": "✓", "absent": "·", "fault": "✗"}


@click.command()
@click.argument("spec", required=False, type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@directory_option
@json_option
def doctor(spec: str | None, overrides: tuple[str, ...], directory: Path, as_json: bool) -> None:
    """Say what this machine has, what is missing and how to get it; exit status 1 if something has to be fixed.

    With SPEC also whether its GPUs are there, and the memory that its services take by an estimate.
    """
    from paceline.services.local.machine_checks import examine
    from paceline.services.local.sandbox_checks import examine_sandbox, examine_user_code
    from paceline.services.local.spec_checks import examine_spec
    from paceline.spec.reading import load_spec

    wanted = load_spec(spec, overrides) if spec else None
    findings = [*examine(directory), *examine_sandbox(wanted), examine_user_code()]
    if wanted is not None:
        findings += examine_spec(wanted)
    for finding in findings:
        if as_json:
            print_json(dataclasses.asdict(finding))
        else:
            remedy = f" → {finding.remedy}" if finding.remedy else ""
            click.echo(f"{MARKS[finding.status]} {finding.name:<13} {finding.value}{remedy}")
    if any(finding.status == "fault" for finding in findings):
        raise click.exceptions.Exit(1)
