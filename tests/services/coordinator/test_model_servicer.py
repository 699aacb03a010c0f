"""ModelService over real gRPC: versions and aliases by their client, repeated calls, pages, bad requests, roles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from paceline.client import Client
from paceline.errors import Conflict, InvalidInput, NotFound, NotPermitted
from paceline.models.evaluation_results import FORMAT, digest_of
from paceline.models.registered import Reference
from paceline.services.common.access.callers import TokenCallers
from paceline.services.common.access.rights import CallerRole
from paceline.services.common.access.token_guard import TokenGuard
from paceline.services.common.access.token_table import create
from paceline.services.common.serving.grpc_server import GrpcServer
from paceline.services.coordinator import model_servicer
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.model_servicer import ModelServicer
from paceline.v1 import registry_pb2_grpc
from paceline.v1.registry_pb2 import RegisteredModel

EXPORT = "e" * 64


def model(version: int = 1, name: str = "sums", **fields: Any) -> RegisteredModel:
    """Return a version from elsewhere without evidence."""
    given = {
        "path": "s3://bucket/sums",
        "export_sha256": EXPORT,
        "statement_sha256": f"{version:064}",
    } | fields
    return RegisteredModel(name=name, version=version, **given)


def passed(version: int) -> RegisteredModel:
    """Return a version whose gate has passed it."""
    result: dict[str, Any] = {"format": FORMAT, "digests": {"model": EXPORT}, "metrics": {}}
    result["digest"] = digest_of(result)
    verdict: dict[str, Any] = {"outcome": "passed", "digests": {"candidate": result["digest"]}}
    verdict["digest"] = digest_of(verdict)
    return model(version, evaluations_json=[json.dumps(result)], verdicts_json=[json.dumps(verdict)])


class Served:
    """A served registry, and the tokens of its callers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.committed = Ledger(folder / "ledger.sqlite", read_only=True)
        callers = TokenCallers(lambda: "boot", folder / "token", folder / "tokens.json")
        self.server = GrpcServer("127.0.0.1", 0, TokenGuard(callers, self.ledger.submitter))
        servicer = ModelServicer(self.ledger, self.committed, asyncio.Lock())
        self.server.add(servicer, registry_pb2_grpc.add_ModelServiceServicer_to_server, "paceline.v1.ModelService")
        for role in (CallerRole.VIEWER, CallerRole.SUBMITTER, CallerRole.OPERATOR):
            (folder / role).write_text(create(folder / "tokens.json", f"a-{role}", role, 0.0))

    def client(self, role: CallerRole = CallerRole.OPERATOR) -> Client:
        """Return the client of a caller."""
        return Client(f"127.0.0.1:{self.server.port}", token_file=self.folder / role)


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    served = Served(tmp_path)
    await served.server.start()
    yield served
    await served.server.stop(0.0)
    served.committed.close()
    served.ledger.close()


async def test_a_model_lives_by_its_client(served: Served) -> None:
    def live() -> None:
        with served.client() as client:
            models = client.models
            assert models.register(passed(1)).stage == "passed"
            assert models.register(passed(1)).registered_by == "a-operator"  # the call was repeated
            models.register(passed(2))
            for version in (1, 2):
                models.promote("sums", version)
            assert models.promote("sums", 2).aliases == ["champion"]
            assert models.roll_back("sums", 2, "worse").version == 1
            assert models.roll_back("sums", 2, "worse").version == 1
            shown = models.show(Reference("sums", alias="champion"))
            assert shown.model.version == 1
            assert [(each.kind, each.version, each.caller) for each in shown.changes] == [
                ("promote", 1, "a-operator"),
                ("promote", 2, "a-operator"),
                ("rollback", 1, "a-operator"),
            ]
            assert models.show(Reference("sums", 2)).model.stage == "rolled_back"

    await asyncio.to_thread(live)


