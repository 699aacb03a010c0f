"""`paceline report RUN`: one self-contained HTML file about a run; `paceline plot RUN... [METRIC...]`: the curves of
runs as one page. Both work with or without a coordinator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline import __version__
from paceline.apps.reports.report_page import Block, RunCurves, curve_blocks, curves_page, page
from paceline.errors import InvalidInput, NotFound, counted
from paceline.services.cli import render
from paceline.services.cli.recorded.metrics import check_names, metric_rows, selected
from paceline.services.cli.recorded.source import Source, records_of_run, run_ids, source_options
from paceline.services.cli.render import FILE
from paceline.services.common.options import find_run, json_option

if TYPE_CHECKING:
    from paceline.records import Records

REPORT_NAME = "report.html"


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN... [METRIC]...")
@click.option("-o", "--out", type=FILE, help=f"File to write; default: {REPORT_NAME} in the first run's folder.")
@source_options
@json_option
def plot(runs: tuple[str, ...], out: Path | None, directory: Path, coordinator: str | None, as_json: bool) -> None:
    """Write an HTML page with a curve for each METRIC (reward, 'age/*'; default: all) of RUN (its id or its folder).
    Several runs are compared.

    The page is one file that needs no network. `paceline metrics --explain NAME` explains a metric.
    """
    from paceline.files.whole_file import write_whole

    names, metrics = _divided(runs, directory, coordinator)
    curves, folder = [], None
    for run in names:
        with records_of_run(run, directory, coordinator) as (source, run_id):
            facts = render.run_facts(source.get(run_id))
            curves.append(curves_of(source, run_id, facts["state"]))
        folder = folder or (Path.cwd() if coordinator else Path(facts["directory"]))
    assert folder is not None
    destination = out or folder / REPORT_NAME
    check_page_file(destination)
    recorded = [name for curve in curves for row in (*curve.steps, *curve.evaluations) for name in row]
    check_names(metrics, list(dict.fromkeys(recorded)), curves[0].run_id)
    shown = [
        curve._replace(steps=selected(curve.steps, metrics), evaluations=selected(curve.evaluations, metrics))
        for curve in curves
    ]
    write_whole(destination, curves_page(shown))
    render.answer(
        as_json,
        {"path": str(destination), "runs": [curve.run_id for curve in curves]},
        f"{destination}: the curves of {', '.join(curve.run_id for curve in curves)}",
    )


def check_page_file(path: Path) -> None:
    """Raise InvalidInput for a file named as a picture, NotFound if its folder does not exist."""
    if path.suffix in (".svg", ".png"):
        raise InvalidInput(f"{path} would be an HTML page; name a file that ends in .html with --out")
    if not path.parent.is_dir():
        raise NotFound(f"no folder {path.parent}; make it first, or name another file with --out")


def curves_of(source: Source, run_id: str, state: str) -> RunCurves:
    events = list(source.records.events(run_id, kinds=["step", "evaluation"]))
    return RunCurves(run_id, state, *(metric_rows(events, kind) for kind in ("step", "evaluation")))


def _divided(words: tuple[str, ...], directory: Path, coordinator: str | None) -> tuple[list[str], list[str]]:
    with records_of_run(words[0], directory, coordinator) as (source, _):
        ids = set(run_ids(source))
    runs = [word for word in words if word is words[0] or word in ids or find_run(word, directory)[1] != word]
    return runs, [word for word in words if word not in runs]


SHOWN = 6
"""Number of best completions of the last step that are shown, and number of worst completions."""

MAX_TEXT = 20_000
WARNINGS = 200


@click.command()
@click.argument("run")
@click.option(
    "-o",
    "--out",
    type=FILE,
    help=f"File to write; default: {REPORT_NAME} in the run's folder, or here with --coordinator.",
)
@click.option("--verify", "verifies", is_flag=True, help="Compare all records first, and include the result.")
@source_options
@json_option
def report(run: str, out: Path | None, verifies: bool, directory: Path, coordinator: str | None, as_json: bool) -> None:
    """Write one HTML file about RUN (its id or its folder): outcome, curves, samples, token accounting, checkpoints and
    spec.

    The file needs no network and runs no script except its own: text from models stays text.
    """
    from paceline.files.whole_file import write_whole

    with records_of_run(run, directory, coordinator) as (source, run_id):
        facts = render.run_facts(source.get(run_id))
        destination = out or (Path.cwd() if coordinator else Path(facts["directory"])) / REPORT_NAME
        check_page_file(destination)
        records = source.records
        blocks = [*_outcome(facts), *_books(records, run_id)]
        blocks += _verified(records.verify(run_id).problems) if verifies else []
        blocks += curve_blocks([curves_of(source, run_id, facts["state"])], tabled=True)
        blocks += [*_completions(_samples(source, run_id)), *_warnings(records, run_id)]
        blocks += [*_checkpoints(records, run_id), *_spec(records, run_id)]
    write_whole(destination, page(run_id, blocks))
    render.answer(as_json, {"path": str(destination), "run_id": run_id}, f"{destination}: {run_id}")


def _outcome(facts: dict[str, Any]) -> list[Block]:
    steps = f"{facts['state']} after {facts['step']:,} of {counted(facts['max_num_steps'], 'step')}."
    message = [["text", facts["message"], "message"]] if facts["message"] else []
    return [["heading", 1, facts["run_id"]], ["text", f"{steps} Report by Paceline {__version__}.", ""], *message]


def _books(records: Records, run_id: str) -> list[Block]:
    books = records.books(run_id)
    balance = (
        f"{books.generated:,} tokens generated = {books.trained:,} trained + {books.dropped:,} dropped + {books.live:,} live "
        f"({'balanced' if books.balanced else 'not balanced'}); {books.wasted:,} wasted."
    )
    dropped = [list(each) for each in sorted(books.dropped_by_reason.items())]
    table = ["table", "Dropped tokens by reason", ["dropped because", "tokens"], dropped]
    return [["text", balance, "good" if books.balanced else "message"], *([table] if dropped else [])]


def _verified(problems: Sequence[str]) -> list[Block]:
    if not problems:
        return [["text", "All records agree (paceline ledger verify).", "good"]]
    found = f"{counted(len(problems), 'problem')} (paceline ledger verify):"
    return [["text", found, "message"], ["list", [str(problem) for problem in problems]]]


def _completions(samples: Sequence[dict[str, Any]]) -> list[Block]:
    shown = [block for group in samples for block in _sample(group)]
    return [["heading", 2, "Best and worst completions of the last step"], *shown] if shown else []


def _sample(group: dict[str, Any]) -> list[Block]:
    completion, prompt = group["completion"], group["prompt"]
    if not isinstance(prompt, str):
        prompt = "\n".join(f"[{message.get('role')}] {message.get('content')}" for message in prompt)
    text = completion["text"]
    if "messages" in completion:
        text = json.dumps(completion["messages"], indent=1, ensure_ascii=False)
    rewards = ", ".join(f"{name} {_number(value)}" for name, value in completion["rewards"].items())
    title = (
        f"reward {_number(completion['reward'])} ({rewards}), {len(completion['token_ids'])} tokens, "
        f"{completion['finish_reason']}; group {group['group_id']} of step {group['step']}"
    )
    return [["heading", 3, title], ["long", "prompt", _cut(prompt)], ["long", "completion", _cut(text)]]


def _warnings(records: Records, run_id: str) -> list[Block]:
    warnings = [event.content.get("message", "") for event in records.events(run_id, kinds=["warning"])]
    return [["heading", 2, "Warnings"], ["list", warnings[-WARNINGS:]]] if warnings else []


def _checkpoints(records: Records, run_id: str) -> list[Block]:
    rows = [[str(each.step), str(each.session), each.path, each.sha256] for each in records.checkpoints(run_id)]
    columns = ["steps", "session", "folder", "SHA-256 of the manifest"]
    return [["heading", 2, "Checkpoints"], ["table", "Checkpoints", columns, rows]] if rows else []


def _spec(records: Records, run_id: str) -> list[Block]:
    title, columns = "Spec: differences from the defaults", ["key", "value", "default", "meaning"]
    keys = [key for key in records.spec(run_id) if key.differs]
    rows = [[key.path, key.value_json, key.default, key.description] for key in keys]
    differing: list[Block] = [["heading", 2, title], ["table", title, columns, rows]] if rows else []
    return [*differing, ["heading", 2, "Spec"], ["folded", "as YAML", records.spec_yaml(run_id)]]


def _samples(source: Source, run_id: str) -> list[dict[str, Any]]:
    """Return the best and the worst completions of the newest trained step, each as a separate group, if stored."""
    try:
        step = source.records.newest_trained_step(run_id)
        groups = list(source.records.sample_groups(run_id, full=True, from_step=step, to_step=step))
    except NotFound:
        return []
    found = [
        json.loads(group.json) | {"completion": completion}
        for group in groups
        if group.json
        for completion in json.loads(group.json)["completions"]
        if completion["reward"] is not None
    ]
    found.sort(key=lambda each: -each["completion"]["reward"])
    return found if len(found) <= 2 * SHOWN else found[:SHOWN] + found[-SHOWN:]


def _cut(text: str) -> str:
    left_out = f"\n… {len(text) - MAX_TEXT:,} more characters" if len(text) > MAX_TEXT else ""
    return text[:MAX_TEXT] + left_out


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
