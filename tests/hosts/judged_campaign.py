"""The command of a campaign on hosts of their own: where its logs go, its verdict as the last line, its exit status."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

import click
from isolated_host import missing


class Outcome(Protocol):
    """How a campaign ended."""

    @property
    def problems(self) -> list[str]:
        """Return a sentence for each."""

    @property
    def line(self) -> str:
        """Return the verdict."""

    @property
    def is_good(self) -> bool:
        """Return whether all promises were kept."""


keep_option = click.option(
    "--keep",
    type=click.Path(path_type=Path),
    help="Folder for the services' logs; by default they are kept after a failure alone.",
)


def run_and_judge(name: str, campaign: Callable[[Path], Outcome], keep: Path | None) -> NoReturn:
    """Run a campaign with a folder for its logs, print its problems and the verdict, and exit with 0 only if it is good."""
    if why := missing():
        raise click.ClickException(f"this machine cannot make hosts: {why}")
    began_s, logs = time.monotonic(), keep or Path(tempfile.mkdtemp(prefix=f"paceline-{name}-"))
    logs.mkdir(parents=True, exist_ok=True)
    try:
        outcome = campaign(logs)
    except BaseException:
        click.echo(f"the services' logs are in {logs}", err=True)
        raise
    for problem in outcome.problems:
        click.echo(problem, err=True)
    if keep is None and outcome.is_good:
        shutil.rmtree(logs)
    click.echo(f"{name}: {outcome.line}, {time.monotonic() - began_s:.0f} s")
    raise SystemExit(0 if outcome.is_good else 1)
