"""`python -m services.coordinator.audit.reading.verify_process LEDGER RUN [--deep]`: `verify` in a process of its own.

The comparison reads every array of a run and takes minutes of a processor, which the coordinator's process needs. It runs at the
lowest priority and ends with its parent.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from paceline.errors import PacelineError
from services.common.processes.parent_death import die_with_starter
from services.coordinator.audit.verify import verify
from services.coordinator.ledger.ledger import Ledger

NICENESS = 19


@click.command()
@click.argument("ledger", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("run_id")
@click.option("--deep", is_flag=True)
def main(ledger: Path, run_id: str, deep: bool) -> None:
    """Print the report of RUN_ID as a JSON object."""
    die_with_starter()
    os.nice(NICENESS)
    try:
        opened = Ledger(ledger, read_only=True)
        report = verify(opened, run_id, deep=deep)
    except PacelineError as error:
        raise click.ClickException(str(error)) from None
    click.echo(json.dumps({"problems": report.problems, "facts": report.facts}))


if __name__ == "__main__":
    main()
