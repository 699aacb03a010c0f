"""`paceline data`: shows a spec's data (`inspect`), or writes them as `data.preparation` makes them (`prepare`)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from paceline.data.conversations import encode_conversation
from paceline.data.example_rows import Demonstration, is_whole
from paceline.data.examples import exchange_of
from paceline.data.messages import tools_of, tools_of_prompt
from paceline.data.tokens import changed_text, encode_exchange, encode_prompt, encode_text, load_tokenizer
from paceline.errors import InvalidInput, counted
from paceline.services.cli.recorded.source import records_of_run, source_options
from paceline.services.cli.render import FILE
from paceline.services.common.options import json_option, print_json
from paceline.spec import RunSpec

if TYPE_CHECKING:
    from paceline.data.preparation.prepared import Prepared
    from paceline.data.rows import Rows


@click.command()
@click.argument("spec", type=click.Path())
@click.argument("destination", type=FILE)
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@source_options
@json_option
def prepare(
    spec: str, destination: Path, overrides: tuple[str, ...], directory: Path, coordinator: str | None, as_json: bool
) -> None:
    """Write the rows of SPEC's data.train to DESTINATION, a JSONL file, after data.preparation, and print how many rows
    are left out for each reason. A submission prepares the rows by itself; `data.train: DESTINATION` trains on the
    file.

    The runs of data.preparation.pass_rate_of are read from the ledger of --directory, or from a coordinator.
    """
    from paceline.data.preparation.prepared import prepared_data
    from paceline.files.whole_file import written_whole
    from paceline.spec.reading import load_spec

    if destination.suffix != ".jsonl":
        raise click.UsageError(
            f"{destination.name} is not a .jsonl file; name a .jsonl file, because the rows are written as JSONL"
        )
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
    click.echo(f"{destination}: {counted(made.rows, 'row')}")
    for reason, number in left_out.most_common():
        click.echo(f"left out: {counted(number, 'row')} ({reason})")


def attempts_in(directory: Path, coordinator: str | None) -> Callable[[str], Iterator[tuple[Any, list[float]]]]:
    """Return a function that reads a run's scored groups, by the run's id or folder, from the source that the options
    name."""

    def attempts_of(run: str) -> Iterator[tuple[Any, list[float]]]:
        with records_of_run(run, directory, coordinator) as (source, run_id):
            yield from source.records.attempts(run_id)

    return attempts_of


MAX_COMPARED = 100_000
"""At most this many rows, from the start of the training data, are compared with the evaluation sets."""


class DataGroup(click.Group):
    """The commands on data. If a spec stands in place of a command, the error names the command that is meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and Path(args[0]).suffix in (".yaml", ".yml", ".json"):
            ctx.fail(f"No such command {args[0][:80]!r}; did you mean `paceline data inspect {args[0][:80]}`?")
        return super().resolve_command(ctx, args)


@click.group(cls=DataGroup)
def data() -> None:
    """Show the data of a spec (data inspect SPEC), or write them prepared (data prepare SPEC FILE)."""


data.add_command(prepare)


