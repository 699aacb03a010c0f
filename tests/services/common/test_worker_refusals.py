"""A worker's collector takes the calls that were refused because of who made them, and no others."""

from __future__ import annotations

import grpc
import pytest

from services.common.access.caller import Caller, CallerRole
from services.common.token_guard import Call
from services.common.worker_refusals import WorkerRefusals

ANN = Caller("ann", frozenset({CallerRole.VIEWER}))


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_calls_refused_because_of_their_caller_are_taken(code: grpc.StatusCode) -> None:
    refusals = WorkerRefusals()
    refusals.note_call(Call("x/Y", ANN, "ipv4:10.0.0.3:41", None, code, "not for ann"))
    message = refusals.take()
    if code not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        assert message is None
        return
    assert message is not None
    (found,) = message.refusals
    assert (found.what, found.result, found.address) == ("x/Y", code.name, "10.0.0.3:41")
    assert (found.who, found.why, found.count) == ("ann", "not for ann", 1)
