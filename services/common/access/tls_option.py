"""`--tls-dir`: the folder with the certificates of a process or a person."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from paceline.tls.folder import VARIABLE


def _use_folder(_context: click.Context, _option: click.Parameter, path: str | None) -> None:
    """Set the folder in the environment, so that child processes read the same files."""
    if path:
        os.environ[VARIABLE] = os.path.abspath(path)


tls_option: Callable[[Any], Any] = click.option(
    "--tls-dir",
    type=click.Path(file_okay=False, exists=True),
    callback=_use_folder,
    expose_value=False,
    is_eager=True,
    help=f"Folder with ca.crt, and with tls.crt and tls.key for a process: connections are encrypted; also {VARIABLE}.",
)