@data.command()
@click.argument("spec", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--limit", type=click.IntRange(min=0), default=3, show_default=True, help="Samples to show.")
@click.option("--tokens", is_flag=True, help="Show samples as rendered by the tokenizer and the chat template of SPEC.")
@source_options
@json_option
def inspect(
    spec: str,
    overrides: tuple[str, ...],
    limit: int,
    tokens: bool,
    directory: Path,
    coordinator: str | None,
    as_json: bool,
) -> None:
    """Check the data of SPEC and show them, after data.preparation: rows, format, columns, lengths of the prompts,
    samples, rows that each filter leaves out, and overlap of the training data with the validation data and with
    test files beside them.

    In samples the trained text is green, and the text that is only read is dimmed. The runs of
    data.preparation.pass_rate_of are read from the ledger of --directory, or from a coordinator.
    """
    from paceline.data.preparation.filters import OVERLAP
    from paceline.data.preparation.prepared import prepared_data
    from paceline.spec.reading import load_spec

    loaded = load_spec(spec, overrides)
    with prepared_data(loaded, attempts_in(directory, coordinator)) as prepared:
        found = _inspected(prepared, loaded, limit, tokens)
    if as_json:
        print_json(found)
        return
    for name in ("train", "validation"):
        if name in found:
            _print_part(name, found[name])
    for sample in found["samples"]:
        click.echo("")
        for text, trains in sample["parts"]:
            click.echo(click.style(text, fg="green") if trains else click.style(text, dim=True), nl=False)
        click.echo("")
        if "tokens" in sample:
            click.echo(f"  {sample['tokens']:,} tokens, of which {sample['trained_tokens']:,} are trained")
        for key in ("refused", "changed"):
            if key in sample:
                click.echo(f"warning: row {sample['row']}: {sample[key]}", err=True)
    for warning in found["warnings"]:
        click.echo(f"warning: {warning}", err=True)
    for each in found["overlap"]:
        click.echo(f"{each['evaluation']}: contains {each['rows']:,} of {each['compared']:,} training prompts")
        if each["rows"]:
            click.echo(
                f"warning: {each['rows']:,} rows of data.train have at least {OVERLAP:.0%} of their 13-word sequences in "
                f"{each['evaluation']} (first: row {each['first']}); a model trained on these rows cannot be measured fairly on this evaluation",
                err=True,
            )


def _print_part(name: str, part: dict[str, Any]) -> None:
    rows = f"the first {part['rows']:,} rows of a stream," if part["streaming"] else counted(part["rows"], "row")
    click.echo(f"data.{name}: {rows} with the columns {', '.join(part['columns'])}")
    click.echo(f"  {part['format']}")
    for reason, number in part.get("left_out", {}).items():
        click.echo(f"  left out: {number:,} ({reason})")
    for source in part.get("sources", ()):
        share = f", {source['share']:.1%} of the draws" if "share" in source else ""
        click.echo(f"  {source['name']}: {counted(source['rows'], 'row')}{share}")
    lengths = part["prompt_characters"]
    click.echo(
        f"  prompts have {lengths['p10']:,} to {lengths['p90']:,} characters (p10, p90), at most {lengths['max']:,}"
    )


def _inspected(prepared: Prepared, original: RunSpec, limit: int, tokens: bool) -> dict[str, Any]:
    from paceline.data.examples import as_examples, checked_rows, report_of
    from paceline.data.formats import describe
    from paceline.data.preparation.filters import evaluation_sets
    from paceline.data.preparation.prepared import PreparedSet
    from paceline.data.rows import left_out_of
    from paceline.reward.builtin.mathematics import gold_warnings

    spec = prepared.spec(original)
    found: dict[str, Any] = {"samples": [], "overlap": [], "warnings": []}
    sets = {"train": False, **({"validation": True} if spec.data.validation is not None else {})}
    rows_of = {}
    for name, validation in sets.items():
        is_stream = spec.data.streaming and not validation
        rows = rows_of[name] = _first_rows(spec) if is_stream else checked_rows(spec, validation=validation)
        examples = None if spec.examples is None else as_examples(rows, spec, f"data.{name}")
        found[name] = {
            "rows": len(rows),
            "streaming": is_stream,
            "columns": list(rows.columns),
            "fingerprint": rows.fingerprint,
            "format": describe(rows[0], spec.data, None) if examples is None else report_of(examples, spec),
            **_sources(rows, spec, validation=validation),
            "prompt_characters": _lengths(rows, spec),
        }
        by_preparation = prepared.sets.get(f"data.{name}", PreparedSet()).left_out
        if left_out := by_preparation + left_out_of(examples if examples is not None else rows):
            found[name]["left_out"] = dict(left_out)
        found["warnings"] += gold_warnings(spec.rewards, f"data.{name}", (rows[index] for index in range(len(rows))))
    train = rows_of["train"]
    found["samples"] = _samples(train, spec, min(limit, len(train)), tokens)
    for name, rows in evaluation_sets(original, spec).items():
        found["overlap"].append({"evaluation": name, **_overlap(train, rows, spec)})
    return found


def _first_rows(spec: RunSpec) -> Rows:
    from paceline.data.json_rows import SpooledRows
    from paceline.data.prompts import open_streamed
    from paceline.data.row_checks import row_check

    stream = open_streamed(spec.data, spec.seed, row_check(spec.data, has_tools=spec.prompts_have_tools))
    rows = SpooledRows(Path(str(spec.data.train)), stream.columns)
    for row in stream.read_rows:
        rows.add(row)
    return rows.finished()


def _sources(rows: Rows, spec: RunSpec, *, validation: bool) -> dict[str, Any]:
    """Return for each data set its name, its number of rows and, if there are weights, its share of the draws."""
    from paceline.data.rows import sizes_of

    names = spec.data.source_names(validation=validation)
    if len(names) < 2:
        return {}
    weights = None if validation else spec.data.train_weights
    sources: list[dict[str, Any]] = [
        {"name": name, "rows": size} for name, size in zip(names, sizes_of(rows), strict=True)
    ]
    for source, weight in zip(sources, weights or (), strict=False):
        source["share"] = weight / sum(weights or ())
    return {"sources": sources}


def _samples(rows: Rows, spec: RunSpec, number: int, tokens: bool) -> list[dict[str, Any]]:
    if not tokens:
        return [{"row": index, "parts": as_text(rows[index], spec)} for index in range(number)]
    tokenizer, samples = load_tokenizer(spec.policy), []
    for index in range(number):
        try:
            parts, length, trained = as_tokens(rows[index], spec, tokenizer)
            samples.append({"row": index, "parts": parts, "tokens": length, "trained_tokens": trained})
            if sentence := changed(rows[index], spec, tokenizer):
                samples[-1]["changed"] = sentence
        except InvalidInput as error:
            samples.append({"row": index, "parts": as_text(rows[index], spec), "refused": str(error)})
    return samples


def _train_prompts(rows: Rows, spec: RunSpec) -> Iterator[str]:
    """Yield each prompt's text as the algorithm reads it; the whole text if the algorithm trains on texts."""
    from paceline.data.preparation.filters import text_of

    for index in range(len(rows)):
        prompt, completion, _ = exchange_of(rows[index], spec)
        yield text_of(completion if prompt is None else prompt)


def _overlap(train: Rows, evaluation: Rows, spec: RunSpec) -> dict[str, Any]:
    from paceline.data.preparation.filters import OVERLAP, OverlapIndex, prompt_texts

    index, compared, found = OverlapIndex(prompt_texts(evaluation, spec.data.prompt_key)), 0, []
    for number, text in enumerate(islice(_train_prompts(train, spec), MAX_COMPARED)):
        compared += 1
        if index.share(text) >= OVERLAP:
            found.append(number)
    return {"compared": compared, "rows": len(found), "first": found[0] if found else None}


def _lengths(rows: Rows, spec: RunSpec) -> dict[str, int]:
    lengths = [len(text) for text in _train_prompts(rows, spec)] or [0]
    p10, p50, p90 = np.quantile(lengths, [0.1, 0.5, 0.9])
    return {"p10": int(p10), "p50": int(p50), "p90": int(p90), "max": max(lengths)}


Part = tuple[str, bool]
"""A text, and whether it is trained."""


def as_text(row: dict[str, Any], spec: RunSpec) -> list[Part]:
    """Return the texts of a row, with the roles of messages before them."""
    prompt, completion, kind = exchange_of(row, spec)
    parts = [(shown(prompt or ""), False), (shown(completion or ""), True), (f"  [{kind}]" if kind else "", False)]
    return [part for part in parts if part[0]]


def as_tokens(row: dict[str, Any], spec: RunSpec, tokenizer: Any) -> tuple[list[Part], int, int]:
    """Return the parts of a row as the tokenizer renders it, with special tokens; its number of tokens; and its number of
    trained tokens. Raises InvalidInput if the chat template refuses the row."""
    prompt, completion, _ = exchange_of(row, spec)
    template = spec.data.apply_chat_template, spec.data.chat_template_kwargs
    tools = None if completion is None else tools_of(row)
    if completion is None:
        ids = encode_prompt(tokenizer, prompt, *template, tools_of_prompt(prompt, row))
        trained = np.zeros(len(ids), bool)
    elif prompt is None:
        ids = encode_text(tokenizer, completion)
        trained = np.arange(len(ids)) > 0
    elif spec.algorithm == "sft" and spec.sft.loss_mask == "assistant":
        messages = [*Demonstration(prompt, completion).prompt, *completion]
        ids, trained = encode_conversation(tokenizer, messages, template[1], tools)
    else:
        before, after = encode_exchange(tokenizer, prompt, completion, *template, tools, ends=is_whole(row))
        ids, trained = np.concatenate([before, after]), np.arange(len(before) + len(after)) >= len(before)
    parts: list[Part] = []
    end, written = 0, ""
    for trains, group in groupby(trained.tolist()):
        end += len(list(group))
        text = str(tokenizer.decode(ids[:end].tolist(), skip_special_tokens=False))
        parts.append((shown(text[len(written) :]), bool(trains)))
        written = text
    return parts, len(ids), int(trained.sum())


def changed(row: dict[str, Any], spec: RunSpec, tokenizer: Any) -> str:
    """Return a message about a text of the row that the tokenizer does not preserve; empty if it preserves all texts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or (found := changed_text(backend, exchange_of(row, spec)[:2])) is None:
        return ""
    return f"the tokenizer does not preserve the text {found[0]!r:.80}: the text becomes {found[1]!r:.80}"


def shown(value: Any) -> str:
    """Return text or messages as one text, with control characters escaped."""
    text = (
        value
        if isinstance(value, str)
        else "".join(f"<{message['role']}> {message.get('content') or ''}\n" for message in value)
    )
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )
