"""`paceline serve coordinator` (also `paceline-coordinator`): parses the options, opens the ledger, wires the servers,
serves until it is stopped, and explains errors. When it is stopped, the coordinator waits for workers that are
stopping too, ends all calls, then its loops, and closes the ledger last."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import shutil
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from paceline.calls.proof import COORDINATOR
from paceline.calls.token import TOKEN_NAME, make_token, token_path
from paceline.errors import InvalidInput, PacelineError
from paceline.files.names import BLOBS_NAME, LEDGER_NAME
from paceline.files.storage import store_root
from paceline.host.process import end_with
from paceline.host.resources import keep_freed_memory
from paceline.services.common.access.callers import TokenCallers
from paceline.services.common.access.insecure import check_host, insecure_option
from paceline.services.common.access.token_guard import TokenGuard
from paceline.services.common.access.token_table import FILE_NAME as TOKENS_NAME
from paceline.services.common.options import (
    MAX_MB,
    PORT,
    SECONDS,
    directory_option,
    functions_from_option,
    linux_only,
    make_directory,
    store_option,
    token_file_option,
)
from paceline.services.common.processes.starting import Capacity, announce, raise_file_limit
from paceline.services.common.serving.endpoints import in_brackets
from paceline.services.common.serving.grpc_server import STOP_GRACE_S, GrpcServer, run_service
from paceline.services.common.serving.scrape import metrics_endpoint
from paceline.services.coordinator.audit_log.log import AuditLog
from paceline.services.coordinator.blobs import BlobStore
from paceline.services.coordinator.bundle_servicer import BundleServicer
from paceline.services.coordinator.ledger.connection import WalCheckpointer
from paceline.services.coordinator.ledger.file_check import damage_in, sentence
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.lifecycle.coordinator import Coordinator
from paceline.services.coordinator.members.registry import Members
from paceline.services.coordinator.model_servicer import ModelServicer
from paceline.services.coordinator.records.servicer import RecordsServicer
from paceline.services.coordinator.scaling.policy import PoolConfig, read_pools
from paceline.services.coordinator.scaling.scaler import PERIOD_S
from paceline.services.coordinator.servicers import AccessServicer, RunServicer, StatusServicer, WorkerServicer
from paceline.tracing import set_up_metrics, set_up_tracing
from paceline.v1 import (
    access_pb2_grpc,
    bundle_pb2_grpc,
    records_pb2_grpc,
    registry_pb2_grpc,
    run_pb2_grpc,
    status_pb2_grpc,
    worker_pb2_grpc,
)

log = logging.getLogger(__name__)
NEEDED_BYTES = 4 << 20
"""Free bytes on the disk that opening the ledger needs, because SQLite's recovery writes."""


async def wait_for_space(directory: Path, stop: asyncio.Event) -> None:
    """Wait until the disk has space to open and write the ledger. Workers retry, as with any unreachable
    coordinator."""
    is_logged = False
    while (free_bytes := shutil.disk_usage(directory).free) < NEEDED_BYTES and not stop.is_set():
        if not is_logged:
            log.error(
                "waiting for %d MB on the disk of %s: %d are free", NEEDED_BYTES >> 20, directory, free_bytes >> 20
            )
            is_logged = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await stop.wait()


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error, or any error of an exception group, comes from a full disk."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_disk_full(each) for each in error.exceptions)
    if isinstance(error, sqlite3.OperationalError):
        return getattr(error, "sqlite_errorcode", 0) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Listeners:
    """Address and ports on which the coordinator listens; port 0 takes a free one."""

    host: str
    port: int
    people_port: int | None
    """Second gRPC port, which under TLS accepts clients without a certificate. None opens no second port."""
    exchange_port: int
    exchange_endpoint: str
    metrics_port: int | None
    """Port of `/metrics` for Prometheus and of `/scale` for KEDA; None serves neither."""


