"""The control plane's ModelService, and the same calls on a ledger that is opened in this process."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import grpc

from paceline.errors import InvalidInput
from paceline.models.registered import CHAMPION, Reference
from paceline.services.common.access.caller import current_caller
from paceline.services.common.serving.grpc_server import with_status
from paceline.services.coordinator import model_registry
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.tables.models import ModelVersion
from paceline.v1 import registry_pb2 as pb
from paceline.v1 import registry_pb2_grpc

PAGE_SIZE = 100
MAX_PATH = 4096
"""Characters of the path or URL of a model's files."""
MAX_DOCUMENT = 1 << 20
"""Characters of an evaluation's result or of a verdict."""
SHA256 = re.compile(r"[0-9a-f]{64}")
COPIED = (
    *("name", "version", "run_id", "chain", "path", "export_sha256", "statement_sha256", "spec_sha256"),
    *("data", "code", "parent", "stage", "registered_by", "registered_s"),
)
"""Fields that message and record have by the same name."""
Context = grpc.aio.ServicerContext[Any, Any]


class RegistryCalls:
    """The methods of ModelService on one ledger. `committed` is read, `ledger` is written."""

    def __init__(self, ledger: Ledger, committed: Ledger, caller: Callable[[], str] = lambda: ""):
        """`caller` returns the name of whoever makes the call."""
        self._ledger, self._committed, self._caller = ledger, committed, caller

    def Register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        model = _read(request.model, request.run_id, self._caller())
        return pb.RegisterResponse(model=message(self._ledger, model_registry.register(self._ledger, model)))

    def List(self, request: pb.ModelServiceListRequest) -> pb.ModelServiceListResponse:
        name, version = _read_token(request.page_token)
        size = min(request.page_size or PAGE_SIZE, PAGE_SIZE)
        found = self._committed.models.after(name, version, size + 1, request.name)
        response = pb.ModelServiceListResponse()
        for each in found[:size]:
            response.models.append(message(self._committed, each, with_evidence=False))
        if len(found) > size:
            response.next_page_token = f"{found[size - 1].name}:{found[size - 1].version}"
        return response

    def Show(self, request: pb.ShowRequest) -> pb.ShowResponse:
        reference = Reference(request.name, request.version, request.alias if not request.version else "")
        model = model_registry.find(self._committed, reference)
        changes = [pb.ModelChange(**each._asdict()) for each in self._committed.models.changes(model.name)]
        return pb.ShowResponse(model=message(self._committed, model), changes=changes)

    def Promote(self, request: pb.PromoteRequest) -> pb.PromoteResponse:
        alias = request.alias or CHAMPION
        model = model_registry.promote(
            self._ledger, request.name, request.version, alias, request.override, self._caller()
        )
        return pb.PromoteResponse(model=message(self._ledger, model))

    def Rollback(self, request: pb.RollbackRequest) -> pb.RollbackResponse:
        alias = request.alias or CHAMPION
        model = model_registry.roll_back(
            self._ledger, request.name, request.version, alias, request.reason, self._caller()
        )
        return pb.RollbackResponse(model=message(self._ledger, model))


class ModelServicer(registry_pb2_grpc.ModelServiceServicer):
    """The registered models of one coordinator. `lock` serialises transactions with the exchange's."""

    def __init__(self, ledger: Ledger, committed: Ledger, lock: asyncio.Lock):
        self._calls = RegistryCalls(ledger, committed, _caller_name)
        self._lock = lock

    @with_status
    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        caller = current_caller()
        if not request.run_id and caller is not None and not caller.steers_all:
            raise InvalidInput(
                f"run_id is empty; {caller.name} may register models of their own runs, so name the run. Models from elsewhere are "
                "for operators"
            )
        async with self._lock:
            return self._calls.Register(request)

    @with_status
    async def List(
        self, request: pb.ModelServiceListRequest, context: Context
    ) -> pb.ModelServiceListResponse:
        return self._calls.List(request)

    @with_status
    async def Show(self, request: pb.ShowRequest, context: Context) -> pb.ShowResponse:
        return self._calls.Show(request)

    @with_status
    async def Promote(self, request: pb.PromoteRequest, context: Context) -> pb.PromoteResponse:
        async with self._lock:
            return self._calls.Promote(request)

    @with_status
    async def Rollback(self, request: pb.RollbackRequest, context: Context) -> pb.RollbackResponse:
        async with self._lock:
            return self._calls.Rollback(request)


def message(ledger: Ledger, model: ModelVersion, *, with_evidence: bool = True) -> pb.RegisteredModel:
    """Return the message of a version."""
    aliases = ledger.models.aliases(model.name)
    found = pb.RegisteredModel(
        **{field: getattr(model, field) for field in COPIED},
        aliases=[alias for alias, version in aliases.items() if version == model.version],
        override=model_registry.override_of(model, ledger.models.changes(model.name)),
    )
    found.policy.session, found.policy.step = model.session, model.step
    if with_evidence:
        found.evaluations_json.extend(json.dumps(each) for each in model.evaluations)
        found.verdicts_json.extend(json.dumps(each) for each in model.verdicts)
    return found


def _read(model: pb.RegisteredModel, run_id: str, caller: str) -> ModelVersion:
    """Return the record of a message that is to be registered. Raises InvalidInput."""
    for field in ("export_sha256", "statement_sha256"):
        if not SHA256.fullmatch(getattr(model, field)):
            raise InvalidInput(
                f"model.{field} is {getattr(model, field)[:80]!r}, must be 64 hexadecimal digits"
            )
    if not 0 < len(model.path) <= MAX_PATH:
        raise InvalidInput(f"model.path has {len(model.path)} characters, must have 1 to {MAX_PATH}")
    return ModelVersion(
        **{field: getattr(model, field) for field in COPIED}
        | {
            "run_id": run_id,
            "stage": model_registry.REGISTERED,
            "registered_by": caller,
            "registered_s": 0.0,
        },
        session=model.policy.session,
        step=model.policy.step,
        evaluations=_read_documents("evaluations_json", model.evaluations_json),
        verdicts=_read_documents("verdicts_json", model.verdicts_json),
    )


def _read_documents(field: str, texts: Any) -> list[dict[str, Any]]:
    """Return JSON objects. Raises InvalidInput."""
    found = []
    for index, text in enumerate(texts):
        if len(text) > MAX_DOCUMENT:
            raise InvalidInput(
                f"{field}[{index}] has {len(text)} characters, at most {MAX_DOCUMENT} are recorded"
            )
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{field}[{index}] is no JSON: {error}") from None
        if not isinstance(document, dict):
            raise InvalidInput(f"{field}[{index}] is {text[:40]!r}, must be an object")
        found.append(document)
    return found


def _read_token(token: str) -> tuple[str, int]:
    """Return name and version after which a page begins. Raises InvalidInput."""
    name, _, version = token.rpartition(":")
    if token and not (name and version.isascii() and version.isdigit() and len(version) < 19):
        raise InvalidInput(f"page_token {token[:40]!r} is none; send `next_page_token` of the answer before")
    return (name, int(version)) if token else ("", 0)


def _caller_name() -> str:
    caller = current_caller()
    return caller.name if caller is not None else ""
