"""`paceline traces`: a run's completions as a file to train on again, and preference pairs from files of traces."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import click

from services.cli.recorded.remote_samples import RemoteSamples
from services.cli.recorded.source import records_of_run, source_options
from services.common.options import json_option, print_json


@click.group()
def traces() -> None:
    """Write what a run has sampled as traces (traces export RUN FILE), or make preference pairs of traces."""


@traces.command()
@click.argument("run")
@click.argument("destination", type=click.Path(path_type=Path, dir_okay=False))
@source_options
@json_option
def export(run: str, destination: Path, directory: Path, coordinator: str | None, as_json: bool) -> None:
    """Write every completion that RUN trained on to DESTINATION, .jsonl or .parquet, with its tokens, their
    log-probabilities and versions, and its rewards. `paceline offline_grpo` trains on the file."""
    from services.coordinator.audit.sample_files import export_samples
    from services.coordinator.audit.sample_sources import LedgerSamples

    if destination.suffix not in (".jsonl", ".parquet"):
        raise click.UsageError(
            f"{destination.name}: traces have lists, which .jsonl and .parquet keep; name such a file"
        )
    with records_of_run(run, directory, coordinator) as (source, run_id):
        source.run(run_id)  # raises NotFound with the runs that exist
        if source.ledger is not None:
            rows = export_samples(LedgerSamples(source.ledger, run_id), destination)
        else:
            with RemoteSamples(source.records, run_id) as remote:
                rows = export_samples(remote, destination)
    if as_json:
        print_json({"path": str(destination), "rows": rows})
    else:
        click.echo(f"{destination}: {rows:,} traces of {run_id}")


@traces.command()
@click.argument("file")
@click.argument("destination", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--prompt-key", default="prompt", show_default=True, help="Column of the prompt.")
@click.option("--completion-key", default="completion", show_default=True, help="Column of the completion.")
@click.option(
    "--reward-key",
    "reward_keys",
    multiple=True,
    help="Column of the reward; several are added up. Default final_reward, or TRL's reward functions.",
)
@click.option("--chosen", default=0.7, show_default=True, help="Least reward of a chosen completion.")
@click.option(
    "--rejected", default=0.5, show_default=True, help="A rejected completion has a reward below this."
)
@click.option("--max-pairs-per-prompt", type=click.IntRange(min=1), help="Those of the largest margin stay.")
@click.option(
    "--held-out",
    type=(click.FloatRange(0, 1, min_open=True, max_open=True), click.Path(path_type=Path, dir_okay=False)),
    metavar="SHARE FILE",
    help="Write the pairs of this share of the prompts to FILE instead.",
)
@json_option
def pairs(
    file: str,
    destination: Path,
    prompt_key: str,
    completion_key: str,
    reward_keys: tuple[str, ...],
    chosen: float,
    rejected: float,
    max_pairs_per_prompt: int | None,
    held_out: tuple[float, Path] | None,
    as_json: bool,
) -> None:
    """Write preference pairs of the traces in FILE (.jsonl, .parquet, .csv, a glob or a URL) to DESTINATION, a JSONL file:
    prompt, chosen, rejected, margin, and both rewards. `paceline dpo` and `paceline rm` train on it."""
    from paceline.data.rows import open_rows
    from paceline.data.trace_pairs import PairReport, PairRules, pairs_of_traces
    from paceline.data.traces import TraceKeys, read_trace
    from paceline.files.whole_file import written_whole

    if rejected > chosen:
        raise click.UsageError(f"--rejected {rejected:g} is above --chosen {chosen:g}; a trace would be both")
    keys = TraceKeys(prompt_key, completion_key, reward_keys)
    rules = PairRules(chosen, rejected, max_pairs_per_prompt, held_out[0] if held_out else 0.0)
    rows, report = open_rows(file, "train", "FILE", lambda row: _check(read_trace(row, keys))), PairReport()
    with ExitStack() as files:
        paths = [destination, *([held_out[1]] if held_out else [])]
        opened = [
            files.enter_context(files.enter_context(written_whole(path)).open("w", encoding="utf-8"))
            for path in paths
        ]
        for row, is_held_out in pairs_of_traces(rows, keys, rules, report):
            opened[is_held_out].write(json.dumps(row, ensure_ascii=False) + "\n")
    if as_json:
        print_json(report.facts())
        return
    held = f", of which {report.pairs_held_out:,} are held out" if held_out else ""
    click.echo(f"{report.pairs:,} pairs of {report.prompts_used:,} of {report.prompts:,} prompts{held}")
    click.echo(f"{report.traces_used:,} of {report.traces:,} traces are used")
    for what, counts in (("traces", report.left_out), ("pairs", report.pairs_left_out)):
        for reason, number in counts.most_common():
            click.echo(f"left out: {number:,} {what} ({reason})")


def _check(_: object) -> None:
    """Take a trace that could be read."""