@dataclass(frozen=True)
class CoordinatorService:
    directory: Path
    store: str
    """Root folder or URL of large files; empty for `directory`."""
    listeners: Listeners
    timeout_s: float
    """Seconds of silence after which a worker is removed."""
    grace_s: float
    """Seconds for which a stopping coordinator waits for workers that are stopping too."""
    min_free_bytes: int
    bundle_quota_bytes: int
    """Largest number of bytes of the files of all bundles together."""
    functions_from: Sequence[Path]
    ready_file: Path | None
    capacity: Capacity
    scaling_period_s: float
    """Seconds between two decisions on the sizes of pools."""
    pools: Sequence[PoolConfig]

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises errors of SQLite and of the disk, also in an ExceptionGroup."""
        await wait_for_space(self.directory, stop)
        ledger = Ledger(self.directory / LEDGER_NAME, store=self.store)
        audit = AuditLog(ledger)
        callers = self._callers(audit)
        server = GrpcServer(
            self.listeners.host,
            self.listeners.port,
            TokenGuard(callers, ledger.submitter, audit.note_call),
            self.capacity.max_connections,
            mutual=True,
            people_port=self.listeners.people_port,
        )
        coordinator = Coordinator(
            ledger,
            self.directory,
            Members(self.timeout_s),
            self.listeners.host,
            self.listeners.exchange_port,
            self.min_free_bytes,
            self.functions_from,
            BlobStore(
                self.directory / BLOBS_NAME, quota_bytes=self.bundle_quota_bytes, min_free_bytes=self.min_free_bytes
            ),
            self.scaling_period_s,
            callers.refusal,
            self.pools,
        )
        coordinator.exchange.report_intruders(audit.note_intruder)
        endpoint = f"tcp://{in_brackets(self.listeners.host)}:{coordinator.server.port}"
        records = RecordsServicer(ledger.path, coordinator.members, coordinator.committed)
        access = AccessServicer(callers, audit.note_call, coordinator.members)
        self._add_servicers(server, coordinator, records, access, self.listeners.exchange_endpoint or endpoint)
        await coordinator.runs.recover()
        await server.start()
        coordinator.pool.expect_holders()
        try:
            announce(self.ready_file, f"{self.listeners.host}:{server.port}")
            log.info(
                "listening on %s:%d, exchange on %s, ledger %s (term %d)",
                self.listeners.host,
                server.port,
                endpoint,
                ledger.path,
                ledger.term,
            )
            desired = coordinator.scaler.desired
            async with metrics_endpoint(
                self.listeners.host, self.listeners.metrics_port, callers, audit.note_call, desired
            ):
                await self._run_until(stop, server, coordinator, audit)
        finally:
            await _end_calls(server, coordinator)  # a second call, because the first is skipped if a loop fails
            await records.close()
        coordinator.close()
        audit.close()
        ledger.close()

    def _callers(self, audit: AuditLog) -> TokenCallers:
        token_file = token_path(self.directory / TOKEN_NAME)
        token = make_token(token_file)
        if token_file.stat().st_mode & 0o077:
            log.warning("other users of this host can read the token in %s; chmod 600 it", token_file)
        table = self.directory / TOKENS_NAME
        server = f"{COORDINATOR} {self.directory}"
        return TokenCallers(lambda: token, token_file, table, note=audit.note_change, server=server)

    def _add_servicers(
        self,
        server: GrpcServer,
        coordinator: Coordinator,
        records: RecordsServicer,
        access: AccessServicer,
        exchange_endpoint: str,
    ) -> None:
        servicers = {
            "AccessService": (access_pb2_grpc, access),
            "RunService": (run_pb2_grpc, RunServicer(coordinator)),
            "WorkerService": (worker_pb2_grpc, WorkerServicer(coordinator, exchange_endpoint, self.capacity)),
            "BundleService": (bundle_pb2_grpc, BundleServicer(coordinator.blobs)),
            "RecordsService": (records_pb2_grpc, records),
            "StatusService": (status_pb2_grpc, StatusServicer(coordinator)),
            "ModelService": (
                registry_pb2_grpc,
                ModelServicer(coordinator.ledger, coordinator.committed, coordinator.context.lock),
            ),
        }
        for name, (module, servicer) in servicers.items():
            server.add(servicer, getattr(module, f"add_{name}Servicer_to_server"), f"paceline.v1.{name}")

    async def _run_until(
        self, stop: asyncio.Event, server: GrpcServer, coordinator: Coordinator, audit: AuditLog
    ) -> None:
        """Run the coordinator's loops until `stop` is set and the workers that are stopping too have left."""
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.TaskGroup() as tasks:
                loops = [
                    tasks.create_task(coordinator.server.serve()),
                    tasks.create_task(coordinator.duties.run_forever()),
                    tasks.create_task(WalCheckpointer(coordinator.ledger, coordinator.context.lock).run()),
                    tasks.create_task(audit.run(coordinator.context.lock)),
                ]
                await stop.wait()
                await coordinator.wait_for_leavers(self.grace_s)
                await _end_calls(server, coordinator)
                for loop in loops:
                    loop.cancel()


async def _end_calls(server: GrpcServer, coordinator: Coordinator) -> None:
    """End the active calls and refuse new ones; a second call does nothing."""
    stopped = asyncio.create_task(server.stop(STOP_GRACE_S))
    await asyncio.sleep(0)  # from here on the server refuses new calls, so that no worker reconnects at once
    await coordinator.end_streams()
    await stopped


