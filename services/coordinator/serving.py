"""The coordinator as a service: open the ledger, wire the servers, serve until it is stopped, end in order.

At the stop the coordinator first waits for workers that stop too, then ends all calls, then its loops; the ledger is closed last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from paceline.calls.token import TOKEN_NAME, make_token, token_path
from paceline.files.names import BLOBS_NAME, LEDGER_NAME
from paceline.services.common.access.callers import TokenCallers
from paceline.services.common.access.token_guard import TokenGuard
from paceline.services.common.access.token_table import FILE_NAME as TOKENS_NAME
from paceline.services.common.processes.starting import Capacity, announce
from paceline.services.common.serving.endpoints import in_brackets
from paceline.services.common.serving.grpc_server import STOP_GRACE_S, GrpcServer
from paceline.services.common.serving.scrape import metrics_endpoint
from paceline.services.coordinator.access_servicer import AccessServicer
from paceline.services.coordinator.audit_log.log import AuditLog
from paceline.services.coordinator.blobs.store import BlobStore
from paceline.services.coordinator.bundle_servicer import BundleServicer
from paceline.services.coordinator.disk_space import wait_for_space
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.wal_checkpointer import WalCheckpointer
from paceline.services.coordinator.lifecycle.coordinator import Coordinator
from paceline.services.coordinator.members.registry import Members
from paceline.services.coordinator.model_servicer import ModelServicer
from paceline.services.coordinator.records_servicer import RecordsServicer
from paceline.services.coordinator.scaling.pools import PoolConfig
from paceline.services.coordinator.scaling_servicers import StatusServicer
from paceline.services.coordinator.servicers import RunServicer, WorkerServicer
from paceline.v1 import (
    access_pb2,
    access_pb2_grpc,
    bundle_pb2,
    bundle_pb2_grpc,
    records_pb2,
    records_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoordinatorService:
    """One coordinator with the options of its command."""

    directory: Path
    store: str
    """Root of large files; empty: `directory`."""
    host: str
    port: int
    people_port: int | None
    """Second gRPC port, where clients need no certificate under TLS; None opens none."""
    exchange_port: int
    exchange_endpoint: str
    timeout_s: float
    """Seconds after which a silent worker is expired."""
    grace_s: float
    """Seconds to wait, at the stop, for workers that stop too."""
    min_free_bytes: int
    bundle_quota_bytes: int
    """Most bytes of the files of runs' bundles."""
    functions_from: Sequence[Path]
    ready_file: Path | None
    metrics_port: int | None
    """Port of `/metrics` for Prometheus and of `/scale` for KEDA; None: there is none."""
    capacity: Capacity
    scaling_period_s: float
    """Seconds between two decisions on the sizes of pools."""
    pools: Sequence[PoolConfig]
    """Pools with bounds."""

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises errors of SQLite and of the disk, also in an ExceptionGroup."""
        await wait_for_space(self.directory, stop)
        ledger = Ledger(self.directory / LEDGER_NAME, store=self.store)
        audit = AuditLog(ledger)
        callers = self._callers(audit)
        server = GrpcServer(
            self.host,
            self.port,
            TokenGuard(callers, ledger.submitter, audit.note_call),
            self.capacity.max_connections,
            mutual=True,
            people_port=self.people_port,
        )
        coordinator = Coordinator(
            ledger,
            self.directory,
            Members(self.timeout_s),
            self.host,
            self.exchange_port,
            self.min_free_bytes,
            self.functions_from,
            BlobStore(
                self.directory / BLOBS_NAME,
                quota_bytes=self.bundle_quota_bytes,
                min_free_bytes=self.min_free_bytes,
            ),
            self.scaling_period_s,
            callers.refusal,
            self.pools,
        )
        coordinator.exchange.note_intruder = audit.note_intruder
        endpoint = f"tcp://{in_brackets(self.host)}:{coordinator.server.port}"
        records = RecordsServicer(ledger.path, coordinator.members, coordinator.committed)
        access = AccessServicer(callers, audit.note_call)
        self._add_servicers(server, coordinator, records, access, self.exchange_endpoint or endpoint)
        await coordinator.recover()
        await server.start()
        coordinator.pool.expect_holders()
        try:
            announce(self.ready_file, f"{self.host}:{server.port}")
            log.info(
                "listening on %s:%d, exchange on %s, ledger %s (term %d)",
                self.host,
                server.port,
                endpoint,
                ledger.path,
                ledger.term,
            )
            desired = coordinator.scaler.desired
            async with metrics_endpoint(self.host, self.metrics_port, callers, audit.note_call, desired):
                await self._run_until(stop, server, coordinator, audit)
        finally:
            await _end_calls(server, coordinator)  # again, because a loop that fails skips the first call
            await records.close()
        coordinator.close()
        audit.close()
        ledger.close()

    def _callers(self, audit: AuditLog) -> TokenCallers:
        token_file = token_path(self.directory / TOKEN_NAME)
        token = make_token(token_file)
        if token_file.stat().st_mode & 0o077:
            log.warning("others on this host can read the token in %s; chmod 600 it", token_file)
        table = self.directory / TOKENS_NAME
        return TokenCallers(lambda: token, token_file, table, note=audit.note_change)

    def _add_servicers(
        self,
        server: GrpcServer,
        coordinator: Coordinator,
        records: RecordsServicer,
        access: AccessServicer,
        exchange_endpoint: str,
    ) -> None:
        server.add(
            access,
            access_pb2_grpc.add_AccessServiceServicer_to_server,
            _name(access_pb2, "AccessService"),
        )
        server.add(
            RunServicer(coordinator),
            run_pb2_grpc.add_RunServiceServicer_to_server,
            _name(run_pb2, "RunService"),
        )
        server.add(
            WorkerServicer(coordinator, exchange_endpoint, self.capacity),
            worker_pb2_grpc.add_WorkerServiceServicer_to_server,
            _name(worker_pb2, "WorkerService"),
        )
        server.add(
            BundleServicer(coordinator.blobs),
            bundle_pb2_grpc.add_BundleServiceServicer_to_server,
            _name(bundle_pb2, "BundleService"),
        )
        server.add(
            records,
            records_pb2_grpc.add_RecordsServiceServicer_to_server,
            _name(records_pb2, "RecordsService"),
        )
        server.add(
            StatusServicer(coordinator),
            status_pb2_grpc.add_StatusServiceServicer_to_server,
            _name(status_pb2, "StatusService"),
        )
        server.add(
            ModelServicer(coordinator.ledger, coordinator.committed, coordinator.lock),
            registry_pb2_grpc.add_ModelServiceServicer_to_server,
            _name(registry_pb2, "ModelService"),
        )

    async def _run_until(
        self, stop: asyncio.Event, server: GrpcServer, coordinator: Coordinator, audit: AuditLog
    ) -> None:
        """Run the coordinator's loops until `stop` is set and the workers that stop too have left."""
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.TaskGroup() as tasks:
                loops = [
                    tasks.create_task(coordinator.server.serve()),
                    tasks.create_task(coordinator.run_forever()),
                    tasks.create_task(WalCheckpointer(coordinator.ledger, coordinator.lock).run()),
                    tasks.create_task(audit.run(coordinator.lock)),
                ]
                await stop.wait()
                await coordinator.wait_for_leavers(self.grace_s)
                await _end_calls(server, coordinator)
                for loop in loops:
                    loop.cancel()


async def _end_calls(server: GrpcServer, coordinator: Coordinator) -> None:
    """End the calls under way and accept no further calls; a second call does nothing."""
    stopped = asyncio.create_task(server.stop(STOP_GRACE_S))
    await asyncio.sleep(0)  # the server refuses new calls from here on, so that no worker comes back at once
    await coordinator.end_streams()
    await stopped


def _name(module: ModuleType, service: str) -> str:
    return str(module.DESCRIPTOR.services_by_name[service].full_name)
