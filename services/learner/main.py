"""The learner service: `paceline serve learner` (also `paceline-learner`) starts its ranks.

One rank runs in this process; several are its children, all of which end when one dies (`services/learner/launcher.py`). The
starter of the service then starts it again, and a new session begins from the newest checkpoint. `services/learner/rank.py` is a
rank, `services/learner/training/run.py` its work on one run.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import click

from services.common.options import device_option, token_file_option, worker_options
from services.common.processes.parent_death import die_with_starter
from services.common.processes.quiet_torch import QUIET_TORCH
from services.learner.launcher import end_as, run_ranks


@click.command(context_settings={"show_default": True})
@worker_options(
    "learner",
    grace="Seconds for the last checkpoint at SIGTERM.",
    host="Address to listen on, for gRPC and for weight links.",
    port="gRPC port of rank 0",
)
@device_option
@click.option("--ranks", default=1, help="Ranks to start on this host.")
@token_file_option
def main(
    coordinator: str,
    host: str,
    advertise_host: str,
    port: int,
    name: str,
    ranks: int,
    device: str,
    grace_s: float,
    ready_file: Path | None,
) -> None:
    """The learner: trains on batches and publishes weights."""
    os.environ.setdefault(*QUIET_TORCH)
    options = [
        *("--coordinator", coordinator, "--host", host, "--port", str(port), "--name", name),
        *("--device", device, "--grace", str(grace_s), "--advertise-host", advertise_host),
        *(("--ready-file", str(ready_file)) if ready_file is not None else ()),
    ]
    if "RANK" in os.environ or ranks == 1:
        from services.learner.rank import main as rank_main

        rank_main(options, standalone_mode=False)
        return
    die_with_starter()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    end_as(run_ranks("services.learner.rank", options, ranks, grace_s))


if __name__ == "__main__":
    main()
