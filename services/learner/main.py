"""The learner service: `paceline serve learner` (also `paceline-learner`) starts its ranks.

One rank runs in this process; more are its children, all of which end when one dies (`services/learner/launcher.py`). Who started
the service then starts it again, and a new session begins from the newest checkpoint. `services/learner/rank.py` is a
rank, `services/learner/run.py` its work on one run.
"""

from __future__ import annotations

import logging
import os

import click

from services.common.options import token_file_option
from services.common.processes.parent_death import die_with_starter
from services.learner.launcher import end_as, run_ranks


@click.command(context_settings={"show_default": True})
@click.option("--coordinator", default="127.0.0.1:7070", help="Address of the coordinator.")
@click.option("--host", default="127.0.0.1", help="Address to listen on, for gRPC and for weight links.")
@click.option("--advertise-host", default="", help="This machine's address for the others; default --host.")
@click.option("--port", default=0, help="gRPC port of rank 0; 0 takes a free one.")
@click.option("--name", default="learner", help="A word for people; the member id is made from it.")
@click.option("--ranks", default=1, help="Ranks to start on this host.")
@click.option("--device", default="auto", help="cpu, cuda, or auto.")
@click.option("--grace", "grace_s", default=25.0, help="Seconds for the last checkpoint at SIGTERM.")
@click.option("--ready-file", default="", help="Written with rank 0's address once it listens.")
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
    ready_file: str,
) -> None:
    """The learner: trains on batches and publishes weights."""
    options = [
        *("--coordinator", coordinator, "--host", host, "--port", str(port), "--name", name),
        *("--device", device, "--grace", str(grace_s), "--ready-file", ready_file),
        *("--advertise-host", advertise_host),
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
