"""Serves `/metrics` for Prometheus, with OpenTelemetry's numbers of this process in the text format; and the
coordinator's `/scale/POOL`, the one number that KEDA's metrics-api scaler reads for a pool. Promise: reading touches
neither ledger nor members and sets no size; connections are bounded, and a stranger learns only the names of runs,
pools and reward functions and their numbers. Nothing listens without --metrics-port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from paceline.rate_limited_log import RateLimitedLog
from paceline.services.common.access.callers import Callers
from paceline.services.common.access.rights import METRICS
from paceline.services.common.access.token_guard import Call

MAX_CONNECTIONS = 32
log = logging.getLogger(__name__)
seldom = RateLimitedLog(log)


@asynccontextmanager
async def metrics_endpoint(
    host: str,
    port: int | None,
    callers: Callers,
    note: Callable[[Call], None] = lambda call: None,
    desired: Callable[[str], int] | None = None,
) -> AsyncIterator[int | None]:
    """Serve `/metrics` while the context is open, on a free port for 0, and yield the port; None serves nothing.
    `callers` checks tokens if the port requires them, `note` gets refused requests, and `desired` returns a pool's
    desired size, which `/scale/POOL` then serves. Raises Conflict if the port is taken."""
    if port is None:
        yield None
        return
    from aiohttp import web
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    from paceline.services.common.serving.json_http import HttpGuard, JsonListener

    async def answer(_request: web.Request) -> web.Response:
        text = await asyncio.to_thread(generate_latest)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def answer_scale(request: web.Request) -> web.Response:
        assert desired is not None
        response = web.json_response({"desired": desired(request.match_info["pool"])})
        response.force_close()  # KEDA uses another connection for each pool
        return response

    listener = JsonListener(
        "the metrics endpoint",
        "choose another --metrics-port",
        max_connections=MAX_CONNECTIONS,
        guard=HttpGuard(callers, METRICS, seldom, note),
    )
    listener.app.router.add_get("/metrics", answer)
    if desired is not None:
        listener.app.router.add_get("/scale/{pool}", answer_scale)
    used = await listener.start(host, port)
    log.info("metrics at %s://%s:%d/metrics", listener.scheme, host, used)
    try:
        yield used
    finally:
        await listener.close()
