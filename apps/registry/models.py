"""`paceline models`: manage registered models with their lineage, stage and aliases."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.apps.registry.facts import change_facts, change_line, model_facts, model_lines
from paceline.apps.registry.fetch import MODEL, fetch, push
from paceline.apps.registry.register import register
from paceline.errors import Conflict
from paceline.models.registered import CHAMPION, Reference, read_reference
from paceline.services.cli import render
from paceline.services.cli.recorded.source import changing_models_of, models_of, source_options
from paceline.services.cli.render import FILE
from paceline.services.common.options import json_option, print_json

alias_option = click.option("--alias", default=CHAMPION, show_default=True, help="Alias to move.")


@click.group()
def models() -> None:
    """Register models, promote those that passed their gate, and fetch them with a verified signature."""


models.add_command(register)


@models.command("list")
@click.argument("name", required=False, default="")
@source_options
@json_option
def list_models(name: str, directory: Path, coordinator: str | None, as_json: bool) -> None:
    """List the registered versions of NAME, or of all models, newest first."""
    with models_of(directory, coordinator) as source:
        found = list(source.list(name))
    if as_json:
        print_json({"models": [model_facts(each) for each in found]})
        return
    for each in found:
        aliases = " ".join(f"@{alias}" for alias in each.aliases)
        click.echo(f"{f'{each.name}:{each.version}':32} {each.stage:12} {each.run_id or '-':24} {aliases}".rstrip())
    if not found:
        click.echo("no registered models; `paceline models register` adds one")


@models.command()
@click.argument("model", metavar=MODEL)
@source_options
@json_option
def show(model: str, directory: Path, coordinator: str | None, as_json: bool) -> None:
    """Show a version (default: the newest) with its lineage, evaluations, gate, and the changes of the model's aliases."""
    with models_of(directory, coordinator) as source:
        found = source.show(read_reference(model))
    if as_json:
        print_json(model_facts(found.model) | {"changes": [change_facts(each) for each in found.changes]})
    else:
        click.echo("\n".join([*model_lines(found.model), *map(change_line, found.changes)]))


@models.command()
@click.argument("model", metavar="NAME:VERSION")
@alias_option
@click.option(
    "--override",
    default="",
    metavar="REASON",
    help="Promote a version that did not pass its gate; the reason is recorded.",
)
@source_options
@json_option
def promote(model: str, alias: str, override: str, directory: Path, coordinator: str | None, as_json: bool) -> None:
    """Point an alias to a version that passed its gate. Exit status 1 if it did not pass and there is no --override."""
    reference = read_reference(model)
    if not reference.version:
        raise click.UsageError(f"{model!r} names no version; write NAME:VERSION")
    with changing_models_of(directory, coordinator) as source:
        found = source.promote(reference.name, reference.version, alias=alias, override=override)
    render.answer(as_json, model_facts(found), f"{found.name}@{alias} is now version {found.version}")


@models.command()
@click.argument("name")
@alias_option
@click.option("--reason", required=True, help="Why; recorded.")
@source_options
@json_option
def rollback(name: str, alias: str, reason: str, directory: Path, coordinator: str | None, as_json: bool) -> None:
    """Point an alias to its previous version again. The version that the alias leaves becomes rolled_back."""
    reference = Reference(read_reference(name).name, alias=alias)
    with changing_models_of(directory, coordinator) as source:
        holder = source.show(reference).model
        found = source.roll_back(reference.name, holder.version, reason, alias=alias)
    render.answer(
        as_json,
        model_facts(found),
        f"{found.name}@{alias} is version {found.version} again; version {holder.version} is rolled back",
    )


models.add_command(fetch)
models.add_command(push)


@models.command()
@click.argument("file", type=FILE)
def key(file: Path) -> None:
    """Make a key pair for signatures: FILE holds the private key, FILE.pub the public one."""
    from paceline.apps.registry.statement import make_key

    if not file.parent.is_dir():
        raise Conflict(f"the folder {file.parent} does not exist; make it first")
    click.echo(f"{file} signs (keep it secret), and {make_key(file)} verifies")
