"""`paceline demo`: makes the files, starts the services, trains twice, and reports the result."""

from __future__ import annotations

import fcntl
import json
import math
import shutil
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Any

import click

from paceline.client import Client, Event
from paceline.errors import PacelineError
from paceline.services.common.options import linux_only
from paceline.services.common.reporting.terminal import chart, sparkline
from paceline.services.demo.task import write_data
from paceline.services.local.cluster import LocalCluster, start_page
from paceline.spec import RunSpec
from paceline.spec.reading import load_spec

FILES = "demo-files"
STEPS_A_LINE, EXAMPLE_STEPS_A_LINE = 10, 100
"""Steps per printed line of a run with rollouts, and of a run on examples."""


@click.command()
@click.argument("overrides", nargs=-1)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder for the ledger and the runs.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the model, the data and the two runs of the demo.")
@click.option("--json", "as_json", is_flag=True, help="Print only one JSON object at the end.")
@linux_only
def main(overrides: tuple[str, ...], directory: Path, seed: int, as_json: bool) -> None:
    """Train a small model on this machine with all services, in a few minutes.

    OVERRIDES change the GRPO run, for example async_grpo.max_trajectory_age_steps=0.
    """
    screen = Screen(quiet=as_json)
    try:
        summary = run_demo(_free(directory), overrides, seed, screen)
    except PacelineError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(summary))
    else:
        screen.conclude(summary)
    sys.exit(0 if summary["state"] == "succeeded" else 1)


def run_demo(directory: Path, overrides: tuple[str, ...], seed: int, screen: Screen) -> dict[str, Any]:
    """Run both stages; return the GRPO run's summary with the seconds of the whole demo. Raises PacelineError."""
    started_s = time.monotonic()
    screen.say("Making a two-layer model, a character tokenizer and 10,000 additions …")
    files = make_files(directory / FILES, seed)
    sft = load_spec(files / "sft.yaml", [f"sft.seed={seed}"])
    with (
        LocalCluster(directory, sft.cluster, say=screen.say) as cluster,
        Client(cluster.address, wait_s=math.inf, reconnect_s=math.inf) as client,
    ):
        pools = f"{sft.cluster.rollout_workers} rollout, {sft.cluster.reward_workers} reward, {sft.cluster.learner_ranks} learner ranks"
        screen.say(f"Services are up: coordinator at {cluster.address}, {pools}; logs in {directory / 'logs'}")
        start_page(cluster, "127.0.0.1", screen.say)
        teacher = _train(client, sft, "Stage 1, supervised: imitate a teacher who errs in half of the answers", screen)
        model = f"policy.model_name={Path(teacher['directory']) / 'export'}"
        grpo = load_spec(files / "grpo.yaml", (f"grpo.seed={seed}", model, *overrides))
        age = grpo.async_grpo.max_trajectory_age_steps
        title = f"Stage 2, asynchronous GRPO: age up to {age} steps, {grpo.async_grpo.order}"
        summary = _train(client, grpo, title, screen)
    return summary | {"demo_seconds": round(time.monotonic() - started_s, 1)}


def make_files(directory: Path, seed: int) -> Path:
    """Return the folder of this seed with model, data and specs of the demo; make what is missing."""
    made = directory / f"seed-{seed}"
    if made.is_dir():
        return made
    from paceline.services.demo.task import make_model

    partial = directory / f".seed-{seed}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    write_data(partial / "data", seed)
    make_model(partial / "model", seed=seed)
    for name in ("sft.yaml", "grpo.yaml"):
        (partial / name).write_text(resources.files("paceline.services.demo").joinpath(name).read_text())
    partial.rename(made)
    return made


def _train(client: Client, spec: RunSpec, title: str, screen: Screen) -> dict[str, Any]:
    """Submit a run, follow it to the end, and return its summary.json. Raises PacelineError if the run did not succeed."""
    run = client.submit(spec)
    screen.begin(title, spec)
    for event in client.watch(run.run_id):
        screen.show(event)
    screen.end()
    summary: dict[str, Any] = json.loads((Path(run.directory) / "summary.json").read_text())
    if summary["state"] != "succeeded":
        raise PacelineError(
            f"run {run.run_id} {summary['state']}: {summary['message']}; logs are in {run.directory}/logs"
        )
    return summary | {"directory": run.directory}


