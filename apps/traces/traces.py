"""`paceline traces`: write a run's completions as a file to train on, make preference pairs (each good completion of a
prompt with each bad one), and compare two models in use by the feedback on their answers.

Promise: prompts are split into training prompts and held-out prompts before pairing, by a hash of the prompt, so that
no prompt is in both sets; every trace is counted as used or with the reason for leaving it out.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from paceline.apps.evaluation.gate_command import decision_options, end
from paceline.data.rows import Rows
from paceline.data.traces import Trace, TraceKeys, prompt_digest, read_trace
from paceline.errors import DataError, counted
from paceline.services.cli import render
from paceline.services.cli.recorded.source import records_of_run, source_options
from paceline.services.cli.render import FILE
from paceline.services.common.options import json_option, print_json


@click.command()
@click.argument("champion", metavar="CHAMPION")
@click.argument("candidate", metavar="CANDIDATE")
@decision_options
def compare(
    champion: str, candidate: str, max_drop: float, margin: float, seed: int, output: Path | None, as_json: bool
) -> None:
    """Compare the rewards of two models' traces. Exit status: 0 promote the candidate, 1 roll back, 2 hold.

    Each argument is a folder of `paceline serve model --traces`, or a file, glob or URL of traces with `final_reward`.
    """
    from paceline.apps.evaluation.gate import Bounds
    from paceline.apps.evaluation.gate import compare as compared

    sides = {name: _rewards(place) for name, place in (("champion", champion), ("candidate", candidate))}
    report = compared(sides["champion"].rewards, sides["candidate"].rewards, Bounds(max_drop, margin), seed)
    for name, side in sides.items():
        report[name] |= {"source": side.source, "models": sorted(side.models), "unrated": side.unrated}
    end(report, report["decision"], _lines(report), output, as_json)


class _Side:
    def __init__(self, source: str) -> None:
        self.source = source
        self.rewards: dict[bytes, list[float]] = defaultdict(list)
        """Maps the digest of a prompt to its rewards."""
        self.models: set[str] = set()
        self.unrated = 0
        """Number of traces without a reward; in a folder, number of requests without feedback."""


def _rewards(place: str) -> _Side:
    from paceline.data.rows import open_rows
    from paceline.data.traces import TraceKeys, prompt_digest, read_trace

    folder = Path(place)
    side = _Side(place)
    name = f"{place.rstrip('/')}/rated-*.jsonl" if folder.is_dir() else place
    rows = open_rows(name, "train", "TRACES", lambda row: _check(read_trace(row, TraceKeys())))
    for index in range(len(rows)):
        row = rows[index]
        trace = read_trace(row, TraceKeys())
        if trace.reward is None:
            side.unrated += 1
            continue
        side.rewards[prompt_digest(trace.prompt)].append(trace.reward)
        if row.get("model"):
            side.models.add(str(row["model"]))
    if folder.is_dir():
        requests = sum(_num_lines(path) for path in folder.glob("requests-*.jsonl"))
        side.unrated = max(0, requests - sum(map(len, side.rewards.values())))
    return side


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [report["decision"]]
    for name in ("champion", "candidate"):
        side, reward = report[name], report[name]["reward"]
        lines.append(
            f"{name}: {reward['value']:.4f} [{reward['low']:.4f}, {reward['high']:.4f}] over {side['traces']:,} rated traces of "
            f"{side['prompts']:,} prompts, {side['unrated']:,} unrated {' '.join(side['models'])}".rstrip()
        )
    found, bounds = report["difference"], report["bounds"]
    lines.append(
        f"difference {found['value']:+.4f} [{found['low']:+.4f}, {found['high']:+.4f}]; max_drop {bounds['max_drop']:g}, margin "
        f"{bounds['margin']:g}"
    )
    return lines


def _num_lines(path: Path) -> int:
    from paceline.encryption.storage_key import storage_key
    from paceline.files.line_file import LineReader

    with LineReader(path, storage_key()) as file:
        return sum(1 for _ in file.stored())


@click.group()
def traces() -> None:
    """Write a run's samples as traces (traces export RUN FILE), convert other formats, make preference pairs of traces,
    or compare the traces of two models."""


traces.add_command(compare)


@traces.command()
@click.argument("run")
@click.argument("destination", type=FILE)
@source_options
@json_option
def export(run: str, destination: Path, directory: Path, coordinator: str | None, as_json: bool) -> None:
    """Write every completion that RUN trained on to DESTINATION, .jsonl or .parquet, with its tokens, their
    log-probabilities and versions, and its rewards. `paceline offline_grpo` trains on the file."""
    from paceline.services.cli.recorded.sample_files import export_samples

    if destination.suffix not in (".jsonl", ".parquet"):
        raise click.UsageError(
            f"{destination.name}: traces have lists, which only .jsonl and .parquet can hold; name such a file"
        )
    with records_of_run(run, directory, coordinator) as (source, run_id):
        source.get(run_id)  # raises NotFound with the runs that exist
        rows = export_samples(source.records, run_id, destination)
    render.answer(
        as_json, {"path": str(destination), "rows": rows}, f"{destination}: {counted(rows, 'trace')} of {run_id}"
    )


@traces.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.argument("destination", type=FILE)
@click.option(
    "--scores-from",
    "score_files",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Further file with evaluations, such as the log records of the same service.",
)
@click.option(
    "--score",
    "scores",
    multiple=True,
    help="Evaluation that is the reward; several evaluations are added up. Default: the only evaluation.",
)
@json_option
def convert(
    file: Path, destination: Path, score_files: tuple[Path, ...], scores: tuple[str, ...], as_json: bool
) -> None:
    """Write the model calls in FILE to DESTINATION, a JSONL file of traces. FILE has OpenTelemetry spans (OTLP JSON
    lines, or one span a line) by the conventions for generative AI, or rollouts of the library verifiers.

    The reward is the score of the call's evaluation (event gen_ai.evaluation.result), or the rollout's.
    """
    from paceline.apps.traces.conversion import ConversionReport, convert
    from paceline.files.whole_file import written_whole

    report = ConversionReport()
    with written_whole(destination) as partial, partial.open("w", encoding="utf-8") as out:
        for row in convert((file, *score_files), scores, report):
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
        if not report.rows:
            reasons = ", ".join(f"{number:,} ({why})" for why, number in report.left_out.most_common())
            raise DataError(f"{file} has no readable call of a model; left out: {reasons or 'nothing'}")
    if as_json:
        print_json(report.facts())
        return
    click.echo(f"{destination}: {counted(report.rows, 'trace')}, {report.with_reward:,} with a reward")
    for reason, number in report.left_out.most_common():
        click.echo(f"left out: {counted(number, 'record')} ({reason})")


@traces.command()
@click.argument("file")
@click.argument("destination", type=FILE)
@click.option("--prompt-key", default="prompt", show_default=True, help="Column of the prompt.")
@click.option("--completion-key", default="completion", show_default=True, help="Column of the completion.")
@click.option(
    "--reward-key",
    "reward_keys",
    multiple=True,
    help="Column of the reward; several are added up. Default: final_reward, or TRL's reward functions.",
)
@click.option("--chosen", default=0.7, show_default=True, help="Least reward of a chosen completion.")
@click.option("--rejected", default=0.5, show_default=True, help="Bound below which a completion is rejected.")
@click.option(
    "--max-pairs-per-prompt",
    type=click.IntRange(min=1),
    help="Most pairs of a prompt; the pairs with the largest margins are kept.",
)
@click.option(
    "--held-out",
    type=(click.FloatRange(0, 1, min_open=True, max_open=True), FILE),
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
    from paceline.data.traces import TraceKeys, read_trace
    from paceline.files.whole_file import written_whole

    if rejected > chosen:
        raise click.UsageError(
            f"--rejected {rejected:g} is above --chosen {chosen:g}, so a trace could be both; lower --rejected"
        )
    keys = TraceKeys(prompt_key, completion_key, reward_keys)
    rules = PairRules(chosen, rejected, max_pairs_per_prompt, held_out[0] if held_out else 0.0)
    rows, report = open_rows(file, "train", "FILE", lambda row: _check(read_trace(row, keys))), PairReport()
    with ExitStack() as files:
        paths = [destination, *([held_out[1]] if held_out else [])]
        opened = [
            files.enter_context(files.enter_context(written_whole(path)).open("w", encoding="utf-8")) for path in paths
        ]
        for row, is_held_out in pairs_of_traces(rows, keys, rules, report):
            opened[is_held_out].write(json.dumps(row, ensure_ascii=False) + "\n")
        if not report.pairs:
            reasons = ", ".join(f"{number:,} ({why})" for why, number in report.left_out.most_common())
            raise DataError(
                f"{file} has no pair: no prompt has both a trace with a reward of at least {chosen:g} and one below {rejected:g}; "
                f"left out: {reasons or 'nothing'}. A model that answers each prompt once gives no pairs; name the traces of "
                "several models together, or ask for several answers to a prompt"
            )
    if as_json:
        print_json(report.facts())
        return
    held = f"; {report.pairs_held_out:,} pairs are held out" if held_out else ""
    click.echo(
        f"{counted(report.pairs, 'pair')} from {report.prompts_used:,} of {counted(report.prompts, 'prompt')}{held}"
    )
    click.echo(f"{report.traces_used:,} of {report.traces:,} traces are used")
    for what, counts in (("traces", report.left_out), ("pairs", report.pairs_left_out)):
        for reason, number in counts.most_common():
            click.echo(f"left out: {number:,} {what} ({reason})")


def _check(_: object) -> None:
    """Raise an error if the trace cannot be used."""


@dataclass(frozen=True)
class PairRules:
    chosen: float = 0.7
    """Smallest reward of a chosen completion."""
    rejected: float = 0.5
    """A rejected completion has a reward below this."""
    max_pairs_per_prompt: int | None = None
    held_out: float = 0.0
    """Share of the prompts whose pairs are held out."""


@dataclass
class PairReport:
    """Counts of used traces, and of those left out."""

    traces: int = 0
    traces_used: int = 0
    prompts: int = 0
    prompts_used: int = 0
    pairs: int = 0
    pairs_held_out: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Maps a reason to the number of traces that were left out for it."""
    pairs_left_out: Counter[str] = field(default_factory=Counter)
    """Maps a reason to the number of pairs that were left out for it."""

    def facts(self) -> dict[str, Any]:
        return {**vars(self), "left_out": dict(self.left_out), "pairs_left_out": dict(self.pairs_left_out)}


