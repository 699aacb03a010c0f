"""The callers of a worker's services: the coordinator says who they are, by the digests of their tokens.

An answer counts for FRESH_S, so a revoked token is refused within that time. While the coordinator does not answer, its last
answer counts for KEPT_S, and a caller with the worker's own token is a worker.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass

import grpc

from paceline.calls.token import VARIABLE, is_same, metadata, read_token, token_path
from paceline.errors import AccessDenied, Unavailable
from paceline.services.common.access.caller import Caller, CallerRole
from paceline.services.common.access.callers import ALL_ROLES
from paceline.services.common.access.token_table import BOOTSTRAP, digest_of
from paceline.tls.channels import open_aio_channel
from paceline.v1 import access_pb2, access_pb2_grpc

FRESH_S = 2.0
KEPT_S = 300.0
CALL_S = 5.0
MAX_KEPT = 1024
"""Answers that are kept, the newest."""
OWN_TOKEN = "the worker's own token (the coordinator does not answer)"
"""Name of a caller of whom nothing else is known."""
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True)
class _Answer:
    caller: Caller | None
    refusal: str
    time_s: float


class WorkerCallers:
    """The callers of one worker."""

    def __init__(self, coordinator: str):
        """`coordinator` is its address; empty: none, and the worker's own token alone counts, with every role."""
        self._coordinator = coordinator
        self._answers: OrderedDict[str, _Answer] = OrderedDict()

    async def caller(self, token: str, certificate: str = "") -> Caller:
        """Return the caller with a token. Raises AccessDenied, Unavailable."""
        own = read_token(token_path())
        if not own or not token:
            raise AccessDenied(_refusal(has_own=bool(own)))
        digest, is_own = digest_of(token), is_same(token, own)
        if not self._coordinator:
            if is_own:
                return Caller(BOOTSTRAP, ALL_ROLES, digest)
            raise AccessDenied(_refusal(has_own=True, is_other=True))
        answer = await self._answer(digest, own, is_own=is_own)
        if answer.caller is None:
            raise AccessDenied(answer.refusal or _refusal(has_own=True, is_other=True))
        return answer.caller

    async def _answer(self, digest: str, own: str, *, is_own: bool) -> _Answer:
        kept, now_s = self._answers.get(digest), time.monotonic()
        if kept is not None and now_s - kept.time_s < FRESH_S:
            return kept
        try:
            found = await self._ask(digest, own)
        except grpc.aio.AioRpcError as error:
            if (
                error.code() is grpc.StatusCode.UNIMPLEMENTED and is_own
            ):  # a coordinator with one token for all
                return _Answer(Caller(BOOTSTRAP, ALL_ROLES, digest), "", now_s)
            if error.code() in AWAY and kept is not None and now_s - kept.time_s < KEPT_S:
                return kept
            if error.code() in AWAY and is_own:
                return _Answer(Caller(OWN_TOKEN, frozenset({CallerRole.WORKER}), digest), "", now_s)
            raise Unavailable(
                f"this worker cannot ask the coordinator at {self._coordinator} about the call's token: "
                f"{error.code().name.lower()}"
            ) from None
        self._answers[digest] = found
        self._answers.move_to_end(digest)
        while len(self._answers) > MAX_KEPT:
            self._answers.popitem(last=False)
        return found

    async def _ask(self, digest: str, own: str) -> _Answer:
        request = access_pb2.IdentifyRequest(token_sha256=bytes.fromhex(digest))
        async with open_aio_channel(self._coordinator) as channel:
            stub = access_pb2_grpc.AccessServiceStub(channel)
            async with asyncio.timeout(2 * CALL_S):
                answer = await stub.Identify(request, timeout=CALL_S, metadata=metadata(own))
        known = frozenset(CallerRole(role) for role in answer.roles if role in set(CallerRole))
        caller = Caller(answer.name, known, digest) if answer.name else None
        return _Answer(caller, answer.refusal, time.monotonic())


def _refusal(*, has_own: bool, is_other: bool = False) -> str:
    file = token_path().resolve()
    if not has_own:
        why = f"this service has no token: its file {file} is not there, so it refuses every call"
    else:
        why = f"the call has {'another' if is_other else 'no'} token; this service requires the token in its file {file}"
    return f"{why}. Give that file with --token-file or {VARIABLE}"
