"""`paceline status`: which pool limits the run that trains, by how much, what to change, and what it would bring."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from paceline.client import Client
from paceline.services.cli import render
from paceline.services.common.options import coordinator_option, json_option, print_json

if TYPE_CHECKING:
    from paceline.v1.status_pb2 import PoolStatus, StatusResponse

COLUMNS = (
    "pool",
    "ready",
    "starting",
    "wanted",
    "needed",
    "groups/s each",
    "groups/s asked",
    "room taken",
    "scaled",
)


@click.command()
@coordinator_option
@json_option
def status(coordinator: str, as_json: bool) -> None:
    """Say in words which pool limits the run that trains, by how much, what to change, and what it would bring.

    `wanted` is the size that a scaler is told, `needed` what keeps the learner fed with a tenth to spare.
    """
    with Client(coordinator) as client:
        response = client.status()
    if as_json:
        print_json(status_facts(response))
        return
    if response.run_id:
        click.echo(
            f"{response.run_id} is {response.state}, step {response.step} of {response.max_num_steps}"
            + (f"; {response.queued_runs} more wait" if response.queued_runs else "")
        )
    click.echo(response.advice)
    if response.insecurity:
        click.echo(response.insecurity)
    if response.pools:
        render.print_table(COLUMNS, [_row(pool) for pool in response.pools], empty="")


def status_facts(response: StatusResponse) -> render.Facts:
    """Return the facts of a status."""
    return {
        "run_id": response.run_id,
        "state": response.state,
        "step": response.step,
        "max_num_steps": response.max_num_steps,
        "queued_runs": response.queued_runs,
        "advice": response.advice,
        "insecurity": response.insecurity,
        "learner_wait_fraction": response.learner_wait_fraction,
        "pools": [
            {
                "name": pool.name,
                "ready": pool.ready,
                "starting": pool.starting,
                "desired": pool.desired,
                "need": pool.need,
                "rate": pool.rate,
                "demand": pool.demand,
                "occupied": pool.occupied,
                "is_scaled": pool.is_scaled,
                "cost_per_hour": pool.cost_per_hour,
            }
            for pool in response.pools
        ],
    }


def _row(pool: PoolStatus) -> list[str]:
    unknown = "-"
    return [
        pool.name,
        str(pool.ready),
        str(pool.starting),
        str(pool.desired),
        f"{pool.need:.1f}" if pool.need else unknown,
        f"{pool.rate:.2f}" if pool.rate else unknown,
        f"{pool.demand:.2f}" if pool.demand else unknown,
        f"{pool.occupied:.0%}",
        "yes" if pool.is_scaled else "no",
    ]
