"""`paceline serve dashboard`: the page and the REST interface of a coordinator, or of the ledger in a folder."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import click

from paceline.apps.dashboard.app import Dashboard, Pieces
from paceline.apps.dashboard.backends import Backend, CoordinatorBackend
from paceline.apps.dashboard.gateway import Gateway
from paceline.apps.dashboard.links import say_links
from paceline.calls.token import TOKEN_NAME, token_path
from paceline.errors import NotFound
from paceline.files.names import LEDGER_NAME
from paceline.services.cli.recorded.source import address_instead
from paceline.services.cli.render import PATH
from paceline.services.common.access.callers import WorkerCallers
from paceline.services.common.access.insecure import check_coordinator, check_host, insecure_option, insecurity
from paceline.services.common.access.page_keys import Access
from paceline.services.common.options import PORT, directory_option, token_file_option
from paceline.services.common.processes.starting import announce
from paceline.services.common.serving.endpoints import in_brackets
from paceline.services.common.serving.grpc_server import remind, run_service
from paceline.services.common.serving.scrape import metrics_endpoint
from paceline.services.local.ledger_calls import LedgerCalls

USUAL_PORT = 7080
log = logging.getLogger(__name__)


@click.command()
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    callback=check_coordinator,
    help="Show this coordinator's runs and members. Default: PACELINE_COORDINATOR; without it, or with --directory, the ledger.",
)
@directory_option
@click.option("--host", default="127.0.0.1", show_default=True, callback=check_host, help="Address to listen on.")
@insecure_option
@click.option("--port", type=PORT, default=USUAL_PORT, show_default=True, help="HTTP port; 0 takes a free one.")
@click.option(
    "--metrics-port",
    type=PORT,
    help="Port on --host that serves /metrics for Prometheus, 0 for a free one. Default: none.",
)
@click.option("--read-only", is_flag=True, help="Make the page read-only: no key can pause, resume or cancel.")
@click.option("--ready-file", type=PATH, help="File to write the address to, once the server listens.")
@token_file_option
def main(
    coordinator: str | None,
    directory: Path,
    host: str,
    port: int,
    metrics_port: int | None,
    read_only: bool,
    ready_file: Path | None,
) -> None:
    """Serve a page that shows runs, and their records as JSON over HTTP. It keeps no state and can be restarted at any
    time.

    It prints two links: the first may pause, resume and cancel runs, the second is read-only.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    ledger, coordinator = directory / LEDGER_NAME, coordinator or address_instead()
    if not coordinator and not ledger.is_file():
        raise click.ClickException(
            str(NotFound(f"no ledger at {ledger}; name the coordinator's --directory, or a --coordinator"))
        )
    access = Access(token_path(directory / TOKEN_NAME), read_only=read_only)

    async def serve(stop: asyncio.Event) -> None:
        backend: Backend = (
            CoordinatorBackend(coordinator, token_path(directory / TOKEN_NAME)) if coordinator else LedgerCalls(ledger)
        )
        dashboard = Dashboard(Gateway(backend, access), Pieces(backend))
        try:
            address = f"{in_brackets(host)}:{await dashboard.start(host, port)}"
            announce(ready_file, address)
            if not ready_file:  # a supervisor prints them itself, and logs should hold no keys
                say_links(address, access)
            log.info("the dashboard of %s listens on %s", coordinator or ledger, address)
            reminding = asyncio.create_task(remind(insecurity(host)))
            async with metrics_endpoint(host, metrics_port, WorkerCallers(coordinator or "")):
                await stop.wait()
            reminding.cancel()
        finally:
            await dashboard.close()
            await backend.close()

    run_service(serve)


if __name__ == "__main__":
    main()
