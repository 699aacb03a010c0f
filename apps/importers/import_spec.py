"""`paceline import trl|nemo|verl|prime-rl FILE`: write a spec from another library's configuration, and name what was left
out."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.errors import SpecError
from paceline.services.common.options import json_option, print_json


@click.command("import")
@click.argument("library", type=click.Choice(["trl", "nemo", "verl", "prime-rl"]))
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The spec to write; default NAME.paceline.yaml beside FILE.",
)
@click.option("--processes", default=1, type=click.IntRange(min=1), help="GPUs that the TRL training ran on.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
@json_option
def import_spec(
    library: str,
    file: Path,
    overrides: tuple[str, ...],
    output: Path | None,
    processes: int,
    force: bool,
    as_json: bool,
) -> None:
    """Write a spec from FILE: a recipe or script of TRL, a YAML of NeMo RL, a YAML or a script with overrides of verl,
    a TOML of prime-rl.

    A Python script is read, never run. Overrides are Paceline's keys; they complete or change the spec.
    """
    from paceline.apps.importers.writing import import_config, spec_text

    done = import_config(library, file, overrides, processes=processes)
    destination = output or file.with_name(f"{file.stem}.paceline.yaml")
    texts = {destination: spec_text(done, file)} | {
        destination.with_name(name): text for name, text in done.files.items()
    }
    for path, text in texts.items():
        if path.exists() and not force:
            raise SpecError(f"{path} exists; name another with --output, or replace it with --force")
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise SpecError(
                f"cannot write {str(path)!r}: {error.strerror}; name another with --output"
            ) from None
    if as_json:
        written = [str(path) for path in texts]
        print_json({"written": written, "notes": done.notes, "left_out": done.left_out})
        return
    for title, lines in (("note", done.notes), ("left out", done.left_out)):
        for line in lines:
            click.echo(f"{title}: {line}", err=True)
    click.echo(f"{destination}: a spec for `paceline up`; {len(done.left_out)} settings were left out")
