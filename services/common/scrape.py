"""`/metrics` of a service for Prometheus: what OpenTelemetry has gathered in this process, in the text format.

Promise: reading changes nothing and touches neither ledger nor members; connections are bounded, and a stranger learns the names
of runs and reward functions and their numbers, nothing else. Nothing listens without --metrics-port.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MAX_CONNECTIONS = 32
log = logging.getLogger(__name__)


@asynccontextmanager
async def metrics_endpoint(host: str, port: int | None) -> AsyncIterator[int | None]:
    """Serve `/metrics` while the context is open, on a free port for 0; None serves nothing. Yields the port. Raises Conflict
    when it is taken."""
    if port is None:
        yield None
        return
    from aiohttp import web
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    from services.common.json_http import JsonListener

    async def answer(_request: web.Request) -> web.Response:
        text = await asyncio.to_thread(generate_latest)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    listener = JsonListener(
        "the metrics endpoint", "choose another --metrics-port", max_connections=MAX_CONNECTIONS
    )
    listener.app.router.add_get("/metrics", answer)
    used = await listener.start(host, port)
    log.info("metrics at http://%s:%d/metrics", host, used)
    try:
        yield used
    finally:
        await listener.close()
