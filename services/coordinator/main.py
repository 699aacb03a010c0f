"""`paceline serve coordinator` (also `paceline-coordinator`): parse, wire, run."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import shutil
import sqlite3
from pathlib import Path

import click

from paceline.files.names import LEDGER_NAME
from paceline.token import TOKEN_NAME, make_token, token_path
from paceline.tracing import set_up_metrics, set_up_tracing
from protos.paceline.v1 import run_pb2, run_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.common.grpc_server import STOP_GRACE_S, GrpcServer, run_service
from services.common.options import functions_from_option, token_file_option
from services.common.processes.file_limit import Capacity, raise_file_limit
from services.common.processes.ready_file import announce
from services.common.token_guard import TokenGuard
from services.common.zmq_keepalive import in_brackets
from services.coordinator.ledger.integrity.file_damage import damage_in, sentence
from services.coordinator.ledger.ledger import Ledger
from services.coordinator.ledger.wal_checkpointer import WalCheckpointer
from services.coordinator.lifecycle.coordinator import Coordinator
from services.coordinator.members.registry import Members
from services.coordinator.memory import keep_freed_memory
from services.coordinator.servicers import RunServicer, WorkerServicer

NEEDED_BYTES = 4 << 20
"""Free on the disk before the ledger is opened: its recovery writes."""

GC_THRESHOLDS = (20_000, 20, 20)
"""For the collector of cycles. Hardly anything here is in one, and thousands of objects live for as long as a group is under
way; Python's own thresholds would have it look through the newest after every 700 new ones."""

log = logging.getLogger(__name__)


@click.command()
@click.option(
    "--directory", type=click.Path(path_type=Path), default=Path("runs"), help="Ledger and run folders."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=7070, show_default=True, help="gRPC port; 0 takes a free one.")
@click.option("--exchange-port", default=0, help="ZeroMQ port; 0 takes a free one.")
@click.option(
    "--exchange-endpoint",
    default="",
    help="tcp://HOST:PORT that workers are told for the exchange, where a relay or NAT stands before it.",
)
@click.option(
    "--heartbeat-timeout",
    "timeout_s",
    default=10.0,
    show_default=True,
    help="Seconds until a silent worker is gone.",
)
@click.option(
    "--grace",
    "grace_s",
    default=25.0,
    show_default=True,
    help="Seconds at SIGTERM to stay for workers that leave too.",
)
@click.option(
    "--min-free-mb",
    default=512,
    show_default=True,
    help="No new groups while the ledger's disk has less than this free.",
)
@click.option(
    "--ready-file", type=click.Path(path_type=Path), help="Written with the address once it listens."
)
@functions_from_option
@token_file_option
def main(
    directory: Path,
    host: str,
    port: int,
    exchange_port: int,
    exchange_endpoint: str,
    timeout_s: float,
    grace_s: float,
    min_free_mb: int,
    functions_from: tuple[Path, ...],
    ready_file: Path | None,
) -> None:
    """The coordinator: runs, members, exchange and ledger."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    set_up_tracing("coordinator")
    set_up_metrics("coordinator")
    capacity = Capacity(raise_file_limit())
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)

    async def serve(stop: asyncio.Event) -> None:
        await wait_for_room(directory, stop)
        ledger = Ledger(directory / LEDGER_NAME)
        token_file = token_path(directory / TOKEN_NAME)
        token = make_token(token_file)
        if token_file.stat().st_mode & 0o077:
            log.warning("others on this host can read the token in %s; chmod 600 it", token_file)
        guard = TokenGuard(lambda: token, token_file)
        server = GrpcServer(host, port, guard, capacity.max_connections)
        coordinator = Coordinator(
            ledger, directory, Members(timeout_s), host, exchange_port, min_free_mb << 20, functions_from
        )
        endpoint = f"tcp://{in_brackets(host)}:{coordinator.server.port}"
        server.add(
            RunServicer(coordinator),
            run_pb2_grpc.add_RunServiceServicer_to_server,
            _name(run_pb2, "RunService"),
        )
        server.add(
            WorkerServicer(coordinator, exchange_endpoint or endpoint, capacity),
            worker_pb2_grpc.add_WorkerServiceServicer_to_server,
            _name(worker_pb2, "WorkerService"),
        )
        await coordinator.recover()
        await server.start()
        coordinator.pool.expect_holders()
        try:
            announce(ready_file, f"{host}:{server.port}")
            log.info(
                "listening on %s:%d, exchange on %s, ledger %s (term %d)",
                host,
                server.port,
                endpoint,
                ledger.path,
                ledger.term,
            )
            with contextlib.suppress(asyncio.CancelledError):
                async with asyncio.TaskGroup() as tasks:
                    loops = [
                        tasks.create_task(coordinator.server.serve()),
                        tasks.create_task(coordinator.run_forever()),
                        tasks.create_task(WalCheckpointer(ledger, coordinator.lock).run()),
                    ]
                    await stop.wait()
                    await coordinator.wait_for_leavers(grace_s)
                    await end_calls(server, coordinator)
                    for loop in loops:
                        loop.cancel()
        finally:
            await end_calls(server, coordinator)  # a loop that fails comes here past the one above
        coordinator.close()
        ledger.close()

    try:
        keep_freed_memory()
        gc.freeze()  # what the imports made stays: looking through it again and again takes tens of milliseconds
        gc.set_threshold(*GC_THRESHOLDS)
        run_service(serve)
    except (sqlite3.DatabaseError, OSError, ExceptionGroup) as error:
        if (damage := damage_in(error)) is not None:
            raise click.ClickException(sentence(directory / LEDGER_NAME, damage)) from None
        if not is_disk_full(error):
            raise
        raise click.ClickException(
            f"the disk of {directory} is full. Nothing that was acknowledged is lost; the next coordinator "
            f"begins when {NEEDED_BYTES >> 20} MB are free"
        ) from None


async def end_calls(server: GrpcServer, coordinator: Coordinator) -> None:
    """Ends the calls under way and takes no further one; nothing the second time."""
    stopped = asyncio.create_task(server.stop(STOP_GRACE_S))
    await asyncio.sleep(0)  # it refuses new calls from here on, so that nobody comes back at once
    await coordinator.end_streams()
    await stopped


def is_disk_full(error: BaseException) -> bool:
    """Whether that is what an error, or one of a group, comes from."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_disk_full(each) for each in error.exceptions)
    if isinstance(error, sqlite3.OperationalError):
        return getattr(error, "sqlite_errorcode", 0) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


async def wait_for_room(directory: Path, stop: asyncio.Event) -> None:
    """Until the ledger can be opened and written at all. Workers wait, as for any coordinator that is away."""
    said = False
    while (free_bytes := shutil.disk_usage(directory).free) < NEEDED_BYTES and not stop.is_set():
        if not said:
            log.error(
                "waiting for %d MB on the disk of %s: %d are free",
                NEEDED_BYTES >> 20,
                directory,
                free_bytes >> 20,
            )
            said = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.5)


def _name(module: object, service: str) -> str:
    return str(module.DESCRIPTOR.services_by_name[service].full_name)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
