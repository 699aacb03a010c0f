"""The table of rights: a row for every method of every proto, and real servers that enforce it."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio
from episode_drivers import ENVIRONMENT
from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import MethodOptions

import paceline.v1
from paceline.calls.token import metadata
from paceline.services.common.access.callers import TokenCallers
from paceline.services.common.access.rights import RPCS, CallerRole
from paceline.services.common.access.token_guard import Call, TokenGuard, worker_guard
from paceline.services.common.access.token_table import create
from paceline.services.common.serving.grpc_server import GrpcServer
from paceline.services.coordinator.exchange.requests.table import KINDS
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.lifecycle.coordinator import Coordinator
from paceline.services.coordinator.main import CoordinatorService
from paceline.services.coordinator.members.registry import Members
from paceline.services.coordinator.records.servicer import RecordsServicer
from paceline.services.coordinator.servicers import AccessServicer
from paceline.services.learner.rank import LearnerServicer
from paceline.services.reward.main import RewardServicer
from paceline.services.rollout.servicer import RolloutServicer
from paceline.v1 import common_pb2, exchange_pb2, learner_pb2_grpc, reward_pb2_grpc
from paceline.v1 import rollout_pb2_grpc as rollout_grpc

DEADLINE_S = 60.0
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
PROVE = "paceline.v1.AccessService/Prove"
OF_WORKERS = ("RolloutService", "RewardService", "LearnerService")


def all_methods() -> Iterator[Any]:
    """Yield the descriptor of every method of every proto."""
    for found in pkgutil.iter_modules(paceline.v1.__path__):
        if found.name.endswith("_pb2"):
            module = importlib.import_module(f"{paceline.v1.__name__}.{found.name}")
            for service in module.DESCRIPTOR.services_by_name.values():
                yield from service.methods


METHODS = {f"{method.containing_service.full_name}/{method.name}": method for method in all_methods()}


def test_every_method_of_every_proto_has_a_row_and_every_row_a_method() -> None:
    assert METHODS
    assert set(RPCS) == set(METHODS)


def test_calls_without_side_effects_change_nothing_and_some_role_may_make_each() -> None:
    for path, method in METHODS.items():
        assert RPCS[path].roles, path
        if method.GetOptions().idempotency_level == MethodOptions.NO_SIDE_EFFECTS:
            assert not RPCS[path].changes, path
        if RPCS[path].own_run:
            assert "run_id" in method.input_type.fields_by_name, path


def test_every_kind_of_exchange_request_has_a_row() -> None:
    kinds = exchange_pb2.ExchangeRequest.DESCRIPTOR.oneofs_by_name["body"].fields
    assert set(KINDS) == {kind.name for kind in kinds}


@pytest.fixture
def noted() -> list[Call]:
    """Calls that the coordinator's guard gave to the audit log."""
    return []


