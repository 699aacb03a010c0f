"""JSON over HTTP for clients of the OpenAI API: a listener with limits, bodies, errors in the API's shape, and events.

Promise: the port accepts a bounded number of connections, bodies and bytes, every error is answered to its sender as
the API's JSON, and no request ends the service. Beyond this host a process with certificates requires the header
`Authorization: Bearer TOKEN`. On loopback it requires no token. Without TLS it requires no token either, because the
connection would expose the token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from aiohttp import web

from paceline.calls.backoff import to_header
from paceline.calls.connection import is_loopback
from paceline.chat.messages import Json, Unsupported
from paceline.errors import (
    USUAL_S,
    AccessDenied,
    Busy,
    Conflict,
    InvalidInput,
    NotFound,
    NotPermitted,
    PacelineError,
    Unavailable,
)
from paceline.rate_limited_log import RateLimitedLog, unforeseen
from paceline.services.common.access.callers import Callers
from paceline.services.common.access.rights import CallerRole
from paceline.services.common.access.token_guard import Call, check_roles, status_of
from paceline.services.common.serving.http_listener import MAX_BODY_BYTES, Handler, HttpListener
from paceline.tls.folder import tls_folder

SCHEME = "Bearer "
MAX_TOKEN = 512


class HttpGuard:
    """Check of the requests at one HTTP port, whose callers must have one of `roles`."""

    def __init__(
        self,
        callers: Callers,
        roles: frozenset[CallerRole],
        seldom: RateLimitedLog,
        note: Callable[[Call], None] = lambda call: None,
    ) -> None:
        """`seldom` is the log for refused requests; `note` gets each refused request."""
        self._callers, self._roles, self._seldom, self._note = callers, roles, seldom, note

    async def check(self, request: web.Request) -> None:
        """Raise AccessDenied, NotPermitted or Unavailable unless the request may pass."""
        caller = None
        try:
            header = request.headers.get("Authorization", "")
            if not header.startswith(SCHEME) or len(header) > MAX_TOKEN:
                raise AccessDenied(
                    "this port requires a token, as the header `Authorization: Bearer TOKEN` (the api_key of a client of the "
                    "OpenAI API); an operator makes a token with `paceline token create`"
                )
            caller = await self._callers.caller(header.removeprefix(SCHEME).strip())
            check_roles(request.path[:80], self._roles, caller)
        except (AccessDenied, NotPermitted) as error:
            self._seldom.warning("http", "refused an HTTP request from %s: %s", request.remote, error)
            code = status_of(error) or grpc.StatusCode.INTERNAL
            self._note(Call(f"http{request.path[:80]}", caller, request.remote or "", None, code, str(error)))
            raise


def needs_token(host: str) -> bool:
    """Return whether a port on `host` accepts only requests with a token."""
    return tls_folder() is not None and not is_loopback(host)


class JsonListener(HttpListener):
    def __init__(self, name: str, remedy: str, *, guard: HttpGuard | None = None, **limits: Any) -> None:
        """`name` and `remedy` are for the message about a taken port; `limits` and `encrypted` are as in `HttpListener`. `guard`
        checks each request if `needs_token` is true."""
        self.app = web.Application(middlewares=[_with_errors, self._with_token], client_max_size=MAX_BODY_BYTES)
        self._guard, self._needs_token = guard, False
        super().__init__(self.app, name, remedy, **limits)

    async def start(self, host: str, port: int) -> int:
        self._needs_token = self._guard is not None and needs_token(host)
        return await super().start(host, port)

    async def body(self, request: web.Request) -> Any:
        """Return the JSON document in a request's body. Raises InvalidInput without one, Busy if too many bodies are
        being read."""
        # A web page can make a browser post text to a local port, but not JSON, which needs this server's consent.
        if request.content_type != "application/json":
            raise InvalidInput(f"the content type is {request.content_type!r}, but must be 'application/json'")
        content = await super().body(request)
        try:
            return json.loads(content)
        except ValueError as error:
            raise InvalidInput(f"the body is not JSON: {error}") from None
        except RecursionError:
            raise InvalidInput("the body is nested too deeply") from None

    @web.middleware
    async def _with_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._needs_token and self._guard is not None:
            await self._guard.check(request)
        return await handler(request)


def event_stream() -> web.StreamResponse:
    """Return a response of server-sent events, not prepared yet."""
    return web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"})


async def send_event(response: web.StreamResponse, event: Json, name: str = "") -> None:
    head = f"event: {name}\n".encode() if name else b""
    await response.write(head + b"data: " + json.dumps(event, allow_nan=False).encode() + b"\n\n")


@web.middleware
async def _with_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except PacelineError as error:
        status, body = error_answer(error)
        seconds = error.retry_after_s if isinstance(error, Busy) else USUAL_S
        headers = to_header(seconds) if status in (429, 503) else {}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return web.json_response(body, status=status, headers=headers)
    except web.HTTPException as error:
        routes = {
            f"{route.method} {route.resource.canonical}": None
            for route in request.app.router.routes()
            if route.resource
        }
        known = ", ".join(route for route in routes if not route.startswith("HEAD"))
        message = f"{request.method} {request.path[:200]}: {error.reason}; the routes of this server are {known}"
        return web.json_response(error_body(message, "invalid_request_error"), status=error.status)
    except Exception as error:  # any error is answered to its sender, and others continue to be served
        message = unforeseen.note(f"an HTTP {request.method}", error)
        return web.json_response(error_body(message, "server_error"), status=500)


STATUS: Sequence[tuple[type[PacelineError], int, str, str | None]] = (
    (Busy, 429, "rate_limit_error", "rate_limit_exceeded"),
    (AccessDenied, 401, "authentication_error", "invalid_api_key"),
    (NotPermitted, 403, "permission_error", None),
    (NotFound, 404, "invalid_request_error", "model_not_found"),
    (InvalidInput, 400, "invalid_request_error", None),
    (Conflict, 409, "conflict_error", None),
    (Unavailable, 503, "service_unavailable_error", None),
    (PacelineError, 500, "server_error", None),
)
"""HTTP status, type and code for each type of error; the first type that matches counts."""


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_answer(error: PacelineError) -> tuple[int, Json]:
    """Return status and body of an error that was raised on purpose."""
    status, kind, code = next(
        (status, kind, code) for error_type, status, kind, code in STATUS if isinstance(error, error_type)
    )
    param = error.field if isinstance(error, Unsupported) else "model" if status == 404 else None
    return status, error_body(str(error), kind, param, code)
