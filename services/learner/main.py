"""The learner service: `paceline serve learner` (also `paceline-learner`) starts its ranks. A single rank runs in this
process; several ranks are its children, and all ranks end if one dies (`services/learner/launcher.py`). The starter
then starts the service again, and a new session begins from the newest checkpoint. On several hosts each runs this
service with the same --nodes (`services/learner/nodes/launcher.py`). `services/learner/rank.py` is a rank,
`services/learner/training/run.py` its work on one run."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import click

from paceline.errors import PacelineError
from paceline.services.common.access.insecure import check_coordinator
from paceline.services.common.options import SECONDS, device_option, linux_only, token_file_option, worker_options
from paceline.services.common.processes.starting import die_with_starter, set_library_variables
from paceline.services.common.relay import fabric_option, zone_option
from paceline.services.learner.launcher import end_as, run_ranks
from paceline.services.learner.nodes.settings import is_rank, node_settings, ranks_of_node


@click.command(context_settings={"show_default": True})
@worker_options(
    "learner",
    grace="Seconds for the last checkpoint at SIGTERM.",
    host="Address to listen on, for gRPC and for this host's relay.",
    port="gRPC port of rank 0",
)
@device_option
@fabric_option
@zone_option
@click.option(
    "--ranks", type=click.IntRange(1, 4096), help="Ranks to start on this host. Default: PET_NPROC_PER_NODE, else 1."
)
@click.option(
    "--nodes",
    default="",
    metavar="N|MIN:MAX",
    help="Hosts of this learner. Default: from torchrun's, LeaderWorkerSet's or Slurm's variables, else 1.",
)
@click.option(
    "--node-rank", type=click.IntRange(0, 1 << 20), help="Position of this host among the learner's hosts, from 0."
)
@click.option(
    "--rendezvous",
    default="",
    metavar="HOST:PORT",
    callback=check_coordinator,
    help="Address on node 0's --host where node 0 waits for the other nodes.",
)
@click.option(
    "--node-wait",
    "node_wait_s",
    type=SECONDS,
    default=600.0,
    show_default=True,
    help="Seconds to wait for the other nodes.",
)
@token_file_option
@linux_only
def main(
    coordinator: str,
    host: str,
    advertise_host: str,
    fabric: str,
    port: int,
    name: str,
    ranks: int | None,
    nodes: str,
    node_rank: int | None,
    rendezvous: str,
    node_wait_s: float,
    device: str,
    grace_s: float,
    metrics_port: int | None,
    ready_file: Path | None,
) -> None:
    """The learner: trains on batches and publishes weights."""
    set_library_variables()
    options = [
        *("--coordinator", coordinator, "--host", host, "--port", str(port), "--name", name),
        *("--device", device, "--grace", str(grace_s), "--advertise-host", advertise_host),
        *("--fabric", fabric),
        *(("--ready-file", str(ready_file)) if ready_file is not None else ()),
        *(("--metrics-port", str(metrics_port)) if metrics_port is not None else ()),
    ]
    try:
        num_ranks = ranks or (1 if is_rank(os.environ) else ranks_of_node(os.environ))
        settings = node_settings(nodes, node_rank, rendezvous, os.environ, socket.getfqdn())
    except PacelineError as error:
        raise click.UsageError(str(error)) from None
    if settings is None and (is_rank(os.environ) or num_ranks == 1):
        from paceline.services.learner.rank import main as rank_main

        rank_main(options, standalone_mode=False)
        return
    die_with_starter()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if settings is None:
        end_as(run_ranks("paceline.services.learner.rank", options, num_ranks, grace_s))
        return
    from paceline.services.learner.nodes.launcher import NodeLauncher, Rendezvous  # imports torch

    try:
        meeting = Rendezvous(settings, num_ranks, host, node_wait_s)
        node = NodeLauncher(settings, meeting, "paceline.services.learner.rank", options)
        end_as(node.run(num_ranks, grace_s))
    except PacelineError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
