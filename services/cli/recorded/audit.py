"""`paceline audit verify|show`: the audit log of the coordinator of this directory. The coordinator need not run."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from paceline.errors import LedgerFault, NotFound
from paceline.files.names import AUDIT_NAME, LEDGER_NAME
from paceline.services.cli import render
from paceline.services.cli.recorded.source import files_option, opened_ledger
from paceline.services.common.options import json_option, print_json

COLUMNS = ("record", "time", "who", "from", "what", "about", "result", "why")


@click.group()
def audit() -> None:
    """Show or verify the log of changes and refused calls, on the coordinator's host."""


@audit.command()
@files_option
@json_option
def verify(directory: Path, as_json: bool) -> None:
    """Verify the chain of the audit log, with the ledger and the manifests of checkpoints; exit status 1 if a record
    was changed or is missing."""
    from paceline.services.coordinator.audit_log import verification

    with opened_ledger(directory / LEDGER_NAME) as opened:
        report = verification.verify(opened)
    if as_json:
        print_json({"problems": report.problems, "facts": report.facts})
    else:
        click.echo(render.verify_text("audit log", report.problems, report.facts))
    if report.problems:
        raise click.exceptions.Exit(1)


@audit.command()
@click.option("--last", type=click.IntRange(min=1), default=50, show_default=True, help="Newest records to show.")
@click.option("--all", "shows_all", is_flag=True, help="Show all records, from the oldest.")
@files_option
@json_option
def show(last: int, shows_all: bool, directory: Path, as_json: bool) -> None:
    """Show the newest records, oldest first; with --json as JSON lines, with all fields."""
    from paceline.services.coordinator.audit_log.verification import records

    folder = directory / AUDIT_NAME
    if not folder.is_dir():
        raise NotFound(f"no audit log at {folder}; name the coordinator's --directory")
    newest: deque[Mapping[str, Any]] = deque(maxlen=None if shows_all else last)
    damage: deque[str] = deque(maxlen=1)
    for record in records(folder, damage.append):
        if shows_all and as_json:  # a gigabyte may not fit into memory
            print_json(record.fields)
        else:
            newest.append(record.fields)
    if not as_json:
        render.print_table(COLUMNS, [_row(fields) for fields in newest], empty="no records")
    elif not shows_all:
        for fields in newest:
            print_json(fields)
    if damage:
        raise LedgerFault(f"a record of {folder} was changed: {damage[0]}; `paceline audit verify` names the record")


def _row(fields: Mapping[str, Any]) -> list[str]:
    def text(name: str) -> str:  # no field is certain: whoever writes the file can also compute its hashes
        return str(fields.get(name, ""))

    result = text("result") + (f" ×{text('count')}" if text("count") not in ("", "1") else "")
    why = text("why").partition("; ")[0]  # without the remedy, which is the caller's
    who = " ".join(filter(None, (text("who"), text("certificate") and f"({text('certificate')})")))
    what = text("what").removeprefix("paceline.v1.")
    return [text("sequence"), text("time")[:19], who, text("address"), what, text("subject"), result, why]
