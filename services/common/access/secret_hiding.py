"""Whether a worker hides secrets from user code where no option says so: beyond loopback it does, if the kernel can.

A worker beyond loopback that cannot says so in its log, at its start and every ten minutes.
"""

from __future__ import annotations

import logging
import os

import click

from paceline.calls.connection import FORM, is_loopback
from paceline.errors import InvalidInput
from paceline.user_code.box import why_no_isolation
from paceline.user_code.surroundings import (
    VARIABLE,
    Isolation,
    bundles_folder,
    isolation,
    secret_paths,
)

log = logging.getLogger(__name__)


def choose_isolation(coordinator: str, host: str) -> str:
    """Choose what is hidden from this process' user code, and log it. Return the warning of a worker beyond loopback that can hide nothing;
    empty else.

    coordinator: HOST:PORT that it connects to; host: address that it listens on. Raises click.ClickException where the folder of bundles
    is not known.
    """
    address = FORM.fullmatch(coordinator)
    is_beyond = not (is_loopback(address[1] if address else coordinator) and is_loopback(host))
    is_chosen = bool(os.environ.get(VARIABLE))
    why = why_no_isolation()
    if is_beyond and not is_chosen and not why:
        os.environ[VARIABLE] = Isolation.SECRETS.value
    match isolation():
        case Isolation.REQUIRED:
            log.info(
                "user code: secrets are hidden from it, and so are other programs' credentials (--require-isolation)"
            )
        case Isolation.SECRETS:
            log.info("user code: secrets are hidden from it: %s", _readable())
        case Isolation.OPEN if is_chosen:
            log.info("user code can read the token, because of --no-isolation")
        case Isolation.OPEN if not is_beyond:
            log.info("user code can read the token, because coordinator and worker are on loopback")
        case Isolation.OPEN:
            return (
                f"USER CODE CAN READ SECRETS: {_readable()}, because {why}. Run this worker on such a kernel, or give it no user code "
                "(serve reward --only FUNCTION); --no-isolation accepts it (docs/security.md)"
            )
    return ""


def _readable() -> str:
    try:
        return f"{', '.join(map(str, secret_paths()))} and other runs' bundles in {bundles_folder()}"
    except InvalidInput as error:
        raise click.ClickException(str(error)) from None
