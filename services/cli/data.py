"""`paceline data`: look at a spec's data before a run: counts, lengths, samples with their masks, and overlap."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from services.common.options import json_option, print_json

if TYPE_CHECKING:
    from paceline.data.rows import Rows
    from paceline.spec import RunSpec

MAX_COMPARED = 100_000
"""Rows that are compared with the evaluation sets, from the start of the training data."""
OVERLAP = 0.5
"""Share of a prompt's n-grams from which it counts as one of the evaluation set."""
EVALUATION_STEMS = ("test", "eval", "validation", "valid", "dev")
"""Names of files beside the training data that are taken for evaluation sets."""
PROMPT_COLUMNS = ("prompt", "question", "problem", "input")


@click.group()
def data() -> None:
    """Look at the data of a spec (data inspect SPEC)."""


@data.command()
@click.argument("spec", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--limit", type=click.IntRange(min=0), default=3, show_default=True, help="Samples to show.")
@json_option
def inspect(spec: str, overrides: tuple[str, ...], limit: int, as_json: bool) -> None:
    """Check the data of SPEC and show them: rows, columns, lengths of the prompts, samples, what is left out, and overlap
    of the training data with the validation data and with test files beside them.

    Samples show what trains in green and what is only read dimmed.
    """
    from paceline.spec.reading import load_spec

    loaded = load_spec(spec, overrides)
    found = _inspected(loaded, limit)
    if as_json:
        print_json(found)
        return
    for name in ("train", "validation"):
        if name in found:
            part = found[name]
            click.echo(f"data.{name}: {part['rows']:,} rows with the columns {', '.join(part['columns'])}")
            if "report" in part:
                click.echo(f"  {part['report']}")
            lengths = part["prompt_characters"]
            click.echo(
                f"  prompts have {lengths['p10']:,} to {lengths['p90']:,} characters (p10, p90), at most {lengths['max']:,}"
            )
    for sample in found["samples"]:
        click.echo("")
        click.echo(click.style(sample["read"], dim=True) + click.style(sample["trained"], fg="green"))
    for each in found["overlap"]:
        click.echo(
            f"{each['evaluation']}: {each['rows']:,} of {each['compared']:,} training prompts are in it"
        )
        if each["rows"]:
            click.echo(
                f"warning: {each['rows']:,} rows of data.train have at least {OVERLAP:.0%} of their words in "
                f"{each['evaluation']} (first: row {each['first']}); a model that trains on them cannot be measured there",
                err=True,
            )


def _inspected(spec: RunSpec, limit: int) -> dict[str, Any]:
    from paceline.data.examples import check_example, open_examples
    from paceline.data.rows import open_source, prompt_check
    from paceline.data.traces import TraceGroups

    found: dict[str, Any] = {"samples": [], "overlap": []}
    check = check_example(spec) if spec.examples is not None else prompt_check(spec.data.prompt_key)
    sets = {"train": False, **({"validation": True} if spec.data.validation is not None else {})}
    rows_of = {}
    for name, validation in sets.items():
        rows = rows_of[name] = open_source(spec.data.source(validation=validation), check)
        found[name] = {
            "rows": len(rows),
            "columns": list(rows.columns),
            "fingerprint": rows.fingerprint,
            "prompt_characters": _lengths(rows, spec.data.prompt_key),
        }
        if spec.trains_traces:
            groups = open_examples(spec, validation=validation)
            assert isinstance(groups, TraceGroups)
            found[name]["report"] = groups.report
            found[name]["left_out"] = dict(groups.left_out)
    train = rows_of["train"]
    found["samples"] = [_sample(train[index], spec) for index in range(min(limit, len(train)))]
    evaluations = {"data.validation": rows_of["validation"]} if "validation" in rows_of else {}
    if spec.data.validation == spec.data.train:
        evaluations = {}
    evaluations |= {str(path): open_source(_source_of(path)) for path in _siblings(spec)}
    for name, rows in evaluations.items():
        found["overlap"].append({"evaluation": name, **_overlap(train, rows, spec.data.prompt_key)})
    return found


def _source_of(path: Path) -> Any:
    from paceline.spec.sections.data import DataSource

    return DataSource("test file", str(path), "train")


def _siblings(spec: RunSpec) -> Iterator[Path]:
    """Yield evaluation sets by their names beside the files of the training data."""
    from paceline.data.files import FILE_KINDS
    from paceline.files.storage import is_url

    values = (spec.data.train, spec.data.validation)
    named = [name for v in values if v is not None for name in ((v,) if isinstance(v, str) else v)]
    train = spec.data.train
    for folder in sorted(
        {Path(name).parent for name in ((train,) if isinstance(train, str) else train) if not is_url(name)}
    ):
        for path in sorted(folder.glob("*.*")):
            is_set = path.stem.lower() in EVALUATION_STEMS and path.suffix in FILE_KINDS
            if is_set and path.is_file() and str(path) not in named:
                yield path


def _prompts(rows: Rows, prompt_key: str) -> Iterator[str]:
    """Yield the text of each prompt, of the first of the usual columns that there is; none where there is none."""
    from paceline.data.overlap import text_of

    key = next((name for name in (prompt_key, *PROMPT_COLUMNS) if name in rows.columns), "")
    return (text_of(rows[index].get(key)) for index in range(len(rows) if key else 0))


def _overlap(train: Rows, evaluation: Rows, prompt_key: str) -> dict[str, Any]:
    from paceline.data.overlap import OverlapIndex

    index, compared, found = OverlapIndex(_prompts(evaluation, prompt_key)), 0, []
    for number, text in enumerate(islice(_prompts(train, prompt_key), MAX_COMPARED)):
        compared += 1
        if index.share(text) >= OVERLAP:
            found.append(number)
    return {"compared": compared, "rows": len(found), "first": found[0] if found else None}


def _lengths(rows: Rows, prompt_key: str) -> dict[str, int]:
    import numpy as np

    lengths = [len(text) for text in _prompts(rows, prompt_key)] or [0]
    p10, p50, p90 = np.quantile(lengths, [0.1, 0.5, 0.9])
    return {"p10": int(p10), "p50": int(p50), "p90": int(p90), "max": max(lengths)}


def _sample(row: dict[str, Any], spec: RunSpec) -> dict[str, str]:
    """Return the parts of a row: text that is only read, and text that trains."""
    from paceline.data.examples import read_demonstration, read_labeled_completion, read_preference

    match spec.examples and spec.examples.example_form:
        case "demonstration":
            prompt, completion = read_demonstration(row, spec.data)
            return {"read": _shown(prompt), "trained": _shown(completion)}
        case "preference":
            pair = read_preference(row, spec.data)
            return {"read": _shown(pair.prompt), "trained": f"{_shown(pair.chosen)}  [chosen]"}
        case "labeled_completion":
            judged = read_labeled_completion(row, spec.data)
            verdict = "good" if judged.desirable else "bad"
            return {"read": _shown(judged.prompt), "trained": f"{_shown(judged.completion)}  [{verdict}]"}
        case "traces":
            return {
                "read": _shown(row[spec.data.prompt_key]),
                "trained": _shown(row.get(spec.data.completion_key, "")),
            }
        case _:
            return {"read": _shown(row.get(spec.data.prompt_key, "")), "trained": ""}


def _shown(value: Any) -> str:
    """Return text or messages as one text; control characters are written out."""
    text = (
        value
        if isinstance(value, str)
        else "".join(f"<{message['role']}> {message.get('content') or ''}\n" for message in value)
    )
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )
