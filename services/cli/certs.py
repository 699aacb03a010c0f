"""`paceline certs`: a certificate authority for one cluster, and certificates of its processes and people."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from paceline.services.cli import render
from paceline.services.cli.recorded.source import files_option
from paceline.services.cli.render import FOLDER
from paceline.services.common.access.token_table import REVOKED_NAME, revoke_certificate
from paceline.services.common.options import json_option
from paceline.tls.authority import AUTHORITY, AUTHORITY_DAYS, CERTIFICATE_DAYS, issue, issued, make_authority, renew
from paceline.tls.certificates import ROLES, Certificate, read_certificate

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
COLUMNS = ("name", "role", "hosts", "valid until", "left")

POSITIVE = click.FloatRange(0, 36_500, min_open=True)
folder_argument = click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))


def _days_option(default: float) -> Callable[[CommandT], CommandT]:
    return click.option("--days", default=default, show_default=True, type=POSITIVE, help="Life.")


@click.group()
def certs() -> None:
    """Make certificates for TLS: `init` once, then `issue` for each process. Certificates of any other authority work
    as well."""


@certs.command("init")
@click.argument("folder", type=FOLDER)
@_days_option(AUTHORITY_DAYS)
def init(folder: Path, days: float) -> None:
    """Make a certificate authority in FOLDER. Its ca.key can issue any certificate: keep it off the cluster."""
    made = make_authority(folder, days)
    click.echo(f"authority {made.name!r} in {folder}, valid until {made.ends:%Y-%m-%d}")


@certs.command("issue")
@folder_argument
@click.argument("name")
@click.option("--role", required=True, type=click.Choice(ROLES), help="Role of the certificate's holder.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    help="DNS name or IP address of the process; may be given several times. A coordinator's certificate also has localhost.",
)
@_days_option(CERTIFICATE_DAYS)
def issue_command(folder: Path, name: str, role: str, hosts: tuple[str, ...], days: float) -> None:
    """Issue a certificate to NAME by the authority in FOLDER. Give FOLDER/NAME to the process as its --tls-dir."""
    click.echo(str(issue(folder, name, role, hosts, days)))


@certs.command("renew")
@folder_argument
@click.argument("names", nargs=-1)
@click.option(
    "--days", type=POSITIVE, help="Validity of new certificates. Default: the validity of the previous certificates."
)
def renew_command(folder: Path, names: tuple[str, ...], days: float | None) -> None:
    """Issue new certificates for NAMES, or for all that have less than a third of their validity left."""
    due = names or tuple(name for name, certificate in issued(folder) if certificate.is_due)
    for name in due:
        click.echo(str(renew(folder, name, days)))
    if not due:
        click.echo("no certificate is due", err=True)


@certs.command("revoke")
@click.argument("name")
@files_option
def revoke_command(name: str, directory: Path) -> None:
    """Revoke the certificates of NAME for good, at the coordinator of this directory. Within five seconds calls over
    NAME's connections are refused, NAME's streams end, and NAME's workers are removed. Issue the next certificate to
    another name."""
    revoke_certificate(directory / REVOKED_NAME, name)
    click.echo(f"the certificates of {name} are revoked")


@certs.command("show")
@folder_argument
@json_option
def show(folder: Path, as_json: bool) -> None:
    """List the authority and the certificates in FOLDER, or show the certificate of a --tls-dir."""
    found: dict[str, Certificate | None] = {**dict(issued(folder))} or {folder.name: _own(folder)}
    if (folder / AUTHORITY).is_file():
        found = {"(authority)": read_certificate((folder / AUTHORITY).read_bytes()), **found}
    facts = [_facts(name, certificate) for name, certificate in found.items() if certificate is not None]
    render.print_all(as_json, facts, COLUMNS, _row, "no certificates")


def _own(folder: Path) -> Certificate | None:
    path = folder / "tls.crt"
    return read_certificate(path.read_bytes()) if path.is_file() else None


def _facts(name: str, certificate: Certificate) -> render.Facts:
    return {
        "name": name,
        "role": ",".join(certificate.organizations),
        "hosts": list(certificate.hosts),
        "valid_until": certificate.ends.isoformat(),
        "left_s": round(certificate.left_s),
        "issuer": certificate.issuer,
        "serial": f"{certificate.serial:x}",
    }


def _row(facts: render.Facts) -> list[str]:
    left = "expired" if facts["left_s"] < 0 else f"{facts['left_s'] / 86400:.1f} days"
    return [facts["name"], facts["role"], ", ".join(facts["hosts"]), facts["valid_until"][:16], left]