def _free(directory: Path) -> Path:
    directory = directory.resolve()
    lock = directory / "ledger.sqlite.lock"
    if lock.exists():
        with lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return directory / f"demo-{int(time.time())}"
    return directory


class Screen:
    """Output of the demo: a live chart on a terminal, plain lines otherwise."""

    def __init__(self, *, quiet: bool):
        self._quiet = quiet
        self._live: Any = None
        self._values: list[float] = []
        self._spec: RunSpec | None = None
        self._started_s = time.monotonic()

    def say(self, line: str) -> None:
        if not self._quiet:
            click.echo(f"[{time.monotonic() - self._started_s:5.1f} s] {line}")

    def begin(self, title: str, spec: RunSpec) -> None:
        self.say(title)
        self._spec, self._values = spec, []
        if sys.stdout.isatty() and not self._quiet:
            from rich.live import Live

            self._live = Live(refresh_per_second=4, transient=True)
            self._live.start()

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, event: Event) -> None:
        assert self._spec is not None
        content = event.content
        if event.kind == "step":
            self._show_step(int(content["step"]) + 1, content)
        elif event.kind == "evaluation":
            self.say(
                f"  held-out problems, version {content['step']}: {content['reward']:.1%} right "
                f"({content['samples']} sampled at temperature 1)"
            )
        elif event.kind == "warning" or (event.kind == "member" and "left" in str(content.get("what"))):
            kind = "warning: " if event.kind == "warning" else ""
            self.say(f"  {kind}{content.get('message') or ' '.join(map(str, content.values()))}")
        elif event.kind == "state" and content.get("message"):
            self.say(f"  {content['state']}: {content['message']}")

    def conclude(self, summary: dict[str, Any]) -> None:
        books = {name: summary[f"{name}_tokens"] for name in ("generated", "trained", "dropped", "live")}
        if self._values:
            click.echo("\nReward of the training batches:\n" + chart(self._values) + "\n")
        click.echo(
            f"Held-out problems right: {summary['reward_before']:.1%} before, {summary['reward_after']:.1%} after "
            f"{summary['steps']} steps and {summary['samples']:,} samples.\n"
            f"Token accounting: {books['generated']:,} tokens generated = {books['trained']:,} trained + "
            f"{books['dropped']:,} dropped + {books['live']:,} live.\n"
            f"Run directory: {summary['directory']}   (metrics.jsonl, summary.json, checkpoints/, logs/)\n"
            f"Model for transformers: {summary['export_path']}\n"
            f"The whole demo took {summary['demo_seconds']:.0f} s."
        )

    def _show_step(self, step: int, metrics: dict[str, Any]) -> None:
        assert self._spec is not None
        steps_a_line = STEPS_A_LINE if self._spec.samples else EXAMPLE_STEPS_A_LINE
        value = metrics.get("reward" if self._spec.samples else "loss")
        if self._spec.samples and value is not None:
            self._values.append(value)
        if not self._spec.samples:
            line = f"  step {step:4d}/{self._spec.max_num_steps}  loss {value:.3f}"
        else:
            line = (
                f"  step {step:4d}/{self._spec.max_num_steps}  reward {value:.3f}  "
                f"age {metrics.get('age', 0):.1f}  ratio {metrics.get('ratio_behaviour', 1):.4f}  "
                f"wait {metrics.get('learner_wait_s', 0):.2f} s"
            )
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(line + ("\n" + chart(self._values) if self._values else "")))
        elif step % steps_a_line == 0 or step == self._spec.max_num_steps:
            self.say(line + (f"  {sparkline(self._values, 24)}" if self._values else ""))


if __name__ == "__main__":
    main()
