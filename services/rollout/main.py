"""`paceline serve rollout` (also `paceline-rollout`): reads the options and runs a rollout worker."""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
from functools import partial
from pathlib import Path

import click

from paceline.errors import Unavailable
from paceline.host.onednn import bound_caches
from paceline.host.process import end_with
from paceline.host.resources import keep_freed_memory
from paceline.services.common.access.token_guard import worker_guard
from paceline.services.common.gpus import unused_gpus
from paceline.services.common.options import PORT, device_option, linux_only, token_file_option, worker_options
from paceline.services.common.processes.starting import (
    announce,
    die_with_starter,
    raise_file_limit,
    set_library_variables,
)
from paceline.services.common.relay import fabric_option, zone_option
from paceline.services.common.serving.endpoints import advertised_host
from paceline.services.common.serving.grpc_server import GrpcServer, run_service
from paceline.services.common.worker.member_metrics import member_metrics
from paceline.services.rollout.servicer import RolloutServicer
from paceline.services.rollout.worker import RolloutWorker, engine_option
from paceline.tracing import set_up_tracing, shut_down_tracing
from paceline.v1 import rollout_pb2_grpc

log = logging.getLogger(__name__)


@click.command()
@worker_options("rollout", grace="Seconds to finish leases at SIGTERM.")
@device_option
@fabric_option
@zone_option
@engine_option
@click.option(
    "--http-port", type=PORT, help="Port of the OpenAI-compatible endpoint, 0 for a free port. Default: none."
)
@token_file_option
@linux_only
def main(
    coordinator: str,
    host: str,
    port: int,
    http_port: int | None,
    advertise_host: str,
    fabric: str,
    engine_settings: tuple[str, ...],
    name: str,
    device: str,
    grace_s: float,
    metrics_port: int | None,
    ready_file: Path | None,
) -> None:
    """A rollout worker: generates completions for the coordinator's run."""
    die_with_starter()
    set_library_variables()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    set_up_tracing("rollout")
    raise_file_limit()
    keep_freed_memory()  # encryption of a group needs as many new pages again
    bound_caches()

    async def serve(stop: asyncio.Event) -> None:
        reachable = advertised_host(host, advertise_host, coordinator)
        member_id = f"{name}-{uuid.uuid4().hex[:8]}"
        worker = RolloutWorker(
            coordinator, member_id, _device(device), grace_s, fabric or reachable, bind=fabric or host
        )
        worker.engine_settings = engine_settings
        worker.cpu_chosen = device == "cpu"
        server = GrpcServer(host, port, worker_guard(coordinator, lambda: worker.membership.call_key))

        add_to_server = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
        server.add(RolloutServicer(worker), add_to_server, "paceline.v1.RolloutService")
        worker.address = f"{reachable}:{server.port}"
        worker.assigned.on_readiness = partial(server.set_serving, "paceline.v1.RolloutService")
        if http_port is not None:
            worker.http_address = f"{reachable}:{await worker.endpoint.start(host, http_port)}"
            log.info("OpenAI-compatible endpoint at %s://%s/v1", worker.endpoint.scheme, worker.http_address)
        metrics = member_metrics("rollout", worker.membership, host, metrics_port)
        async with server, metrics, asyncio.TaskGroup() as tasks:
            announce(ready_file, worker.address)
            loops = [tasks.create_task(worker.membership.run()), tasks.create_task(worker.work())]
            stopped, drained = asyncio.create_task(stop.wait()), asyncio.create_task(worker.drained.wait())
            await asyncio.wait((stopped, drained), return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            drained.cancel()
            worker.membership.draining = True
            await worker.drain(grace_s)
            await worker.endpoint.close()
            await worker.membership.leave()
            worker.relay.close()
            for loop in loops:
                loop.cancel()

    run_service(serve)
    shut_down_tracing()
    from paceline.host.process import end_process

    end_process()  # a thread that still reads weights, which nothing waits for, would not survive the interpreter's finalisation


def _device(device: str) -> str:
    import torch

    if torch.cuda.is_available() and device == "auto":
        return "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise Unavailable(
            f"--device is cuda, but torch {torch.__version__} finds no GPU that it can use; see `paceline doctor`"
        )
    if device != "auto":
        return device
    if idle := unused_gpus("rollout worker"):
        log.warning("%s", idle)
    return "cpu"


console = functools.partial(end_with, main)

if __name__ == "__main__":
    console()