@pytest_asyncio.fixture
async def ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: list[Call]) -> AsyncIterator[tuple[int, int]]:
    """A coordinator's server, and a worker's with all workers' services, whose token has the role worker."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    coordinator = Coordinator(ledger, tmp_path, Members(60.0), "127.0.0.1", 0)
    callers = TokenCallers(lambda: "boot", tmp_path / "token", tmp_path / "tokens.json")
    server = GrpcServer("127.0.0.1", 0, TokenGuard(callers, ledger.submitter, noted.append))
    records = RecordsServicer(ledger.path, coordinator.members, coordinator.committed)
    service = cast(Any, SimpleNamespace(capacity=None))
    access = AccessServicer(callers)
    CoordinatorService._add_servicers(service, server, coordinator, records, access, "tcp://127.0.0.1:1")
    (tmp_path / "worker").write_text(create(tmp_path / "tokens.json", "w", CallerRole.WORKER, 0.0))
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(tmp_path / "worker"))
    workers = GrpcServer("127.0.0.1", 0, worker_guard(f"127.0.0.1:{server.port}"))
    nobody = cast(Any, SimpleNamespace())
    workers.add(LearnerServicer(nobody), learner_pb2_grpc.add_LearnerServiceServicer_to_server, "l")
    workers.add(RewardServicer(nobody), reward_pb2_grpc.add_RewardServiceServicer_to_server, "r")
    workers.add(RolloutServicer(nobody), rollout_grpc.add_RolloutServiceServicer_to_server, "g")
    await server.start()
    await workers.start()
    yield server.port, workers.port
    await coordinator.end_streams()
    await workers.stop(0.0)
    await server.stop(0.0)
    await records.close()
    coordinator.close()
    ledger.close()


async def code_of(channel: grpc.aio.Channel, method: Any, token: str) -> grpc.StatusCode:
    """Call a method with an empty request and return the status."""
    kind = ("stream" if method.client_streaming else "unary") + "_" + ("stream" if method.server_streaming else "unary")
    call = getattr(channel, kind)(f"/{method.containing_service.full_name}/{method.name}")
    content = message_factory.GetMessageClass(method.input_type)().SerializeToString()
    request = iter([content]) if method.client_streaming else content
    answer = call(request, metadata=metadata(token), timeout=DEADLINE_S)
    try:
        await (answer.read() if method.server_streaming else answer)
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        answer.cancel()
    return grpc.StatusCode.OK


async def test_real_servers_permit_and_note_what_the_table_says(
    ports: tuple[int, int], tmp_path: Path, noted: list[Call]
) -> None:
    tokens = {role: create(tmp_path / "tokens.json", f"one-{role.value}", role, 0.0) for role in CallerRole}
    permitted: dict[str, set[CallerRole]] = {path: set() for path in METHODS}
    async with asyncio.timeout(10 * DEADLINE_S):
        for port, is_worker in zip(ports, (False, True), strict=True):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                for path, method in METHODS.items():
                    if path == PROVE:
                        continue  # strangers may ask for a server's proof
                    if (method.containing_service.name in OF_WORKERS) != is_worker:
                        continue
                    for nobody in ("", "plt_unknown"):
                        assert await code_of(channel, method, nobody) is grpc.StatusCode.UNAUTHENTICATED, path
                    for role, token in tokens.items():
                        code = await code_of(channel, method, token)
                        assert code is not grpc.StatusCode.UNAUTHENTICATED, (path, role)
                        assert code is not grpc.StatusCode.UNIMPLEMENTED, path
                        if code not in REFUSED:
                            permitted[path].add(role)
        wanted = set(_calls_to_note())
        while True:
            found = {_fact(call) for call in noted}
            if found >= wanted:
                break
            await asyncio.sleep(0.01)  # the note of the last call may come after its answer
    assert permitted == {path: set(right.roles) for path, right in RPCS.items()} | {PROVE: set()}
    # A worker's service identifies its callers with its token.
    assert {fact for fact in found if fact[1] != "w"} == wanted


def _fact(call: Call) -> tuple[str, str, str]:
    refused = call.code.name if call.code in (grpc.StatusCode.UNAUTHENTICATED, *REFUSED) else "permitted"
    return call.method, call.caller.name if call.caller else "", refused


def _calls_to_note() -> Iterator[tuple[str, str, str]]:
    """Yield method, caller and result of each call of the test that a coordinator has to note."""
    for path, method in METHODS.items():
        if method.containing_service.name in OF_WORKERS or path == PROVE:
            continue
        yield path, "", "UNAUTHENTICATED"
        for role in CallerRole:
            if role not in RPCS[path].roles:
                yield path, f"one-{role.value}", "PERMISSION_DENIED"
            elif RPCS[path].changes:
                yield path, f"one-{role.value}", "permitted"


ROLES = [role for role in common_pb2.Role.values() if role != common_pb2.ROLE_UNSPECIFIED]


def test_the_exchange_permits_what_the_table_says(make_world: Any) -> None:
    """A run's leases are either rollout workers' or environment workers', so both kinds of runs are tried."""
    permitted: dict[str, set[int]] = {kind: set() for kind in KINDS}
    for sections in ({}, ENVIRONMENT):
        world = make_world(**sections)
        for kind in KINDS:
            for role in ROLES:
                member_id = f"m-{kind}-{role}"
                world.enter(member_id, role)
                request = exchange_pb2.ExchangeRequest(request_id=1, member_id=member_id)
                getattr(request, kind).SetInParent()
                arrived = world.send(request)
                message = arrived.reply.message
                if "worker may send" not in message and "has no environment" not in message:
                    permitted[kind].add(role)
    assert permitted == {name: set(kind.roles) for name, kind in KINDS.items()}