GC_THRESHOLDS = (20_000, 20, 20)
"""Thresholds of the garbage collector. Hardly any object of the coordinator is in a cycle, and thousands live as long
as a group is open. With Python's default the newest objects would be scanned after every 700 new ones."""


def _pools(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> tuple[PoolConfig, ...]:
    try:
        return read_pools(texts)
    except InvalidInput as error:
        raise click.UsageError(f"--pool: {error}") from None


@click.command()
@directory_option
@store_option
@click.option("--host", default="127.0.0.1", show_default=True, callback=check_host, help="Address to listen on.")
@insecure_option
@click.option("--port", type=PORT, default=7070, show_default=True, help="gRPC port; 0 takes a free port.")
@click.option(
    "--people-port",
    type=PORT,
    help="Second gRPC port, for people without a client certificate under --tls-dir; 0 takes a free port. Default: none.",
)
@click.option("--exchange-port", type=PORT, default=0, show_default=True, help="ZeroMQ port; 0 takes a free port.")
@click.option(
    "--exchange-endpoint",
    default="",
    help="tcp://HOST:PORT by which workers reach the exchange, if a proxy or NAT is between them.",
)
@click.option(
    "--heartbeat-timeout",
    "timeout_s",
    type=click.FloatRange(0.1, 1e9),
    default=10.0,
    show_default=True,
    help="Seconds of silence after which a worker is removed.",
)
@click.option(
    "--grace",
    "grace_s",
    type=SECONDS,
    default=25.0,
    show_default=True,
    help="Seconds to wait, at SIGTERM, for workers that are stopping too.",
)
@click.option(
    "--min-free-mb",
    type=click.IntRange(0, MAX_MB),
    default=512,
    show_default=True,
    help="MB that must be free on the ledger's disk for new groups to be admitted.",
)
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path),
    help="File to which the address is written when the servers listen.",
)
@click.option(
    "--bundle-quota-mb",
    type=click.IntRange(1, MAX_MB),
    default=65_536,
    show_default=True,
    help="Largest number of MB that the files of all bundles may take together.",
)
@click.option(
    "--pool",
    "pools",
    multiple=True,
    metavar="KEY=VALUE,...",
    callback=_pools,
    help="Bounds of a pool that is scaled, such as role=rollout,minWorkers=0,maxWorkers=16; repeat it for further pools.",
)
@click.option(
    "--scaling-period",
    "scaling_period_s",
    type=click.FloatRange(0.5, 1e9),
    default=PERIOD_S,
    show_default=True,
    help="Seconds between two decisions on the sizes of pools.",
)
@click.option(
    "--metrics-port",
    type=PORT,
    help="Port of /metrics for Prometheus and of /scale for KEDA, on --host; 0 takes a free port. Default: none.",
)
@functions_from_option
@token_file_option
@linux_only
def main(
    directory: Path,
    store: str,
    min_free_mb: int,
    bundle_quota_mb: int,
    **options: Any,
) -> None:
    """Run the coordinator: runs, members, exchange and ledger."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    set_up_tracing("coordinator")
    listeners = Listeners(**{name: options.pop(name) for name in Listeners.__dataclass_fields__})
    set_up_metrics("coordinator", scraped=listeners.metrics_port is not None)
    directory = directory.resolve()
    try:
        make_directory(directory)
        root = store_root(store, directory)
    except PacelineError as error:
        raise click.ClickException(str(error)) from None
    service = CoordinatorService(
        directory=directory,
        store=root,
        listeners=listeners,
        min_free_bytes=min_free_mb << 20,
        bundle_quota_bytes=bundle_quota_mb << 20,
        capacity=Capacity(raise_file_limit(), has_people_port=listeners.people_port is not None),
        **options,
    )
    keep_freed_memory()
    gc.freeze()  # imported objects live for ever, and each scan of them takes tens of milliseconds
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        run_service(service.serve)
    except (sqlite3.DatabaseError, OSError, ExceptionGroup) as error:
        if (damage := damage_in(error)) is not None:
            raise click.ClickException(sentence(directory / LEDGER_NAME, damage)) from None
        if not is_disk_full(error):
            raise
        raise click.ClickException(
            f"the disk of {directory} is full. No acknowledged data is lost; the next coordinator starts when "
            f"{NEEDED_BYTES >> 20} MB are free"
        ) from None


console = functools.partial(end_with, main)

if __name__ == "__main__":
    console()
