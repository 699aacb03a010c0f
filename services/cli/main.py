"""The command line. `paceline --help` lists the commands, and each command's module is imported when it runs.

Promise: help is instant and imports neither torch nor gRPC, and a user's mistake is one line on stderr with exit status
1, never a traceback.
"""

from __future__ import annotations

import click

from paceline import __version__
from services.cli.lazy import LazyGroup

COMMANDS = {
    "demo": (
        "services.demo.run:main",
        "Train a small model on this machine with all services, in a few minutes.",
    ),
    "up": ("services.cli.running.up:up", "Start all services on this host, submit a spec and watch it."),
    **{
        name: (f"services.cli.running.train:{name}", f"Train SPEC, here or at a coordinator: {what}.")
        for name, what in {
            "grpo": "from rollouts and rewards",
            "sft": "imitate a data set's completions",
            "dpo": "prefer chosen completions to rejected ones",
            "kto": "from good and bad completions",
            "orpo": "imitate and prefer at once, without a reference",
            "rm": "a reward model from pairs",
            "distillation": "from rollouts and a teacher",
            "offline_grpo": "from recorded completions with rewards",
        }.items()
    },
    "spec": ("services.cli.spec:spec", "Check a spec and print it resolved, or explain its keys."),
    "plan": ("services.cli.plan:plan", "Estimate the memory that a spec takes, and say whether it fits."),
    "import": (
        "services.cli.imports:import_spec",
        "Write a spec from a configuration of TRL, NeMo RL, verl or prime-rl.",
    ),
    "data": ("services.cli.data:data", "Show the data of a spec: counts, lengths, samples, overlap."),
    "sweep": (
        "services.cli.sweeping.sweep:sweep",
        "Search over keys of a spec, by runs one after the other.",
    ),
    "submit": ("services.cli.running.runs:submit", "Queue a run from a spec."),
    "status": (
        "services.cli.running.status:status",
        "Say what limits the run that trains, and what would help.",
    ),
    "runs": ("services.cli.running.runs:runs", "List the runs."),
    "watch": ("services.cli.running.runs:watch", "Follow a run until it ends."),
    "cancel": ("services.cli.running.runs:cancel", "End a run."),
    "pause": ("services.cli.running.runs:pause", "Pause a run."),
    "resume": ("services.cli.running.runs:resume", "Go on with a run that is paused."),
    "drop": (
        "services.cli.running.runs:drop",
        "Take groups out of the batch that a paused run is to train next.",
    ),
    "checkpoint": ("services.cli.running.runs:checkpoint", "Write a checkpoint of the run that trains."),
    "members": ("services.cli.workers:members", "List the workers."),
    "drain": ("services.cli.workers:drain", "Tell a worker to finish its work and leave."),
    "generate": ("services.cli.workers:generate", "Ask the newest weights for completions of a prompt."),
    "chat": ("services.cli.chat:chat", "Talk to a trained model in this process, without services."),
    "eval": (
        "services.cli.evaluating.evaluate:evaluate",
        "Measure a model on the validation set of a file, without a run.",
    ),
    "gate": (
        "services.cli.evaluating.gate:gate",
        "Say whether a model may take the place of another, by two evaluations.",
    ),
    "samples": (
        "services.cli.recorded.samples:samples",
        "Show the completions of a step or an evaluation with their rewards, or export all.",
    ),
    "traces": (
        "services.cli.recorded.traces:traces",
        "Write what a run has sampled as traces, or make preference pairs of traces.",
    ),
    "metrics": ("services.cli.recorded.metrics:metrics", "Show or export the metrics of a run."),
    "plot": ("services.cli.recorded.plot:plot", "Write the curves of runs as an HTML page, SVG or PNG."),
    "report": (
        "services.cli.recorded.report:report",
        "Write one HTML file about a run: outcome, curves, samples, books, spec.",
    ),
    "track": (
        "services.cli.recorded.track:track",
        "Send runs to Weights & Biases, trackio, MLflow or TensorBoard.",
    ),
    "ledger": ("services.cli.recorded.records:ledger", "Verify or back up the record of every group."),
    "export": (
        "services.cli.recorded.records:export",
        "Write a Hugging Face model folder from a run's newest checkpoint.",
    ),
    "replay": (
        "services.cli.recorded.replay:replay",
        "Train recorded steps of a run again, without the services, and compare the weights.",
    ),
    "serve": (
        "services.cli.serve:serve",
        "Run one service: coordinator, rollout, reward, environment, learner or dashboard.",
    ),
    "certs": (
        "services.cli.certs:certs",
        "Make a certificate authority and the short-lived certificates of processes and people.",
    ),
    "token": ("services.cli.token:token", "Make, list and revoke tokens with a role."),
    "doctor": ("services.cli.doctor:doctor", "Check this machine: what is missing and how to get it."),
}


@click.group(
    cls=LazyGroup,
    entries=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="paceline")
def main() -> None:
    """Asynchronous, off-policy GRPO as plain services: kill any of them, add any, at any time.

    Start with `paceline doctor` and `paceline demo`; your own run is `paceline up spec.yaml`.
    """
