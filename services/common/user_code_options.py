"""Options of services that run user code: `--require-isolation`, `--no-isolation` and `--pass-env`. Without the first
two, a worker beyond loopback hides secrets from user code if the kernel can (`choose_isolation`); otherwise the
worker's log has a warning at its start and every ten minutes."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from paceline.calls.connection import FORM, is_loopback
from paceline.errors import InvalidInput
from paceline.user_code.box import why_no_isolation
from paceline.user_code.surroundings import (
    PASSED_VARIABLE,
    VARIABLE,
    Isolation,
    bundles_folder,
    isolation,
    secret_paths,
)

log = logging.getLogger(__name__)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def _require(_context: click.Context, option: click.Parameter, is_required: bool | None) -> None:
    """Set the choice in the environment, so that child processes have it too. Raises click.UsageError."""
    if is_required is None:
        return
    if is_required and (why := why_no_isolation()):
        raise click.UsageError(
            f"{option.opts[0]} is impossible on this host: {why}; docs/operate/security_setup.md has the requirements"
        )
    os.environ[VARIABLE] = (Isolation.REQUIRED if is_required else Isolation.OPEN).value


def _pass(_context: click.Context, option: click.Parameter, names: tuple[str, ...]) -> None:
    """Add the names to the variables for user code that the environment lists. Raises click.BadParameter."""
    for name in names:
        if not NAME.fullmatch(name):
            raise click.BadParameter(f"{name!r} is not the name of a variable; write {option.opts[0]} NAME")
    if names:
        os.environ[PASSED_VARIABLE] = ",".join(filter(None, [os.environ.get(PASSED_VARIABLE, ""), *names]))


_require_option = click.option(
    "--require-isolation/--no-isolation",
    default=None,
    envvar=VARIABLE,
    callback=_require,
    expose_value=False,
    help="--require-isolation: run only user code from bundles, and only if secrets and other programs' credentials can be hidden from it "
    f"(Linux 6.12); also {VARIABLE}=1. --no-isolation: hide nothing; also {VARIABLE}=0. Default: if coordinator and worker are on "
    "loopback nothing is hidden; else the token, the certificates and other runs' bundles are hidden, if the kernel can.",
)
_pass_option = click.option(
    "--pass-env",
    multiple=True,
    metavar="NAME",
    callback=_pass,
    expose_value=False,
    help="Environment variable for user code, besides those that describe this host; may be given several times.",
)


def user_code_options(command: CommandT) -> CommandT:
    decorated: CommandT = _require_option(_pass_option(command))
    return decorated


def choose_isolation(coordinator: str, host: str) -> str:
    """Choose and log what to hide from this process' user code; return the warning of a worker beyond loopback that
    cannot hide anything, else "". The worker connects to `coordinator` (HOST:PORT) and listens on `host`. Raises
    click.ClickException if the folder of bundles is unknown."""
    address = FORM.fullmatch(coordinator)
    is_beyond = not (is_loopback(address[1] if address else coordinator) and is_loopback(host))
    is_chosen = bool(os.environ.get(VARIABLE))
    why = why_no_isolation()
    if is_beyond and not is_chosen and not why:
        os.environ[VARIABLE] = Isolation.SECRETS.value
    match isolation():
        case Isolation.REQUIRED:
            log.info("secrets and other programs' credentials are hidden from user code (--require-isolation)")
        case Isolation.SECRETS:
            log.info("secrets are hidden from user code: %s", _readable())
        case Isolation.OPEN if is_chosen:
            log.info("user code can read the token, because of --no-isolation")
        case Isolation.OPEN if not is_beyond:
            log.info("user code can read the token, because coordinator and worker are on loopback")
        case Isolation.OPEN:
            return (
                f"USER CODE CAN READ SECRETS: {_readable()}, because {why}. Run this worker on a kernel that can hide them, or give it no "
                "user code (serve reward --only FUNCTION); --no-isolation accepts the risk (docs/operate/security_setup.md)"
            )
    return ""


def _readable() -> str:
    try:
        return f"{', '.join(map(str, secret_paths()))} and other runs' bundles in {bundles_folder()}"
    except InvalidInput as error:
        raise click.ClickException(str(error)) from None