async def test_pages_follow_each_other(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_servicer, "PAGE_SIZE", 2)

    def read() -> None:
        with served.client() as client:
            for name in ("b", "a"):
                for version in (1, 2, 3):
                    client.models.register(model(version, name))
            found = [(each.name, each.version) for each in client.models.list()]
            assert found == [("a", 3), ("a", 2), ("a", 1), ("b", 3), ("b", 2), ("b", 1)]
            assert [each.version for each in client.models.list("b")] == [3, 2, 1]

    await asyncio.to_thread(read)


async def test_what_cannot_be_recorded_is_refused_with_the_field(served: Served) -> None:
    def refused() -> None:
        with served.client() as client:
            models = client.models
            models.register(passed(1))
            for wrong, error, message in (
                (model(3), Conflict, "the next version is 2"),
                (model(1, statement_sha256="f" * 64), Conflict, "the next version is 2"),
                (model(2, path=""), InvalidInput, r"model\.path has 0 characters"),
                (model(2, export_sha256="x"), InvalidInput, r"model\.export_sha256 is 'x'"),
                (model(2, chain="x"), InvalidInput, "chain is 'x', but run_id is empty"),
                (model(2, verdicts_json=["x" * (1 << 20) + "x"]), InvalidInput, "1048577 characters"),
                (model(2, evaluations_json=["{"]), InvalidInput, r"evaluations_json\[0\] is not JSON"),
                (
                    model(2, verdicts_json=["[]"]),
                    InvalidInput,
                    r"verdicts_json\[0\] is '\[\]', but must be an object",
                ),
                (model(2, evaluations_json=["{}"] * 65), InvalidInput, "more than 64"),
                (model(1, name="../x"), InvalidInput, "'../x'"),
                (model(2, run_id="nosuch"), NotFound, "no run 'nosuch'"),
                (model(2, parent="sums:9"), NotFound, "no registered model sums:9"),
            ):
                with pytest.raises(error, match=message):
                    models.register(wrong)
            with pytest.raises(Conflict, match="no verdict"):
                models.register(model(2)) and models.promote("sums", 2)
            with pytest.raises(InvalidInput, match="override has 1001 characters"):
                models.promote("sums", 2, override="x" * 1001)
            for version in (0, 1 << 63):
                with pytest.raises(InvalidInput, match=f"version is {version}"):
                    models.promote("sums", version)
            with pytest.raises(NotFound, match="no registered model sums:9223372036854775808"):
                models.show(Reference("sums", 1 << 63))
            with pytest.raises(InvalidInput, match="reason is empty"):
                models.roll_back("sums", 1, "")
            with pytest.raises(InvalidInput, match="the alias is 'A'"):
                models.promote("sums", 1, alias="A")
            with pytest.raises(Conflict, match="does not have the alias 'champion'"):
                models.roll_back("sums", 1, "x")

    await asyncio.to_thread(refused)


async def test_roles_limit_who_may_change_what(served: Served) -> None:
    def limited() -> None:
        with served.client(CallerRole.SUBMITTER) as submitter, served.client(CallerRole.VIEWER) as viewer:
            with pytest.raises(InvalidInput, match="models of their own runs only, so name the run"):
                submitter.models.register(model())
            with pytest.raises(NotPermitted, match="for the roles operator"):
                submitter.models.promote("sums", 1)
            with pytest.raises(NotPermitted):
                viewer.models.register(model())
            assert list(viewer.models.list()) == []

    await asyncio.to_thread(limited)


async def test_a_lineage_that_the_run_contradicts_is_refused(served: Served, tmp_path: Path) -> None:
    with served.ledger.transaction():
        served.ledger.add_run("sums-1", "name: sums\n", str(tmp_path / "sums-1"))
        served.ledger.update_run("sums-1", next_step=1)

    def refused() -> None:
        with served.client() as client:
            for fields, message in (
                ({"policy": {"step": 2}}, "has trained 1 step,"),
                ({"policy": {"step": 1, "session": 1}}, "has had 0 sessions"),
                ({"policy": {"step": 1}, "chain": "x"}, "chain is 'x'"),
                ({"policy": {"step": 1}}, "spec_sha256 is ''"),
            ):
                with pytest.raises(Conflict, match=message):
                    client.models.register(model(run_id="sums-1", **fields))

    await asyncio.to_thread(refused)
