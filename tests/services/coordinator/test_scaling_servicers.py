"""The status over real gRPC, and the sizes of pools over real HTTP, as serving.py adds them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from control_plane import Plane, learner
from yarl import URL

from paceline.errors import AccessDenied
from paceline.services.common.access.rights import Caller, CallerRole
from paceline.services.common.serving import json_http
from paceline.services.common.serving.scrape import metrics_endpoint
from paceline.services.coordinator.servicers import StatusServicer
from paceline.v1 import status_pb2, status_pb2_grpc

CALLERS = {role.value: role for role in CallerRole}


class Callers:
    """A caller for each role; the token of each is its role."""

    async def caller(self, token: str, certificate: str = "") -> Caller:
        if token not in CALLERS:
            raise AccessDenied("the call has another token")
        return Caller(token, frozenset({CALLERS[token]}))


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    made = Plane(tmp_path)
    made.server.add(
        StatusServicer(made.coordinator),
        status_pb2_grpc.add_StatusServiceServicer_to_server,
        "paceline.v1.StatusService",
    )
    await made.start()
    yield made
    await made.stop()


async def scale(plane: Plane, path: str, token: str = "", method: str = "GET") -> tuple[int, Any]:
    """Return status and document of a request to the port of `/metrics`."""
    desired = plane.coordinator.scaler.desired
    async with (
        metrics_endpoint("127.0.0.1", 0, Callers(), desired=desired) as port,
        ClientSession(headers={"Authorization": f"Bearer {token}"} if token else {}) as client,
        client.request(method, URL(f"http://127.0.0.1:{port}{path}", encoded=True)) as answer,
    ):
        return answer.status, await answer.json(content_type=None)


async def test_a_pool_has_one_number_also_without_a_run_and_a_run_activates_it(plane: Plane) -> None:
    status, answer = await scale(plane, "/scale/rollout")
    assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
    assert "keep the present sizes" in answer["error"]["message"], "nothing is decided yet: KEDA keeps its size"
    await plane.coordinator.scaler.check()
    for pool in ("rollout", "reward", "environment"):
        assert await scale(plane, f"/scale/{pool}") == (200, {"desired": 0})
    await plane.run_one()
    await plane.coordinator.scaler.check()
    assert await scale(plane, "/scale/rollout") == (200, {"desired": 1})
    assert await scale(plane, "/scale/environment") == (200, {"desired": 0}), "the run needs none"


@pytest.mark.parametrize(
    ("token", "status"),
    [("viewer", 200), ("operator", 200), ("scraper", 200), ("worker", 403), ("nobody", 401), ("", 401)],
)
async def test_a_reader_needs_the_token_of_a_viewer(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, token: str, status: int
) -> None:
    monkeypatch.setattr(json_http, "needs_token", lambda host: True)
    await plane.coordinator.scaler.check()
    assert (await scale(plane, "/scale/rollout", token))[0] == status
    unknown = 404 if status == 200 else status
    assert (await scale(plane, "/scale/nothing", token))[0] == unknown, "a stranger learns no names of pools"


@pytest.mark.parametrize(
    "path",
    [
        "/scale/learner",
        "/scale/Rollout",
        "/scale/rollout%2F..",
        "/scale/..%2Fmetrics",
        "/scale/%00",
        "/scale/%FF%FE",
        "/scale/rollout%0d%0aX:%20y",
        "/scale/" + "x" * 4000,
    ],
)
async def test_unknown_pools_are_answered_with_those_that_are_there(plane: Plane, path: str) -> None:
    await plane.coordinator.scaler.check()
    status, answer = await scale(plane, path)
    assert status == 404
    message = answer["error"]["message"]
    assert message.endswith("; the pools are environment, reward, rollout")
    assert len(message) < 400
    assert "\n" not in message
    assert not any(sized.requested_s for sized in plane.coordinator.scaler.report().pools.values())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/scale/rollout", 405),
        ("PUT", "/scale/rollout", 405),
        ("GET", "/scale", 404),
        ("GET", "/scale/", 404),
        ("GET", "/scale/rollout/", 404),
        ("GET", "/scale/rollout/desired", 404),
    ],
)
async def test_nothing_else_is_there(plane: Plane, method: str, path: str, status: int) -> None:
    await plane.coordinator.scaler.check()
    assert (await scale(plane, path, method=method))[0] == status


async def test_a_query_sets_nothing(plane: Plane) -> None:
    await plane.coordinator.scaler.check()
    assert await scale(plane, "/scale/reward?minWorkers=9&maxWorkers=9") == (200, {"desired": 0})


async def test_the_status_names_run_advice_and_pools(plane: Plane) -> None:
    stub = status_pb2_grpc.StatusServiceStub(plane.channel)
    await plane.coordinator.scaler.check()
    nothing = await stub.Status(status_pb2.StatusRequest())
    assert (nothing.run_id, nothing.advice, list(nothing.pools)) == ("", "no run trains on groups now", [])
    run = await plane.run_one()
    worker = learner(plane)
    await worker.hear("run")
    await plane.coordinator.scaler.check()
    status = await stub.Status(status_pb2.StatusRequest())
    assert (status.run_id, status.state, status.step) == (run.run_id, "running", 0)
    assert status.max_num_steps == run.max_num_steps
    assert status.advice.startswith("no rollout worker takes work: start a worker")
    assert {pool.name: pool.ready for pool in status.pools} == {"rollout": 0, "reward": 0}
    worker.hang_up()
