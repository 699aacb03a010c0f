"""`python -m paceline.apps.dashboard.links HOST:PORT`: print the links to a dashboard in a container.

The container's log should hold no keys; anyone who may run commands in the container, where the token is, can print the
links.
"""

from __future__ import annotations

from pathlib import Path

import click

from paceline.calls.token import DEFAULT_PATH, read_token, token_path
from paceline.errors import NotFound
from paceline.services.common.access.page_keys import Access, Role
from paceline.services.common.options import token_file_option
from paceline.tls.folder import tls_folder


@click.command()
@click.argument("address")
@token_file_option
def main(address: str) -> None:
    path: Path = token_path(DEFAULT_PATH)
    if not read_token(path):
        raise click.ClickException(
            str(NotFound(f"no token in {path}; name the token file of the dashboard's coordinator with --token-file"))
        )
    say_links(address, Access(path))


def say_links(address: str, access: Access) -> None:
    click.echo(f"page:           {link(address, access, Role.OPERATOR)}")
    click.echo(f"page, to read:  {link(address, access, Role.READER)}")


def link(address: str, access: Access, role: Role) -> str:
    """Return the page's link for a role. The key follows `#`, which browsers never send to a server."""
    scheme = "http" if tls_folder() is None else "https"
    return f"{scheme}://{address}/#key={access.key(role)}"


if __name__ == "__main__":
    main()
