"""`/metrics` of a service for Prometheus: what OpenTelemetry has gathered in this process, in the text format.

Promise: reading changes nothing and touches neither ledger nor members; connections are bounded, and a stranger learns the names
of runs and reward functions and their numbers, nothing else. Nothing listens without --metrics-port.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from paceline.rate_limited_log import RateLimitedLog
from services.common.access.callers import Callers
from services.common.access.rights import METRICS
from services.common.token_guard import Call

MAX_CONNECTIONS = 32
log = logging.getLogger(__name__)
seldom = RateLimitedLog(log)


@asynccontextmanager
async def metrics_endpoint(
    host: str, port: int | None, callers: Callers, note: Callable[[Call], None] = lambda call: None
) -> AsyncIterator[int | None]:
    """Serve `/metrics` while the context is open, on a free port for 0; None serves nothing. Yields the port. `callers` are asked
    where the port requires a token, and `note` takes the requests that are then refused. Raises Conflict when it is taken."""
    if port is None:
        yield None
        return
    from aiohttp import web
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    from services.common.http_guard import HttpGuard
    from services.common.json_http import JsonListener

    async def answer(_request: web.Request) -> web.Response:
        text = await asyncio.to_thread(generate_latest)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    listener = JsonListener(
        "the metrics endpoint",
        "choose another --metrics-port",
        max_connections=MAX_CONNECTIONS,
        guard=HttpGuard(callers, METRICS, seldom, note),
    )
    listener.app.router.add_get("/metrics", answer)
    used = await listener.start(host, port)
    log.info("metrics at %s://%s:%d/metrics", listener.scheme, host, used)
    try:
        yield used
    finally:
        await listener.close()
