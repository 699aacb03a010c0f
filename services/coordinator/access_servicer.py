"""The control plane's AccessService: the callers of the workers' own services, by the digests of their tokens."""

from __future__ import annotations

from typing import Any

import grpc

from paceline.errors import AccessDenied, InvalidInput
from protos.paceline.v1 import access_pb2, access_pb2_grpc
from services.common.access.callers import TokenCallers
from services.common.grpc_server import with_status

SHA256_BYTES = 32
Context = grpc.aio.ServicerContext[Any, Any]


class AccessServicer(access_pb2_grpc.AccessServiceServicer):
    """The callers of one coordinator."""

    def __init__(self, callers: TokenCallers):
        self._callers = callers

    @with_status
    async def Identify(
        self, request: access_pb2.IdentifyRequest, context: Context
    ) -> access_pb2.IdentifyResponse:
        if len(request.token_sha256) != SHA256_BYTES:
            raise InvalidInput(f"token_sha256 has {len(request.token_sha256)} bytes, must be {SHA256_BYTES}")
        try:
            caller = self._callers.by_digest(request.token_sha256.hex())
        except AccessDenied as denied:
            return access_pb2.IdentifyResponse(refusal=str(denied))
        if caller is None:
            return access_pb2.IdentifyResponse()
        return access_pb2.IdentifyResponse(name=caller.name, roles=sorted(caller.roles))
