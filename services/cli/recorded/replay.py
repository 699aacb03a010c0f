"""`paceline replay RUN --from STEP`: trains recorded steps without services, and compares with the run's weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from paceline.errors import Conflict, PacelineError
from paceline.services.cli import render
from paceline.services.cli.recorded.source import find_files, opened_ledger
from paceline.services.cli.render import PATH
from paceline.services.common.options import device_option, directory_option, json_option
from paceline.services.common.processes.starting import library_variables
from paceline.spec import RunSpec
from paceline.spec.reading import apply_override, parse_spec, spec_to_yaml

if TYPE_CHECKING:
    from paceline.services.replay.plan import ReplayPlan


@click.command()
@click.argument("run")
@click.argument("overrides", nargs=-1)
@click.option(
    "--from",
    "start",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="First step to train: 0, or a step with a checkpoint.",
)
@click.option(
    "--to",
    "end",
    type=click.IntRange(1),
    help="Step before which the replay ends. Default: it ends after the last trained step.",
)
@click.option("--output", type=PATH, help="New folder for the results.")
@click.option(
    "--ranks", type=click.IntRange(1, 4096), help="Number of the learner's ranks. Default: the recorded number."
)
@click.option(
    "--threads", type=click.IntRange(1, 4096), help="Compute threads of each rank. Default: the recorded number."
)
@device_option
@directory_option
@json_option
def replay(
    run: str,
    overrides: tuple[str, ...],
    start: int,
    end: int | None,
    output: Path | None,
    ranks: int | None,
    threads: int | None,
    device: str,
    directory: Path,
    as_json: bool,
) -> None:
    """Train steps of RUN (its id or its folder) again from its ledger and checkpoints, without any other service.

    The batches are the same; on CPUs the weights are the same too, bit for bit. Exit status 1 if the weights differ
    without a known reason. OVERRIDES such as loss_fn.ratio_clip_max=0.28 change the objective. The run itself is only
    read.
    """
    from paceline.services.replay.plan import plan_replay, recorded_losses

    path, run_id = find_files(run, directory)
    with opened_ledger(path) as opened:
        plan = plan_replay(opened, run_id, start, end)
        recorded = recorded_losses(opened, run_id)
    for warning in plan.warnings:
        click.echo(f"warning: {warning}", err=True)
    spec = overridden(plan.spec, overrides)
    output = output or path.resolve().parent / run_id / f"replay-{plan.start}-{plan.end}"
    if output.exists():
        raise Conflict(f"{output} exists; name another folder with --output")
    output.mkdir(parents=True)
    (output / "spec.yaml").write_text(spec_to_yaml(spec))
    ranks, threads = ranks or plan.ranks, threads or plan.threads
    options = [
        *("--ledger", str(path.resolve()), "--run-id", run_id, "--spec", str(output / "spec.yaml")),
        *("--from", str(plan.start), "--to", str(plan.end), "--output", str(output), "--device", device),
    ]
    lines = _lines(_command(ranks), options, threads)
    saved, equal_losses = _written(lines, output / "metrics.jsonl", recorded, quiet=as_json)
    facts = {
        "run_id": run_id,
        "from": plan.start,
        "to": plan.end,
        "ranks": ranks,
        "threads": threads,
        "overrides": list(overrides),
        "equal_losses": equal_losses,
        "checkpoint": saved["checkpoint"],
        **_compared(plan, saved),
    }
    render.answer(as_json, facts, _sentence(facts, plan))
    if facts["identical"] is False and not overrides and ranks == plan.ranks and plan.steady:
        raise click.exceptions.Exit(1)


def overridden(spec: RunSpec, overrides: tuple[str, ...]) -> RunSpec:
    """Return `spec` with overrides. Raises SpecError; Conflict for an override that would change the recorded batches."""
    tree = yaml.safe_load(spec_to_yaml(spec))
    for override in overrides:
        if override.startswith(("data.", "rewards", "algorithm", "grpo.num_")):
            raise Conflict(
                f"{override!r} would change the batches, which are recorded; override only settings of training"
            )
        apply_override(tree, override)
    return parse_spec(tree)


def _command(ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable, "-m", "paceline.services.replay.rank"]
    return [
        sys.executable,
        "-m",
        "paceline.services.learner.launcher",
        str(ranks),
        "10",
        "paceline.services.replay.rank",
    ]


def _lines(command: list[str], options: list[str], threads: int) -> Iterator[dict[str, Any]]:
    """Yield the objects that rank 0 prints; pass other lines on to stderr. Raises PacelineError if the ranks fail."""
    environment = os.environ | library_variables() | {"OMP_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1"}
    with subprocess.Popen(
        [*command, *options], env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
                else:
                    click.echo(line, err=True, nl=False)
        finally:
            if process.poll() is None:
                process.terminate()
    if process.returncode:
        raise PacelineError(f"the replay ended with exit status {process.returncode}; the reason is above")


def _written(
    lines: Iterator[dict[str, Any]], path: Path, recorded: Mapping[int, float], *, quiet: bool
) -> tuple[dict[str, Any], int]:
    """Write and print each step's metrics; return the checkpoint's line and how many losses equal the recorded ones."""
    saved: dict[str, Any] = {}
    equal_losses = 0
    with path.open("w") as metrics:
        for line in lines:
            if "checkpoint" in line:
                saved = line
                continue
            metrics.write(json.dumps(line) + "\n")
            before = recorded.get(line["step"])
            equal_losses += line["loss"] == before
            if not quiet:
                was = "" if before is None else f"  recorded {before:.6g}"
                norm = line["grad_norm"]
                click.echo(f"step {line['step']:>4}  loss {line['loss']:.6g}{was}  gradient norm {norm:.4g}")
    return saved, equal_losses


def _compared(plan: ReplayPlan, saved: dict[str, Any]) -> dict[str, Any]:
    if plan.expected is None:
        return {"compared_with": None, "identical": None, "different_tensors": [], "largest_difference": None}
    from paceline.learner.checkpoints.export import checkpoint_weights, compare_weights

    policy, scoring = plan.spec.policy, plan.spec.has_scoring_head
    reached = checkpoint_weights(saved["checkpoint"], saved["sha256"], policy, scoring=scoring)
    expected = checkpoint_weights(plan.expected.path, plan.expected.sha256, policy, scoring=scoring)
    names, largest = compare_weights(reached, expected)
    return {
        "compared_with": plan.expected.path,
        "identical": not names,
        "different_tensors": names,
        "largest_difference": largest,
    }


def _sentence(facts: dict[str, Any], plan: ReplayPlan) -> str:
    steps = f"steps {facts['from']} to {facts['to'] - 1} of {facts['run_id']} replayed; {facts['checkpoint']}"
    if facts["identical"] is None:
        return f"{steps}\nthe run has no checkpoint after {facts['to']} steps to compare with"
    if facts["identical"]:
        return f"{steps}\nthe weights are bit-identical to {facts['compared_with']}"
    why = "" if plan.steady else " (the run changed its number of ranks during these steps)"
    return (
        f"{steps}\nthe weights differ from {facts['compared_with']} in {len(facts['different_tensors'])} tensors, "
        f"by at most {facts['largest_difference']:.3g}{why}"
    )
