"""The command line. Help is instant and imports neither torch nor gRPC, because a command's module is imported when it
runs. A user's mistake is one line on stderr with exit status 1, never a traceback."""

from __future__ import annotations

import functools

import click

from paceline import __version__
from paceline.host.process import end_with, keep_no_core
from paceline.services.cli.lazy import LazyGroup, Sections


def _in(module: str, **summaries: str) -> dict[str, tuple[str, str]]:
    return {name: (f"paceline.services.cli.{module}:{name}", line) for name, line in summaries.items()}


SECTIONS: Sections = {
    "Begin": {
        **_in("doctor", doctor="Check this machine: what is missing and how to get it."),
        "demo": (
            "paceline.services.demo.run:main",
            "Train a small model on this machine with all services, in a few minutes.",
        ),
        **_in("running.up", up="Start all services on this host, submit a spec and watch it."),
    },
    "Train SPEC, on this host or at a coordinator": _in(
        "running.train",
        grpo="Learn from rollouts and rewards.",
        sft="Imitate a data set's completions.",
        dpo="Prefer chosen completions to rejected ones.",
        kto="Learn from good and bad completions.",
        orpo="Imitate chosen completions and prefer them to rejected ones, without a reference.",
        rm="Train a reward model from pairs.",
        distillation="Learn from rollouts and a teacher.",
        offline_grpo="Learn from recorded completions with rewards.",
    ),
    "Before a run": _in("spec", spec="Check a spec and print it resolved, or explain its keys.")
    | _in("data", data="Show the data of a spec (counts, lengths, samples, overlap), or prepare them."),
    "Runs and workers": _in(
        "running.runs",
        submit="Queue a run from a spec.",
        status="Show which pool limits the run that trains, and what would help.",
        runs="List the runs.",
        watch="Follow a run until it ends.",
        cancel="End a run.",
        pause="Pause a run.",
        resume="Continue a paused run, or queue a paused or failed run again.",
        drop="Drop groups from the batch that a paused run is to train next.",
        checkpoint="Write a checkpoint of the run that trains.",
        members="List the workers.",
        drain="Let a worker finish its work and leave.",
    )
    | _in("chat", generate="Sample completions of a prompt from the newest weights."),
    "Records of runs": {
        **_in(
            "recorded.samples",
            samples="Show the completions of a step or an evaluation with their rewards, or export all.",
        ),
        **_in("recorded.metrics", metrics="Show or export the metrics of a run."),
        **_in("recorded.records", ledger="Verify, back up or encrypt the record of every group."),
        **_in(
            "recorded.replay",
            replay="Train recorded steps of a run again, without the services, and compare the weights.",
        ),
    },
    "Models": {
        **_in("recorded.records", export="Write a Hugging Face model folder from a run's newest checkpoint."),
        **_in("convert", convert="Convert weights: model folders, checkpoints of torch, other types, merged adapters."),
        **_in("chat", chat="Chat with a trained model in this process, without services."),
    },
    "Services and access": {
        **_in("main", serve="Run one service: coordinator, rollout, reward, environment, learner, model or dashboard."),
        **_in("certs", certs="Make or revoke certificates of processes and people, by your own authority."),
        **_in("token", token="Make, list and revoke tokens with a role."),
        **_in("recorded.audit", audit="Show or verify the log of changes and refused calls."),
    },
}
"""The core's commands under the headings of `paceline --help`: module and attribute, and one line of help."""


@click.group(
    cls=LazyGroup, sections=SECTIONS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="paceline")
def main() -> None:
    """Asynchronous, off-policy GRPO as plain services: kill any of them, add any, at any time.

    Start with `paceline doctor` and `paceline demo`; your own run is `paceline up spec.yaml`.
    """
    keep_no_core()


console = functools.partial(end_with, main)


SERVICES = {
    role: (f"paceline.services.{role.replace('-', '_')}.main:main", line)
    for role, line in {
        "coordinator": "Runs, members, the exchange and the ledger; start this service first.",
        "rollout": "A rollout worker: generates completions.",
        "reward": "A reward worker: scores completions.",
        "environment": "An environment worker: runs episodes of several turns.",
        "learner": "The learner: trains and publishes weights.",
        "host-agent": "The relay that brings weights to the workers of a host. Workers start one if there is none.",
    }.items()
}


@click.group(cls=LazyGroup, sections={"Commands": SERVICES})
def serve() -> None:
    """Run one service in the foreground. Workers find each other through the coordinator."""
