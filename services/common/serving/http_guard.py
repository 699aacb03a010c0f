"""The check of a request's token at an HTTP port: beyond this host, where the process has certificates.

`Authorization: Bearer TOKEN`, as clients of the OpenAI API send their key and Prometheus its credentials. On loopback, and without
TLS, a request needs no token: it would travel in the clear.
"""

from __future__ import annotations

from collections.abc import Callable

import grpc
from aiohttp import web

from paceline.calls.connection import is_loopback
from paceline.errors import AccessDenied, NotPermitted
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.common.access.caller import CallerRole
from paceline.services.common.access.callers import Callers
from paceline.services.common.access.token_guard import Call
from paceline.services.common.error_status import status_of
from paceline.tls.folder import tls_folder

SCHEME = "Bearer "
MAX_TOKEN = 512


class HttpGuard:
    """The check at one port, for callers with one of `roles`."""

    def __init__(
        self,
        callers: Callers,
        roles: frozenset[CallerRole],
        seldom: RateLimitedLog,
        note: Callable[[Call], None] = lambda call: None,
    ) -> None:
        """`seldom` writes a line for refused requests, `note` takes each of them."""
        self._callers, self._roles, self._seldom, self._note = callers, roles, seldom, note

    async def check(self, request: web.Request) -> None:
        """Raises AccessDenied, NotPermitted, Unavailable."""
        caller = None
        try:
            header = request.headers.get("Authorization", "")
            if not header.startswith(SCHEME) or len(header) > MAX_TOKEN:
                raise AccessDenied(
                    "this port requires a token, as the header `Authorization: Bearer TOKEN` (the api_key of a client of the "
                    "OpenAI API); an operator makes one with `paceline token create`"
                )
            caller = await self._callers.caller(header.removeprefix(SCHEME).strip())
            if not self._roles & caller.roles:
                allowed = ", ".join(role for role in CallerRole if role in self._roles)
                roles = ", ".join(sorted(caller.roles)) or "none"
                raise NotPermitted(
                    f"{request.path[:80]} is for the roles {allowed}; {caller.name} has {roles}"
                )
        except (AccessDenied, NotPermitted) as error:
            self._seldom.warning("http", "refused an HTTP request from %s: %s", request.remote, error)
            code = status_of(error) or grpc.StatusCode.INTERNAL
            self._note(Call(f"http{request.path[:80]}", caller, request.remote or "", None, code, str(error)))
            raise


def needs_token(host: str) -> bool:
    """Return whether a port on `host` takes requests with a token alone."""
    return tls_folder() is not None and not is_loopback(host)
