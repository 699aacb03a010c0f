"""`paceline token create|list|revoke`: the named tokens of the coordinator of this directory."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from paceline.calls.token import TOKEN_NAME, read_token, token_path
from paceline.errors import Conflict, counted
from paceline.services.cli.recorded.source import files_option
from paceline.services.cli.render import PATH
from paceline.services.common.access.rights import CallerRole
from paceline.services.common.access.token_table import BOOTSTRAP, DAY_S, FILE_NAME, read_table
from paceline.services.common.access.token_table import create as create_token
from paceline.services.common.access.token_table import revoke as revoke_token
from paceline.services.common.options import caller_token_file_option, json_option, print_json


@click.group()
def token() -> None:
    """Make, list and revoke tokens of a coordinator, on its host. Changes apply within a second, without a restart."""


@token.command()
@click.argument("name")
@click.option(
    "--role",
    required=True,
    type=click.Choice([role.value for role in CallerRole]),
    help="viewer reads; submitter also submits, and controls their own runs; operator does everything except a worker's calls; "
    "worker is for workers; scraper reads metrics and the status.",
)
@click.option(
    "--days",
    default=90.0,
    show_default=True,
    type=click.FloatRange(0, 36_500),
    help="Days for which the token is valid; 0 means without end.",
)
@click.option("--out", type=PATH, help="New file for the token, mode 0600. Default: print it.")
@files_option
def create(name: str, role: str, days: float, out: Path | None, directory: Path) -> None:
    """Make a token for NAME and print it once, because the coordinator keeps only its digest."""
    if out is not None and out.exists():
        raise Conflict(f"{out} exists already; name a new file with --out")
    made = create_token(directory / FILE_NAME, name, CallerRole(role), days * DAY_S)
    if out is None:
        click.echo(made)
        return
    with open(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(made + "\n")
    click.echo(f"token {name} ({role}) is in {out}")


@token.command(name="list")
@files_option
@json_option
def list_tokens(directory: Path, as_json: bool) -> None:
    """List the tokens with their roles. The tokens themselves cannot be shown again."""
    rows = sorted(read_table(directory / FILE_NAME).values(), key=lambda row: row.created_s)
    now_s = time.time()
    if as_json:
        fields = ("name", "role", "created_s", "expires_s", "revoked_s")
        found = [{each: getattr(row, each) for each in fields} | {"valid": not row.refusal(now_s)} for row in rows]
        print_json({"tokens": found})
        return
    for row in rows:
        state = "revoked" if row.revoked_s else "expired" if row.refusal(now_s) else "valid"
        until = time.strftime("until %Y-%m-%d", time.gmtime(row.expires_s)) if row.expires_s else "without end"
        click.echo(f"{row.name:24} {row.role or 'all roles':10} {state:8} {until}")
    if not rows:
        click.echo("there are no named tokens; the bootstrap token in the directory has every role")


@token.command()
@click.argument("name")
@files_option
@caller_token_file_option
def revoke(name: str, directory: Path) -> None:
    """Revoke the tokens of NAME: within five seconds NAME's calls are refused, NAME's streams end, and NAME's workers
    are removed. The name of the token that the coordinator made in its directory is `bootstrap`."""
    bootstrap = read_token(token_path(directory / TOKEN_NAME)) if name == BOOTSTRAP else ""
    number = revoke_token(directory / FILE_NAME, name, bootstrap)
    click.echo(f"revoked {counted(number, 'token')} of {name}")