def pairs_of_traces(
    rows: Rows, keys: TraceKeys, rules: PairRules, report: PairReport
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield each pair as a row (prompt, chosen, rejected, margin and both rewards), and whether it is held out.

    Pairs are in the order of their prompts' first traces. Of more than `max_pairs_per_prompt` pairs, those with the
    largest margins are kept. Raises DataError for a row that is not a trace. Memory holds the prompts' digests and the
    rewards.
    """
    members: dict[bytes, list[tuple[int, float]]] = {}
    for index in range(len(rows)):
        trace = read_trace(rows[index], keys)
        report.traces += 1
        indices = members.setdefault(prompt_digest(trace.prompt), [])
        if trace.reward is None:
            report.left_out["no reward"] += 1
        elif rules.rejected <= trace.reward < rules.chosen:
            report.left_out[f"reward from {rules.rejected:g} to below {rules.chosen:g}"] += 1
        else:
            indices.append((index, trace.reward))
    report.prompts = len(members)
    for digest, indices in members.items():
        good = [(index, reward) for index, reward in indices if reward >= rules.chosen]
        bad = [(index, reward) for index, reward in indices if reward < rules.rejected]
        if not good or not bad:
            report.left_out["prompt with only chosen or only rejected completions"] += len(indices)
            continue
        held_out = int.from_bytes(digest[:8], "big") / 2**64 < rules.held_out
        pairs = sorted(
            ((best, worst) for best in good for worst in bad), key=lambda pair: pair[1][1] - pair[0][1]
        )  # stable, so equal margins keep the order of the file
        chosen, used = _different(rows, keys, pairs, rules, report), set()
        for won, lost, row in chosen:
            used |= {won, lost}
            report.pairs += 1
            report.pairs_held_out += held_out
            yield row, held_out
        report.prompts_used += bool(used)
        report.traces_used += len(used)
        if rest := len(indices) - len(used):
            report.left_out["in no pair that was kept"] += rest


def _different(
    rows: Rows,
    keys: TraceKeys,
    pairs: list[tuple[tuple[int, float], tuple[int, float]]],
    rules: PairRules,
    report: PairReport,
) -> list[tuple[int, int, dict[str, Any]]]:
    """Return the kept pairs of one prompt: the indices of both traces, and the row. Equal completions make no pair."""
    kept: list[tuple[int, int, dict[str, Any]]] = []
    for (won, high), (lost, low) in pairs:
        if rules.max_pairs_per_prompt is not None and len(kept) >= rules.max_pairs_per_prompt:
            report.pairs_left_out["beyond max_pairs_per_prompt"] += 1
            continue
        better, worse = (read_trace(rows[index], keys) for index in (won, lost))
        if better.completion == worse.completion:
            report.pairs_left_out["equal completions"] += 1
        else:
            kept.append((won, lost, _row(better, worse, high, low)))
    return kept


def _row(better: Trace, worse: Trace, high: float, low: float) -> dict[str, Any]:
    def completion(trace: Trace) -> Any:
        is_chat = not isinstance(trace.prompt, str) and isinstance(trace.completion, str)
        return [{"role": "assistant", "content": trace.completion}] if is_chat else trace.completion

    return {
        "prompt": better.prompt,
        "chosen": completion(better),
        "rejected": completion(worse),
        "margin": round(high - low, 9),
        "chosen_reward": high,
        "rejected_reward": low,
        **({"tools": better.tools} if better.tools else {}),
    }
