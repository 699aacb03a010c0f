"""`paceline serve reward` (also `paceline-reward`): parse, wire, run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import uuid
from functools import partial
from pathlib import Path

import click

from paceline.host.process import keep_private
from paceline.services.common.advertise import advertised_host
from paceline.services.common.grpc_server import GrpcServer, run_service
from paceline.services.common.member_metrics import member_metrics
from paceline.services.common.options import (
    functions_from_option,
    only_option,
    token_file_option,
    worker_options,
)
from paceline.services.common.processes.file_limit import raise_file_limit
from paceline.services.common.processes.parent_death import die_with_starter
from paceline.services.common.processes.quiet_libraries import quiet_libraries
from paceline.services.common.processes.ready_file import announce
from paceline.services.common.reminder import remind
from paceline.services.common.secret_hiding import choose_isolation
from paceline.services.common.token_guard import worker_guard
from paceline.services.common.user_code_options import user_code_options
from paceline.services.reward.servicer import RewardServicer
from paceline.services.reward.worker import RewardWorker
from paceline.tracing import set_up_tracing
from paceline.user_code.temporary_folder import remove_left_over
from paceline.v1 import reward_pb2_grpc

log = logging.getLogger(__name__)


@click.command()
@worker_options("reward", grace="Seconds to finish tasks at SIGTERM.")
@click.option("--processes", default=1, show_default=True, help="Number of groups to score at the same time.")
@functions_from_option
@only_option
@user_code_options
@token_file_option
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
    only: tuple[str, ...],
    ready_file: Path | None,
) -> None:
    """A reward worker: scores completions for the coordinator's run."""
    die_with_starter()
    keep_private()
    quiet_libraries()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    set_up_tracing("reward")
    raise_file_limit()
    warning = choose_isolation(coordinator, host)
    threading.Thread(target=remove_left_over, name="left-over files", daemon=True).start()

    async def serve(stop: asyncio.Event) -> None:
        reachable = advertised_host(host, advertise_host, coordinator)
        worker = RewardWorker(
            coordinator,
            f"{name}-{uuid.uuid4().hex[:8]}",
            processes,
            functions_from=functions_from,
            only=only,
        )
        server = GrpcServer(host, port, worker_guard(coordinator))
        servicer = RewardServicer(worker)
        server.add(servicer, reward_pb2_grpc.add_RewardServiceServicer_to_server, "paceline.v1.RewardService")
        worker.address = f"{reachable}:{server.port}"
        worker.assigned.on_readiness = partial(server.set_serving, "paceline.v1.RewardService")
        metrics = member_metrics("reward", worker.membership, host, metrics_port)
        async with server, metrics, asyncio.TaskGroup() as tasks:
            announce(ready_file, worker.address)
            belonging = tasks.create_task(worker.membership.run())
            working = tasks.create_task(worker.work())
            reminding = tasks.create_task(remind(warning))
            await stop.wait()
            worker.membership.draining = True
            worker.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await asyncio.shield(working)
            await worker.membership.leave()
            working.cancel()
            belonging.cancel()
            reminding.cancel()

    run_service(serve)


if __name__ == "__main__":
    main()
