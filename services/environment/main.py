"""Entry point of `paceline serve environment` (also `paceline-environment`)."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import uuid
from functools import partial
from pathlib import Path

import click

from paceline.host.process import end_with, keep_private
from paceline.host.resources import keep_freed_memory
from paceline.services.common.access.token_guard import worker_guard
from paceline.services.common.options import functions_from_option, linux_only, token_file_option, worker_options
from paceline.services.common.processes.starting import (
    announce,
    die_with_starter,
    raise_file_limit,
    set_library_variables,
)
from paceline.services.common.serving.endpoints import advertised_host
from paceline.services.common.serving.grpc_server import GrpcServer, remind, run_service
from paceline.services.common.user_code_options import choose_isolation, user_code_options
from paceline.services.common.worker.member_metrics import member_metrics
from paceline.services.environment.worker import EnvironmentWorker
from paceline.tracing import set_up_tracing
from paceline.user_code.left_over import adopt, end_strays
from paceline.user_code.surroundings import remove_left_over

NAME = "paceline.v1.EnvironmentWorker"
"""Name that health checks use for this worker; no RPC method exists under it."""


@click.command()
@worker_options("environment", grace="Seconds to finish episodes at SIGTERM.")
@click.option(
    "--processes",
    type=click.IntRange(0, 4096),
    default=0,
    show_default=True,
    help="Number of processes for user code; 0 means the run's environment.processes, and if that is 0 too, one for each core.",
)
@functions_from_option
@user_code_options
@token_file_option
@linux_only
def main(
    coordinator: str,
    host: str,
    port: int,
    advertise_host: str,
    name: str,
    processes: int,
    grace_s: float,
    metrics_port: int | None,
    functions_from: tuple[Path, ...],
    ready_file: Path | None,
) -> None:
    """An environment worker: runs the episodes of the coordinator's run, with tokens from rollout workers."""
    die_with_starter()
    keep_private()
    set_library_variables()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    set_up_tracing("environment")
    raise_file_limit()
    keep_freed_memory()  # encryption of a group needs as many new pages again
    warning = choose_isolation(coordinator, host)
    adopt()
    threading.Thread(target=remove_left_over, name="left-over files", daemon=True).start()

    async def serve(stop: asyncio.Event) -> None:
        reachable = advertised_host(host, advertise_host, coordinator)
        worker = EnvironmentWorker(
            coordinator, f"{name}-{uuid.uuid4().hex[:8]}", processes, functions_from=functions_from
        )
        server = GrpcServer(host, port, worker_guard(coordinator, lambda: worker.membership.call_key))
        worker.address = f"{reachable}:{server.port}"
        worker.assigned.on_readiness = partial(server.set_serving, NAME)
        metrics = member_metrics("environment", worker.membership, host, metrics_port)
        async with server, metrics, asyncio.TaskGroup() as tasks:
            await server.set_serving(NAME, True)
            announce(ready_file, worker.address)
            loops = [tasks.create_task(loop) for loop in (worker.membership.run(), worker.work(), remind(warning))]
            stopped, drained = asyncio.create_task(stop.wait()), asyncio.create_task(worker.drained.wait())
            await asyncio.wait((stopped, drained), return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            drained.cancel()
            worker.membership.draining = True
            await worker.drain(grace_s)
            await worker.membership.leave()
            for loop in loops:
                loop.cancel()

    try:
        run_service(serve)
    finally:
        end_strays()


console = functools.partial(end_with, main)

if __name__ == "__main__":
    console()
