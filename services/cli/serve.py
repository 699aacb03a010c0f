"""`paceline serve ROLE`: run the service's own command, with its options and help."""

from __future__ import annotations

import click

from paceline.services.cli.lazy import LazyGroup

SERVICES = {
    "coordinator": (
        "paceline.services.coordinator.main:main",
        "Runs, members, the exchange and the ledger; start this first.",
    ),
    "rollout": ("paceline.services.rollout.main:main", "A rollout worker: generates completions."),
    "reward": ("paceline.services.reward.main:main", "A reward worker: scores completions."),
    "environment": (
        "paceline.services.environment.main:main",
        "An environment worker: runs episodes of several turns.",
    ),
    "learner": ("paceline.services.learner.main:main", "The learner: trains and publishes weights."),
    "host-agent": (
        "paceline.services.host_agent.main:main",
        "The agent that brings weights to a host's workers; they start one by themselves.",
    ),
}


@click.group(cls=LazyGroup, sections={"Commands": SERVICES})
def serve() -> None:
    """Run one service in the foreground. Workers find each other through the coordinator."""
