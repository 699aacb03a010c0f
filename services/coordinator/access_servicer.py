"""The control plane's AccessService: the callers of the workers' own services, by the digests of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from paceline.errors import AccessDenied, InvalidInput
from paceline.services.common.access.callers import TokenCallers
from paceline.services.common.access.rights import current_caller
from paceline.services.common.access.token_guard import Call
from paceline.services.common.serving.grpc_server import with_status
from paceline.v1 import access_pb2, access_pb2_grpc

SHA256_BYTES = 32
IDENTIFY = "paceline.v1.AccessService/Identify"
Context = grpc.aio.ServicerContext[Any, Any]


class AccessServicer(access_pb2_grpc.AccessServiceServicer):
    """The callers of one coordinator."""

    def __init__(self, callers: TokenCallers, note: Callable[[Call], None] = lambda call: None):
        """`note` takes questions about tokens that are nobody's, or do not count any more."""
        self._callers, self._note = callers, note

    @with_status
    async def Identify(
        self, request: access_pb2.IdentifyRequest, context: Context
    ) -> access_pb2.IdentifyResponse:
        if len(request.token_sha256) != SHA256_BYTES:
            raise InvalidInput(f"token_sha256 has {len(request.token_sha256)} bytes, must be {SHA256_BYTES}")
        try:
            caller = self._callers.by_digest(request.token_sha256.hex())
        except AccessDenied as denied:
            self._note_refusal(request, context, str(denied))
            return access_pb2.IdentifyResponse(refusal=str(denied))
        if caller is None:
            self._note_refusal(request, context, "it is no token of this coordinator")
            return access_pb2.IdentifyResponse()
        return access_pb2.IdentifyResponse(name=caller.name, roles=sorted(caller.roles))

    def _note_refusal(self, request: access_pb2.IdentifyRequest, context: Context, why: str) -> None:
        asker = current_caller()
        details = f"a service of {asker.name if asker else 'a worker'} was called with a token: {why}"
        code = grpc.StatusCode.UNAUTHENTICATED
        self._note(Call(IDENTIFY, asker, context.peer(), request, code, details))
