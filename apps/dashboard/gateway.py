"""The REST interface: every call of the coordinator as JSON over HTTP, streams as server-sent events.

Promise: each request gets the call's response or Connect's error (code and message), and no request ends the service.
The caller's role decides which calls it may make; the coordinator applies its own access table to a named token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from aiohttp import web
from google.protobuf import json_format

from paceline.apps.dashboard.backends import Backend, Method, methods
from paceline.calls.backoff import from_error, to_header
from paceline.calls.proof import is_unproven, token_id
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
from paceline.rate_limited_log import unforeseen
from paceline.services.common.access.page_keys import Access, Role
from paceline.services.common.access.rights import CallerRole
from paceline.services.common.access.token_table import PREFIX, digest_of
from paceline.v1 import access_pb2

STATUS = {
    "canceled": 499,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "aborted": 409,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "unauthenticated": 401,
}
"""Maps an error code to its HTTP status, as in Connect; other codes get 500."""

CODES = (
    (InvalidInput, "invalid_argument"),
    (NotFound, "not_found"),
    (Conflict, "failed_precondition"),
    (Busy, "resource_exhausted"),
    (Unavailable, "unavailable"),
    (AccessDenied, "unauthenticated"),
    (NotPermitted, "permission_denied"),
    (PacelineError, "internal"),
)
Read = Callable[[web.Request], Awaitable[bytes]]
IDENTIFY = "paceline.v1.AccessService/Identify"
MAX_STREAMS = 64
"""Largest number of streams open at a time; each holds a stream of the coordinator."""


class Refused(Exception):
    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code
        self.message = message


class Gateway:
    def __init__(self, backend: Backend, access: Access):
        self._backend = backend
        self._access = access
        self._methods = methods()
        self._streams = 0

    async def role(self, request: web.Request) -> Role:
        """Return the role of a request; the coordinator names the role of each token that it has made. Raises Refused
        for a request without a valid key or token, and grpc.aio.AioRpcError if the coordinator does not answer."""
        role = self._access.role(request.headers.get("Authorization", ""))
        if role is Role.NOBODY and (token := _named_token(request)):
            query = access_pb2.IdentifyRequest(token_id=token_id(bytes.fromhex(digest_of(token))))
            try:
                found = await self._backend.call(self._methods[IDENTIFY], query, token)
            except grpc.aio.AioRpcError as error:
                if not is_unproven(error):
                    raise
                found = access_pb2.IdentifyResponse()  # the coordinator does not know the caller's token
            steers = {CallerRole.SUBMITTER, CallerRole.OPERATOR} & set(found.roles)
            role = Role.OPERATOR if steers else Role.READER if CallerRole.VIEWER in found.roles else role
            role = self._access.limited(role)
        if role is Role.NOBODY:
            raise Refused(
                "unauthenticated",
                "the request has no valid key; send `Authorization: Bearer` with the coordinator's token, or with the key in a "
                "link that `paceline serve dashboard` prints",
            )
        return role

    async def answer(self, request: web.Request, read: Read = web.Request.read) -> web.StreamResponse:
        """Answer `POST /package.Service/Method`; `read` returns the body. Raises Refused, PacelineError, AioRpcError."""
        role, token = await self.role(request), _named_token(request)
        path = f"{request.match_info['service']}/{request.match_info['method']}"
        method = self._methods.get(path)
        if method is None:
            raise Refused("not_found", f"there is no call {path[:120]!r}; /openapi.json lists all calls")
        if not method.only_reads and role < Role.OPERATOR:
            raise Refused("permission_denied", f"{method.path} changes state, and this key is read-only")
        message = await _message(request, method, read)
        if method.streams:
            return await self._stream(request, method, message, token)
        response = await self._backend.call(method, message, token)
        return web.Response(text=_json(response), content_type="application/json")

    async def _stream(self, request: web.Request, method: Method, message: Any, token: str) -> web.StreamResponse:
        if self._streams >= MAX_STREAMS:
            raise Refused(
                "resource_exhausted",
                f"{self._streams} streams are open, and more are not allowed; close one, or try again later",
            )
        self._streams += 1
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        try:
            await response.prepare(request)
            try:
                async for part in self._backend.stream(method, message, token):
                    await response.write(f"data: {_json(part)}\n\n".encode())
                await response.write(b"event: end\ndata: {}\n\n")
            except ConnectionResetError:  # the caller has disconnected
                return response
            except Exception as error:
                _, body = error_body(error)
                await response.write(f"event: error\ndata: {json.dumps(body)}\n\n".encode())
        finally:
            self._streams -= 1
        return response


def _named_token(request: web.Request) -> str:
    """Return the request's token if `paceline token create` made it, else an empty text."""
    sent = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return sent if sent.startswith(PREFIX) else ""


async def _message(request: web.Request, method: Method, read: Read) -> Any:
    # A web page can make a browser post plain text to a local port; JSON needs this server's consent (CORS).
    if request.content_type != "application/json":
        raise Refused("invalid_argument", f"content type {request.content_type!r} must be 'application/json'")
    try:
        text = (await read(request)).decode()
        message = method.request()
        json_format.Parse(text or "{}", message, max_recursion_depth=32)
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(
            "invalid_argument", f"the body is not a valid {method.request.DESCRIPTOR.name}: {error}"
        ) from None
    return message


def _json(message: Any) -> str:
    text: str = json_format.MessageToJson(message, indent=None, always_print_fields_with_no_presence=True)
    return text


def retry_header(error: Exception) -> dict[str, str] | None:
    """Return the header that says when to retry a refused request; None for any other error."""
    if isinstance(error, Busy):
        return to_header(error.retry_after_s)
    if isinstance(error, grpc.aio.AioRpcError) and (seconds := from_error(error)) is not None:
        return to_header(seconds)
    return to_header(USUAL_S) if isinstance(error, Refused) and error.code == "resource_exhausted" else None


def error_body(error: Exception) -> tuple[int, dict[str, str]]:
    match error:
        case Refused():
            code, message = error.code, error.message
        case grpc.aio.AioRpcError():
            code = error.code().name.lower().replace("cancelled", "canceled")
            message = error.details() or ""
            if code == "unavailable":
                message = f"the coordinator does not answer: {message}"
        case PacelineError():
            code, message = next(name for kind, name in CODES if isinstance(error, kind)), str(error)
        case web.HTTPException():
            return error.status, {"code": "invalid_argument", "message": error.reason}
        case asyncio.TimeoutError():
            code, message = "deadline_exceeded", "the request timed out"
        case _:
            code, message = "internal", unforeseen.note("a request to the dashboard", error)
    return STATUS.get(code, 500), {"code": code, "message": message}
