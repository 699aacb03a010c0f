"""Entries name who, what and whom; the content of requests is a digest."""

from __future__ import annotations

import hashlib
from typing import Any

import grpc

from paceline.services.common.access.rights import Caller, CallerRole
from paceline.services.common.access.token_guard import Call
from paceline.services.coordinator.audit_log.log import entry_of_call, entry_of_request
from paceline.v1 import registry_pb2, run_pb2, worker_pb2

ANN = Caller("ann", frozenset({CallerRole.SUBMITTER, CallerRole.VIEWER}), "0" * 64, "laptop")


def call(method: str, request: Any, code: grpc.StatusCode, details: str = "", answer: Any = None) -> Call:
    return Call(f"paceline.v1.{method}", ANN, "ipv4:10.0.0.3:41", request, code, details, "laptop", answer)


def test_a_call_that_changed_something_is_named_with_its_run() -> None:
    request = run_pb2.SubmitRequest(spec_yaml="data: {train: a-secret-prompt}")
    answer = run_pb2.SubmitResponse(run=run_pb2.Run(run_id="sums-1"))
    entry = entry_of_call(call("RunService/Submit", request, grpc.StatusCode.OK, answer=answer))
    assert (entry.what, entry.result, entry.who, entry.roles) == (
        "paceline.v1.RunService/Submit",
        "OK",
        "ann",
        ("submitter", "viewer"),
    )
    assert (entry.subject, entry.address, entry.certificate) == ("sums-1", "10.0.0.3:41", "laptop")
    digest = hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
    assert entry.request_sha256 == digest
    assert "secret" not in str(entry)


def test_a_promotion_is_named_with_its_model() -> None:
    request = registry_pb2.PromoteRequest(name="sums", version=3, alias="champion")
    assert entry_of_call(call("ModelService/Promote", request, grpc.StatusCode.OK)).subject == "sums"


def test_the_reason_of_a_refusal_is_kept_where_it_cannot_quote_the_request() -> None:
    cancel, hello = run_pb2.CancelRequest(run_id="sums-1"), worker_pb2.Hello(member_id="r-1", run_id="sums-1")
    connect = worker_pb2.ConnectRequest(hello=hello)
    for method, request, code, why, subject in (
        ("RunService/Cancel", cancel, grpc.StatusCode.PERMISSION_DENIED, "not yours", "sums-1"),
        ("RunService/Cancel", None, grpc.StatusCode.UNAUTHENTICATED, "no token", ""),
        ("WorkerService/Connect", connect, grpc.StatusCode.FAILED_PRECONDITION, "the id is taken", "r-1"),
    ):
        entry = entry_of_call(call(method, request, code, why))
        assert (entry.result, entry.why, entry.subject) == (code.name, why, subject)
    submit = run_pb2.SubmitRequest(spec_yaml="x")
    entry = entry_of_call(call("RunService/Submit", submit, grpc.StatusCode.INVALID_ARGUMENT, "key 'hunter2'"))
    assert (entry.result, entry.why) == ("INVALID_ARGUMENT", "")


def test_a_refused_request_to_the_exchange() -> None:
    entry = entry_of_request("", "r-1", "another key", "10.0.0.3:41")
    assert (entry.what, entry.result, entry.subject) == ("exchange/connection", "PERMISSION_DENIED", "r-1")
