"""`--insecure`: without it no command listens or connects beyond this host, because connections are not encrypted yet."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from paceline.address import FORM, is_loopback

VARIABLE = "PACELINE_INSECURE"
"""Environment variable that stands for the option, also for the processes that a command starts."""
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def _accept(_context: click.Context, _option: click.Parameter, is_accepted: bool) -> None:
    if is_accepted:
        os.environ[VARIABLE] = "1"


insecure_option = click.option(
    "--insecure",
    is_flag=True,
    callback=_accept,
    expose_value=False,
    is_eager=True,
    help=f"Listen and connect beyond this host, unencrypted; also {VARIABLE}=1.",
)


def check_host(_context: click.Context, option: click.Parameter, host: str) -> str:
    """Callback of options with an address to listen on. Raises click.UsageError for one beyond this host."""
    return _checked(option, host, host)


def check_coordinator(_context: click.Context, option: click.Parameter, address: str | None) -> str | None:
    """Callback of options with HOST:PORT to connect to. Raises click.UsageError for one beyond this host."""
    match = FORM.fullmatch(address or "")  # another text is refused where it is used
    return _checked(option, str(address), match[1]) if match else address


def _checked(option: click.Parameter, value: str, host: str) -> str:
    if not is_loopback(host) and os.environ.get(VARIABLE, "") not in ("1", "true", "yes"):
        raise click.UsageError(
            f"{option.opts[0]} {value} is beyond this host, and connections are not encrypted yet: whoever reads the network has "
            f"the token and the data. On a network that you trust add --insecure, or set {VARIABLE}=1"
        )
    return value
