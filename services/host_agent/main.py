"""`paceline serve host-agent`: the relay of a host, which receives weights for all its workers and passes them on.
Workers start one by themselves if there is none; the command is for deployments that place processes (a DaemonSet)."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time

import click

from paceline.errors import Conflict, InvalidInput, Unavailable
from paceline.services.common.access.insecure import (
    REMIND_S,
    check_coordinator,
    check_host,
    insecure_option,
    insecurity,
)
from paceline.services.common.options import PORT, linux_only
from paceline.services.common.processes.starting import raise_file_limit
from paceline.services.common.relay import fabric_option
from paceline.weights.hosts.local_socket import listen, socket_name
from paceline.weights.hosts.relay import Relay
from paceline.weights.hosts.transport import transport_of

FIRST_CLIENT_S = 20.0
"""Seconds after the relay's start within which the first worker must connect."""
LINGER_S = 1.0
"""Seconds for which the relay stays after the last worker has left, so that a restarted worker finds the weights."""
CHECK_S = 0.25

log = logging.getLogger(__name__)


@click.command()
@click.option(
    "--coordinator",
    default="",
    callback=check_coordinator,
    help="Address of the coordinator, as the workers of this host name it.",
)
@click.option("--host", default="127.0.0.1", show_default=True, callback=check_host, help="Address to listen on.")
@insecure_option
@fabric_option
@click.option(
    "--port", type=PORT, default=0, show_default=True, help="Port for relays of other hosts; 0 takes a free port."
)
@click.option(
    "--socket",
    "name",
    default="",
    hidden=True,
    help="Name of the socket; default: derived from coordinator and address.",
)
@click.option("--stay", is_flag=True, help="Keep running without workers.")
@linux_only
def main(coordinator: str, host: str, fabric: str, port: int, name: str, stay: bool) -> None:
    """Bring weights to all workers of this host, once for all of them, and pass them on to the next host."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    raise_file_limit()
    address = host if name else fabric or host
    name = name or socket_name(coordinator, address)
    try:
        listener = listen(name)
    except Conflict as error:
        log.info("%s", error)
        return
    except Unavailable as error:
        raise click.ClickException(str(error)) from None
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        relay = Relay(transport_of(), address, port)
    except InvalidInput as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"cannot listen on {address}:{port}: {error.strerror}") from None
    threading.Thread(target=relay.serve_forever, args=(listener,), name="weights-local", daemon=True).start()
    log.info("relay %s listens at %s and on %s:%d", relay.agent_id, name, address, relay.port)
    reminded_s = -math.inf
    while not stopped.wait(CHECK_S):
        if (sentence := insecurity(address)) and time.monotonic() - reminded_s > REMIND_S:
            log.warning("%s", sentence)
            reminded_s = time.monotonic()
        patience_s = LINGER_S if relay.had_client else FIRST_CLIENT_S
        if not (stay or relay.num_clients) and time.monotonic() - relay.last_client_s > patience_s:
            break
    listener.close()
    relay.close()
    # Threads that send to another host may be blocked by it.
    os._exit(0)


if __name__ == "__main__":
    main()
