"""The command line. `paceline --help` lists the commands, and each command's module is imported when it runs.

Promise: help is instant and imports neither torch nor gRPC, and a user's mistake is one line on stderr with exit status
1, never a traceback.
"""

from __future__ import annotations

import click

from paceline import __version__
from paceline.host.process import keep_no_core
from paceline.services.cli.lazy import LazyGroup

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Begin": {
        "doctor": (
            "paceline.services.cli.doctor:doctor",
            "Check this machine: what is missing and how to get it.",
        ),
        "demo": (
            "paceline.services.demo.run:main",
            "Train a small model on this machine with all services, in a few minutes.",
        ),
        "up": (
            "paceline.services.cli.running.up:up",
            "Start all services on this host, submit a spec and watch it.",
        ),
    },
    "Train SPEC, here or at a coordinator": {
        name: (f"paceline.services.cli.running.train:{name}", summary)
        for name, summary in {
            "grpo": "From rollouts and rewards.",
            "sft": "Imitate a data set's completions.",
            "dpo": "Prefer chosen completions to rejected ones.",
            "kto": "From good and bad completions.",
            "orpo": "Imitate and prefer at once, without a reference.",
            "rm": "A reward model from pairs.",
            "distillation": "From rollouts and a teacher.",
            "offline_grpo": "From recorded completions with rewards.",
        }.items()
    },
    "Before a run": {
        "spec": (
            "paceline.services.cli.spec:spec",
            "Check a spec and print it resolved, or explain its keys.",
        ),
        "data": (
            "paceline.services.cli.data:data",
            "Show the data of a spec (counts, lengths, samples, overlap), or prepare them.",
        ),
    },
    "Runs and workers": {
        "submit": ("paceline.services.cli.running.runs:submit", "Queue a run from a spec."),
        "status": (
            "paceline.services.cli.running.status:status",
            "Say what limits the run that trains, and what would help.",
        ),
        "runs": ("paceline.services.cli.running.runs:runs", "List the runs."),
        "watch": ("paceline.services.cli.running.runs:watch", "Follow a run until it ends."),
        "cancel": ("paceline.services.cli.running.runs:cancel", "End a run."),
        "pause": ("paceline.services.cli.running.runs:pause", "Pause a run."),
        "resume": ("paceline.services.cli.running.runs:resume", "Go on with a run that is paused."),
        "drop": (
            "paceline.services.cli.running.runs:drop",
            "Take groups out of the batch that a paused run is to train next.",
        ),
        "checkpoint": (
            "paceline.services.cli.running.runs:checkpoint",
            "Write a checkpoint of the run that trains.",
        ),
        "members": ("paceline.services.cli.workers:members", "List the workers."),
        "drain": ("paceline.services.cli.workers:drain", "Tell a worker to finish its work and leave."),
        "generate": (
            "paceline.services.cli.workers:generate",
            "Ask the newest weights for completions of a prompt.",
        ),
    },
    "What is on record": {
        "samples": (
            "paceline.services.cli.recorded.samples:samples",
            "Show the completions of a step or an evaluation with their rewards, or export all.",
        ),
        "metrics": ("paceline.services.cli.recorded.metrics:metrics", "Show or export the metrics of a run."),
        "ledger": (
            "paceline.services.cli.recorded.records:ledger",
            "Verify, back up or encrypt the record of every group.",
        ),
        "replay": (
            "paceline.services.cli.recorded.replay:replay",
            "Train recorded steps of a run again, without the services, and compare the weights.",
        ),
    },
    "Models": {
        "export": (
            "paceline.services.cli.recorded.records:export",
            "Write a Hugging Face model folder from a run's newest checkpoint.",
        ),
        "convert": (
            "paceline.services.cli.convert:convert",
            "Convert weights: model folders, checkpoints of torch, other types, merged adapters.",
        ),
        "chat": (
            "paceline.services.cli.chat:chat",
            "Talk to a trained model in this process, without services.",
        ),
    },
    "Services, and who may use them": {
        "serve": (
            "paceline.services.cli.serve:serve",
            "Run one service: coordinator, rollout, reward, environment, learner, model or dashboard.",
        ),
        "certs": (
            "paceline.services.cli.certs:certs",
            "Make or revoke the certificates of processes and people, by an authority of your own.",
        ),
        "token": ("paceline.services.cli.token:token", "Make, list and revoke tokens with a role."),
        "audit": (
            "paceline.services.cli.recorded.audit:audit",
            "Show or verify who changed something and who was refused.",
        ),
    },
}
"""The core's commands under the headings of `paceline --help`: module and attribute, and one line of help."""


@click.group(
    cls=LazyGroup,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="paceline")
def main() -> None:
    """Asynchronous, off-policy GRPO as plain services: kill any of them, add any, at any time.

    Start with `paceline doctor` and `paceline demo`; your own run is `paceline up spec.yaml`.
    """
    keep_no_core()
