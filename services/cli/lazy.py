"""A click group that imports a command's module when the command runs, and lists its commands without imports."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from paceline.errors import PacelineError


class LazyGroup(click.Group):
    """`sections` has the commands under their headings: of each name "module:attribute" and its one line of help.

    The attribute is a click command, or a plain function without parameters. A PacelineError of any command becomes
    "Error: …" on stderr with exit status 1.
    """

    def __init__(
        self, *args: Any, sections: Mapping[str, Mapping[str, tuple[str, str]]], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections
        self._entries = {name: entry for section in sections.values() for name, entry in section.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the table."""
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in self._entries:
            return None
        target, summary = self._entries[cmd_name]
        module, _, attribute = target.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        return (
            found
            if isinstance(found, click.Command)
            else click.Command(cmd_name, callback=found, help=summary)
        )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; name the one that an unknown word stands for."""
        if args and not args[0].startswith("-") and args[0] not in self._entries:
            from paceline.services.cli.unknown_commands import remedy

            ctx.fail(f"No such command {args[0][:80]!r}; {remedy(args[0], self._entries)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table, without importing them."""
        for heading, entries in self._sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name, summary) for name, (_, summary) in entries.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; show a PacelineError to the user without a traceback."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            from paceline.services.cli.unknown_commands import setting_for

            clause = setting_for(error.option_name)
            if not clause:
                raise
            raise click.UsageError(f"{error.message.rstrip('.')}{clause}", ctx=error.ctx) from None
        except PacelineError as error:
            raise click.ClickException(str(error)) from None
