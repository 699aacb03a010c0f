"""Defines two options: `--tls-dir`, the folder with the certificates of a process or a person, and `--insecure`, which
permits unencrypted connections beyond this host without certificates. A process that uses the permission reports it: in
its log at its start and every ten minutes, in a gauge, and the coordinator in `paceline status`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from paceline.calls.connection import FORM, is_loopback
from paceline.tls.folder import VARIABLE as TLS_VARIABLE
from paceline.tls.folder import tls_folder

REMIND_S = 600.0
"""Seconds between two log lines that repeat a warning."""


def _use_folder(_context: click.Context, _option: click.Parameter, path: str | None) -> None:
    """Set the folder in the environment, so that child processes read the same files."""
    if path:
        os.environ[TLS_VARIABLE] = os.path.abspath(path)


tls_option: Callable[[Any], Any] = click.option(
    "--tls-dir",
    type=click.Path(file_okay=False, exists=True),
    callback=_use_folder,
    expose_value=False,
    is_eager=True,
    help=f"Folder with ca.crt, and for a process also tls.crt and tls.key; connections are then encrypted. {TLS_VARIABLE} sets the folder too.",
)


VARIABLE = "PACELINE_INSECURE"
"""Environment variable with the effect of --insecure, also on the processes that a command starts."""
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def _accept(_context: click.Context, _option: click.Parameter, is_accepted: bool) -> None:
    if is_accepted:
        os.environ[VARIABLE] = "1"


_insecure_option = click.option(
    "--insecure",
    is_flag=True,
    callback=_accept,
    expose_value=False,
    is_eager=True,
    help=f"Listen and connect beyond this host without encryption if there is no --tls-dir. {VARIABLE}=1 has the same effect.",
)


def insecure_option(command: CommandT) -> CommandT:
    """Add --tls-dir and --insecure."""
    decorated: CommandT = tls_option(_insecure_option(command))
    return decorated


def check_host(_context: click.Context, option: click.Parameter, host: str) -> str:
    """Refuse to listen beyond this host without certificates or --insecure. Raises click.UsageError."""
    return _checked(option, host, host)


def check_coordinator(_context: click.Context, option: click.Parameter, address: str | None) -> str | None:
    """Refuse to connect beyond this host without certificates or --insecure. Raises click.UsageError."""
    match = FORM.fullmatch(address or "")  # other texts are refused by their users
    return _checked(option, str(address), match[1]) if match else address


def _checked(option: click.Parameter, value: str, host: str) -> str:
    if is_loopback(host) or tls_folder() is not None:
        return value
    if os.environ.get(VARIABLE, "") not in ("1", "true", "yes"):
        raise click.UsageError(
            f"{option.opts[0]} {value} is beyond this host, and without certificates nothing is encrypted: whoever reads the network "
            f"has the token and the data. Give certificates with --tls-dir or {TLS_VARIABLE} (`paceline certs` makes them). On a "
            f"network that you trust add --insecure, or set {VARIABLE}=1"
        )
    return value


def insecurity(host: str) -> str:
    """Return the warning about listening on `host`; empty if connections are encrypted or stay on this host."""
    if is_loopback(host) or tls_folder() is not None:
        return ""
    return f"NOT ENCRYPTED: --insecure listens on {host} without TLS; give certificates with --tls-dir"
