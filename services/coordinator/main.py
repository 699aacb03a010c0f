"""`paceline serve coordinator` (also `paceline-coordinator`): parse the options, serve, explain errors."""

from __future__ import annotations

import gc
import logging
import sqlite3
from pathlib import Path

import click

from paceline.errors import InvalidInput, PacelineError
from paceline.files.names import LEDGER_NAME
from paceline.files.storage import store_root
from paceline.host.memory import keep_freed_memory
from paceline.services.common.access.insecure import check_host, insecure_option
from paceline.services.common.options import (
    directory_option,
    functions_from_option,
    make_directory,
    store_option,
    token_file_option,
)
from paceline.services.common.processes.starting import Capacity, raise_file_limit
from paceline.services.common.serving.grpc_server import run_service
from paceline.services.coordinator.disk_space import NEEDED_BYTES, is_disk_full
from paceline.services.coordinator.ledger.integrity.file_damage import damage_in, sentence
from paceline.services.coordinator.scaling.pools import PoolConfig, read_pools
from paceline.services.coordinator.scaling.scaler import PERIOD_S
from paceline.services.coordinator.serving import CoordinatorService
from paceline.tracing import set_up_metrics, set_up_tracing

GC_THRESHOLDS = (20_000, 20, 20)
"""Thresholds of the collector of cycles. Hardly any object here is in a cycle, and thousands live for as long as a group is
open; Python's default would scan the newest objects after every 700 new ones."""


def _pools(
    _context: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> tuple[PoolConfig, ...]:
    """Callback of --pool."""
    try:
        return read_pools(texts)
    except InvalidInput as error:
        raise click.UsageError(f"--pool: {error}") from None


@click.command()
@directory_option
@store_option
@click.option(
    "--host", default="127.0.0.1", show_default=True, callback=check_host, help="Address to listen on."
)
@insecure_option
@click.option("--port", default=7070, show_default=True, help="gRPC port; 0 takes a free one.")
@click.option(
    "--people-port",
    type=click.IntRange(0, 65535),
    help="Second gRPC port for people, who need no client certificate there under --tls-dir; 0 takes a free one, default none.",
)
@click.option("--exchange-port", default=0, show_default=True, help="ZeroMQ port; 0 takes a free one.")
@click.option(
    "--exchange-endpoint",
    default="",
    help="tcp://HOST:PORT that workers use for the exchange, if a relay or NAT stands before it.",
)
@click.option(
    "--heartbeat-timeout",
    "timeout_s",
    default=10.0,
    show_default=True,
    help="Seconds after which a silent worker is expired.",
)
@click.option(
    "--grace",
    "grace_s",
    default=25.0,
    show_default=True,
    help="Seconds to wait, at SIGTERM, for workers that stop too.",
)
@click.option(
    "--min-free-mb",
    default=512,
    show_default=True,
    help="Admit no new groups while the ledger's disk has less than this free.",
)
@click.option(
    "--ready-file", type=click.Path(path_type=Path), help="File to write the address to, once it listens."
)
@click.option(
    "--bundle-quota-mb",
    type=click.IntRange(min=1),
    default=65_536,
    show_default=True,
    help="Most MB of files that runs bring with them, all runs together.",
)
@click.option(
    "--pool",
    "pools",
    multiple=True,
    metavar="KEY=VALUE,...",
    callback=_pools,
    help="Bounds of a pool that is scaled, such as role=rollout,minWorkers=0,maxWorkers=16; may be given several times.",
)
@click.option(
    "--scaling-period",
    "scaling_period_s",
    type=click.FloatRange(min=0.5),
    default=PERIOD_S,
    show_default=True,
    help="Seconds between two decisions on the sizes of pools.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Port of /metrics for Prometheus and of /scale for KEDA, on --host; 0 takes a free one, default none.",
)
@functions_from_option
@token_file_option
def main(
    directory: Path,
    store: str,
    host: str,
    port: int,
    people_port: int | None,
    exchange_port: int,
    exchange_endpoint: str,
    timeout_s: float,
    grace_s: float,
    min_free_mb: int,
    bundle_quota_mb: int,
    metrics_port: int | None,
    functions_from: tuple[Path, ...],
    ready_file: Path | None,
    pools: tuple[PoolConfig, ...],
    scaling_period_s: float,
) -> None:
    """The coordinator: runs, members, exchange and ledger."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    set_up_tracing("coordinator")
    set_up_metrics("coordinator", scraped=metrics_port is not None)
    directory = directory.resolve()
    try:
        make_directory(directory)
        root = store_root(store, directory)
    except PacelineError as error:
        raise click.ClickException(str(error)) from None
    service = CoordinatorService(
        directory=directory,
        store=root,
        host=host,
        port=port,
        people_port=people_port,
        exchange_port=exchange_port,
        exchange_endpoint=exchange_endpoint,
        timeout_s=timeout_s,
        grace_s=grace_s,
        min_free_bytes=min_free_mb << 20,
        bundle_quota_bytes=bundle_quota_mb << 20,
        functions_from=functions_from,
        ready_file=ready_file,
        metrics_port=metrics_port,
        capacity=Capacity(raise_file_limit(), has_people_port=people_port is not None),
        scaling_period_s=scaling_period_s,
        pools=pools,
    )
    keep_freed_memory()
    gc.freeze()  # objects of the imports live for ever: scanning them again and again takes tens of milliseconds
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        run_service(service.serve)
    except (sqlite3.DatabaseError, OSError, ExceptionGroup) as error:
        if (damage := damage_in(error)) is not None:
            raise click.ClickException(sentence(directory / LEDGER_NAME, damage)) from None
        if not is_disk_full(error):
            raise
        raise click.ClickException(
            f"the disk of {directory} is full. Nothing that was acknowledged is lost; the next coordinator "
            f"begins when {NEEDED_BYTES >> 20} MB are free"
        ) from None


if __name__ == "__main__":
    main()
