"""`paceline data prepare`: write a spec's training data as `data.preparation` makes them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from paceline.errors import InvalidInput
from paceline.services.cli.recorded.source import records_of_run, source_options
from paceline.services.common.options import json_option, print_json


@click.command()
@click.argument("spec", type=click.Path())
@click.argument("destination", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@source_options
@json_option
def prepare(
    spec: str,
    destination: Path,
    overrides: tuple[str, ...],
    directory: Path,
    coordinator: str | None,
    as_json: bool,
) -> None:
    """Write the rows of data.train of SPEC to DESTINATION, a JSONL file, as data.preparation makes them, and say how many each
    reason leaves out. A submission does the same by itself; `data.train: DESTINATION` trains on the file.

    The runs of data.preparation.pass_rate_of are read from the ledger of --directory, or from a coordinator."""
    from paceline.data.preparation.prepared import prepared_data
    from paceline.files.whole_file import written_whole
    from paceline.spec.reading import load_spec

    if destination.suffix != ".jsonl":
        raise click.UsageError(f"{destination.name}: the rows are written as JSONL; name a .jsonl file")
    loaded = load_spec(spec, overrides)
    if not loaded.data.preparation.is_used:
        raise InvalidInput("data.preparation is empty, so nothing changes; set its function or a filter")
    with prepared_data(loaded, attempts_in(directory, coordinator)) as prepared:
        made = prepared.sets["data.train"]
        with written_whole(destination) as partial, partial.open("wb") as file:
            for path in made.paths:
                with path.open("rb") as part:
                    shutil.copyfileobj(part, file)
    left_out = +made.left_out
    if as_json:
        print_json({"path": str(destination), "rows": made.rows, "left_out": dict(left_out)})
        return
    click.echo(f"{destination}: {made.rows:,} rows")
    for reason, number in left_out.most_common():
        click.echo(f"left out: {number:,} rows ({reason})")


def attempts_in(
    directory: Path, coordinator: str | None
) -> Callable[[str], Iterator[tuple[Any, list[float]]]]:
    """Return the function that reads the scored groups of a run, by its id or its folder, where the options say."""

    def attempts_of(run: str) -> Iterator[tuple[Any, list[float]]]:
        with records_of_run(run, directory, coordinator) as (source, run_id):
            yield from source.records.attempts(run_id)

    return attempts_of
