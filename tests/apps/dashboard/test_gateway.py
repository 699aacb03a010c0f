"""The REST interface against a real coordinator and against a ledger: every call, roles, errors, streams, the document."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from control_plane import Plane
from openapi_spec_validator import validate
from trained_ledger import RUN_ID, Writer

from paceline.apps.dashboard.app import HEADERS, Dashboard, Pieces
from paceline.apps.dashboard.backends import Backend, CoordinatorBackend, methods
from paceline.apps.dashboard.gateway import Gateway
from paceline.calls.proof import unproven
from paceline.services.common.access.page_keys import Access, Role
from paceline.services.local import ledger_calls
from paceline.services.local.ledger_calls import LedgerCalls

RUNS, RECORDS = "paceline.v1.RunService", "paceline.v1.RecordsService"


class Asking:
    """A client of a dashboard, with the key of a role."""

    def __init__(self, session: aiohttp.ClientSession, base: str, access: Access):
        self._session, self.base, self._access = session, base, access

    async def call(self, path: str, body: Any, role: Role = Role.OPERATOR) -> tuple[int, Any]:
        """Return status and JSON of a call."""
        headers = {"Authorization": f"Bearer {self._access.key(role)}"} if role else {}
        async with self._session.post(f"{self.base}/{path}", json=body, headers=headers) as response:
            return response.status, await response.json()

    async def stream(self, path: str, body: Any) -> list[str]:
        """Return the lines of a stream until it ends."""
        headers = {"Authorization": f"Bearer {self._access.key(Role.READER)}"}
        async with self._session.post(f"{self.base}/{path}", json=body, headers=headers) as response:
            assert response.content_type == "text/event-stream"
            return (await response.text()).splitlines()

    async def get(self, path: str, **headers: str) -> aiohttp.ClientResponse:
        """Return a response, whose body was read."""
        async with self._session.get(f"{self.base}{path}", headers=headers) as response:
            await response.read()
            return response


@asynccontextmanager
async def asking(backend: Backend, folder: Path) -> AsyncIterator[Asking]:
    access = Access(folder / "no-token")
    dashboard = Dashboard(Gateway(backend, access), Pieces(backend))
    port = await dashboard.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:
            yield Asking(session, f"http://127.0.0.1:{port}", access)
    finally:
        await dashboard.close()
        await backend.close()


@pytest.fixture
def ledger_path(tmp_path: Path) -> Iterator[Path]:
    writer = Writer(tmp_path, str(tmp_path / "model"))
    writer.train_a_step()
    with writer.ledger.transaction():
        writer.ledger.add_event(RUN_ID, "step", {"step": 0, "reward": 0.625})
    yield writer.ledger.path
    writer.ledger.close()


async def test_runs_are_submitted_watched_and_cancelled(plane: Plane, tmp_path: Path) -> None:
    run = await plane.submit()
    backend = CoordinatorBackend(f"127.0.0.1:{plane.server.port}", tmp_path / "none")
    async with asking(backend, tmp_path) as asked:
        status, answer = await asked.call(f"{RUNS}/List", {}, Role.READER)
        assert (status, answer["runs"][0]["runId"]) == (200, run.run_id)
        status, answer = await asked.call(f"{RUNS}/Submit", {"specYaml": "grpo: {num_prompts_per_stepp: 2}"})
        assert (status, answer["code"]) == (400, "invalid_argument")
        assert "num_prompts_per_step" in answer["message"]
        status, answer = await asked.call(f"{RUNS}/Cancel", {"run_id": run.run_id}, Role.READER)
        assert (status, answer["code"]) == (403, "permission_denied")
        status, answer = await asked.call(f"{RUNS}/Cancel", {"run_id": run.run_id})
        assert (status, answer["run"]["state"]) == (200, "RUN_STATE_CANCELLED")
        lines = await asked.stream(f"{RUNS}/Watch", {"runId": run.run_id})
        events = [json.loads(line[6:]) for line in lines if line.startswith('data: {"s')]
        assert json.loads(events[-1]["json"])["state"] == "cancelled"
        assert lines[-3:] == ["event: end", "data: {}", ""] or lines[-2:] == ["event: end", "data: {}"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "text"),
    [
        (f"{RUNS}/Get", {"runId": "nosuch"}, 404, "not_found", "no run 'nosuch'"),
        (f"{RUNS}/Get", {"rnId": "x"}, 400, "invalid_argument", 'no field named "rnId"'),
        (f"{RUNS}/Get", [1], 400, "invalid_argument", "the body is not a valid GetRequest"),
        (f"{RUNS}/Nothing", {}, 404, "not_found", "/openapi.json lists all calls"),
        ("grpc.health.v1.Health/Check", {}, 404, "not_found", "no call"),
        (f"{RECORDS}/GetMetrics", {"runId": "x", "maxPoints": -1}, 400, "invalid_argument", "maxPoints"),
        (
            f"{RECORDS}/ListSamples",
            {"runId": RUN_ID, "state": "x"},
            400,
            "invalid_argument",
            "must be one of",
        ),
        (f"{RUNS}/Pause", {"runId": RUN_ID}, 503, "unavailable", "needs a coordinator"),
    ],
)
async def test_errors_have_a_code_and_a_message(
    ledger_path: Path, tmp_path: Path, path: str, body: Any, status: int, code: str, text: str
) -> None:
    async with asking(LedgerCalls(ledger_path), tmp_path) as asked:
        found, answer = await asked.call(path, body)
    assert (found, answer["code"]) == (status, code)
    assert text in answer["message"]


async def test_a_ledger_answers_every_call_that_reads_runs(ledger_path: Path, tmp_path: Path) -> None:
    async with asking(LedgerCalls(ledger_path), tmp_path) as asked:
        for method in methods().values():
            if not method.only_reads or method.streams or not method.path.startswith((RUNS, RECORDS)):
                continue
            body = {"runId": RUN_ID} if "run_id" in method.request.DESCRIPTOR.fields_by_name else {}
            if method.path.endswith("CompareSpecs"):
                body["otherRunId"] = RUN_ID
            status, answer = await asked.call(method.path, body, Role.READER)
            assert status == 200, (method.path, answer)
        _, answer = await asked.call(f"{RECORDS}/GetMetrics", {"runId": RUN_ID, "names": ["reward"]})
        assert answer["series"][0]["values"] == [0.625]
        assert answer["times"] == ["NaN"]
        lines = await asked.stream(f"{RUNS}/Watch", {"runId": RUN_ID})
        assert json.loads(lines[0][6:])["kind"] == "step"
        assert "event: end" in lines
        lines = await asked.stream(f"{RUNS}/Watch", {"runId": "nosuch"})
        assert lines[0] == "event: error"
        assert json.loads(lines[1][6:])["code"] == "not_found"


async def test_strangers_get_files_and_nothing_else(ledger_path: Path, tmp_path: Path) -> None:
    async with asking(LedgerCalls(ledger_path), tmp_path) as asked:
        status, answer = await asked.call(f"{RUNS}/List", {}, Role.NOBODY)
        assert (status, answer["code"]) == (401, "unauthenticated")
        assert (await asked.get("/session")).status == 401
        for path in ("/", "/static/vendor/uPlot.esm.js", "/openapi.json"):
            response = await asked.get(path)
            assert response.status == 200, path
            assert {name: response.headers.get(name) for name in HEADERS} == HEADERS
        for path in ("/static/../main.py", "/static/%2e%2e/main.py", "/static/..%2fmain.py"):
            assert (await asked.get(path)).status in (403, 404)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{asked.base}/{RUNS}/List", data="{}", headers={"Content-Type": "text/plain"}) as response,
        ):
            assert response.status == 401


async def test_tokens_without_a_tokenizer_here_have_no_text(ledger_path: Path, tmp_path: Path) -> None:
    async with asking(LedgerCalls(ledger_path), tmp_path) as asked:
        status, answer = await asked.call("tokens", {"runId": RUN_ID, "ids": [1, 2]}, Role.READER)
        assert (status, answer["texts"]) == (200, None)
        assert "is not in a folder on this machine" in answer["message"]
        for body in ([], {"runId": 1}, {"runId": RUN_ID, "ids": [-1]}, {"runId": RUN_ID, "ids": ["x"]}):
            assert (await asked.call("tokens", body))[0] == 400
        assert (await asked.call("tokens", {"runId": RUN_ID, "ids": [1]}, Role.NOBODY))[0] == 401


async def test_an_absent_coordinator_is_named(tmp_path: Path) -> None:
    async with asking(CoordinatorBackend("127.0.0.1:1", tmp_path / "none"), tmp_path) as asked:
        status, answer = await asked.call(f"{RUNS}/List", {})
        assert (status, answer["code"]) == (503, "unavailable")
        assert "the coordinator does not answer" in answer["message"]


async def test_the_document_is_valid_and_whole(ledger_path: Path, tmp_path: Path) -> None:
    async with asking(LedgerCalls(ledger_path), tmp_path) as asked:
        response = await asyncio.wait_for(asked.get("/openapi.json"), 20)
        document = json.loads(await response.text())
    validate(document)
    assert document["paths"].keys() == {f"/{path}" for path in methods()}
    without = [path for path, item in document["paths"].items() if not item["post"]["summary"]]
    assert without == []
    schemas = document["components"]["schemas"]
    fields = [
        (name, field)
        for name, schema in schemas.items()
        if name.startswith("paceline.v1.")
        for field, value in schema["properties"].items()
        if not value.get("description") and "$ref" not in value
    ]
    assert fields == []


def test_every_call_that_reads_says_so() -> None:
    reads = {path for path, method in methods().items() if method.only_reads}
    assert {path for path in methods() if path.startswith(f"{RECORDS}/")} <= reads
    assert {f"{RUNS}/{name}" for name in ("Get", "List", "Watch")} <= reads
    for name in ("Submit", "Cancel", "Pause", "Resume", "DropGroups", "Checkpoint"):
        assert f"{RUNS}/{name}" not in reads
    assert "paceline.v1.WorkerService/Drain" not in reads
    assert "paceline.v1.BundleService/Missing" not in reads


def test_no_key_of_the_page_gets_a_ticket_or_a_proof_of_the_dashboards_token() -> None:
    assert [path for path in methods() if path.startswith("paceline.v1.AccessService/")] == [
        "paceline.v1.AccessService/Identify"
    ]


async def test_records_are_compared_while_others_are_read(
    ledger_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison takes minutes for a large run, so it is not on the thread that reads."""
    may_begin, compare = asyncio.Event(), ledger_calls.verify_apart

    async def late(*arguments: Any) -> Any:
        await may_begin.wait()
        return await compare(*arguments)

    monkeypatch.setattr(ledger_calls, "verify_apart", late)
    async with asking(LedgerCalls(ledger_path), tmp_path) as dashboard:
        comparing = asyncio.create_task(dashboard.call(f"{RECORDS}/VerifyRun", {"runId": RUN_ID}, Role.READER))
        status, books = await dashboard.call(f"{RECORDS}/GetBooks", {"runId": RUN_ID}, Role.READER)
        assert (status, bool(books)) == (200, True)
        may_begin.set()
        status, report = await comparing
        assert (status, report["problems"]) == (200, [])
        status, error = await dashboard.call(f"{RECORDS}/VerifyRun", {"runId": "nosuch"}, Role.READER)
        assert (status, error["code"]) == (404, "not_found")


async def test_a_mistyped_token_is_no_valid_key(tmp_path: Path) -> None:
    class Squatted:
        async def call(self, method: Any, request: Any, token: str = "") -> Any:
            raise unproven("there", "it says the call has another token")

        async def close(self) -> None:
            pass

    async with asking(cast(Any, Squatted()), tmp_path) as client, aiohttp.ClientSession() as session:
        headers = {"Authorization": "Bearer plt_mistyped"}
        async with session.post(f"{client.base}/{RUNS}/List", json={}, headers=headers) as response:
            answer = await response.json()
    assert response.status == 401
    assert "no valid key" in str(answer)
