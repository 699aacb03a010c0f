"""Registers, promotes and rolls back models, as the control plane's ModelService and on a ledger that this process has
opened. Promise: a model's lineage agrees with the records of its run, its evidence agrees with the exported files, and
no version is promoted past a gate without a recorded reason. Every call is idempotent."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from paceline.errors import Conflict, InvalidInput, NotFound, counted
from paceline.models.evaluation_results import check_evidence, has_passed, outcome_of
from paceline.models.registered import CHAMPION, Reference, check_alias, check_name, read_reference
from paceline.services.common.access.rights import current_caller
from paceline.services.common.serving.grpc_server import with_status
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.tables.models import ModelChange, ModelVersion
from paceline.v1 import registry_pb2 as pb
from paceline.v1 import registry_pb2_grpc

MAX_EVIDENCE = 64
"""Largest number of a version's evaluations, and of its verdicts."""
MAX_VERSION = 10**9
MAX_REASON = 1000
"""Largest number of characters of a reason."""
REGISTERED, PASSED, PROMOTED, ROLLED_BACK = "registered", "passed", "promoted", "rolled_back"


def register(ledger: Ledger, model: ModelVersion) -> ModelVersion:
    """Record the next version of a model. Raises InvalidInput, Conflict, NotFound."""
    check_name(model.name)
    _checked(model.version)
    _check_evidence(model)
    with ledger.transaction():
        existing = ledger.models.get(model.name, model.version)
        if existing is not None and existing.statement_sha256 == model.statement_sha256:
            return existing
        newest = ledger.models.newest(model.name)
        if model.version != newest + 1:
            raise Conflict(
                f"version {model.version} of {model.name} cannot be registered, because the next version is {newest + 1}; register "
                "again"
            )
        _check_lineage(ledger, model)
        _check_parent(ledger, model.parent)
        stage = PASSED if has_passed(model.verdicts) else REGISTERED
        recorded = model._replace(stage=stage, registered_s=time.time())
        ledger.models.add(recorded)
    return recorded


def find(ledger: Ledger, reference: Reference) -> ModelVersion:
    """Return the version that a reference names. Raises NotFound."""
    version = min(reference.version, MAX_VERSION)
    if reference.alias:
        version = ledger.models.holder(reference.name, reference.alias)
        if not version:
            aliases = ", ".join(ledger.models.aliases(reference.name)) or "none"
            raise NotFound(
                f"no version of {reference.name} has the alias {reference.alias!r}; the aliases of the model are: {aliases}"
            )
    version = version or ledger.models.newest(reference.name)
    found = ledger.models.get(reference.name, version)
    if found is None:
        raise NotFound(f"no registered model {reference}; `paceline models list` shows the registered models")
    return found


def promote(ledger: Ledger, name: str, version: int, alias: str, override: str, caller: str) -> ModelVersion:
    """Give an alias to a version. Raises NotFound, InvalidInput; Conflict if the version has not passed its
    gate, or was rolled back, and `override` is empty."""
    check_alias(alias)
    _check_reason(override, "override")
    with ledger.transaction():
        model = find(ledger, Reference(name, _checked(version)))
        previous = ledger.models.holder(name, alias)
        if previous == version:
            return model
        passed = has_passed(model.verdicts) and model.stage != ROLLED_BACK
        if not passed and not override:
            gate = f"the gate says: {outcome_of(model.verdicts)}"
            why = "the version was rolled back" if model.stage == ROLLED_BACK else gate
            raise Conflict(
                f"{name}:{version} is not promoted, because {why}; promote a version that has passed, or give the reason to "
                "promote this one (--override), which is recorded"
            )
        reason = "" if passed else override
        change = ModelChange(0, "promote", alias, version, previous, reason, caller, time.time())
        ledger.models.add_change(name, change)
        ledger.models.set_stage(name, version, PROMOTED)
    return find(ledger, Reference(name, version))


def roll_back(ledger: Ledger, name: str, version: int, alias: str, reason: str, caller: str) -> ModelVersion:
    """Move an alias from `version` back to its previous holder; return the previous holder. Raises NotFound,
    InvalidInput; Conflict if `version` does not have the alias, or if no version had it before."""
    check_alias(alias)
    _check_reason(reason, "reason")
    if not reason:
        raise InvalidInput("reason is empty; say why the version is rolled back, because it is recorded")
    with ledger.transaction():
        find(ledger, Reference(name, _checked(version)))
        holder = ledger.models.holder(name, alias)
        changes = [each for each in ledger.models.changes(name) if each.alias == alias]
        if changes and changes[-1].kind == "rollback" and changes[-1].previous == version:
            return find(ledger, Reference(name, holder))  # the call was repeated
        if holder != version:
            raise Conflict(
                f"{name}:{version} does not have the alias {alias!r}; {name}:{holder} has it, so roll back that version"
            )
        promotion = ledger.models.promotion(name, alias, version)
        previous = promotion.previous if promotion is not None else 0
        if not previous:
            raise Conflict(f"no version had the alias {alias!r} before {name}:{version}; promote another version")
        ledger.models.set_stage(name, version, ROLLED_BACK)
        change = ModelChange(0, "rollback", alias, previous, version, reason, caller, time.time())
        ledger.models.add_change(name, change)
    return find(ledger, Reference(name, previous))


def override_of(model: ModelVersion, changes: Sequence[ModelChange]) -> str:
    """Return the override reason of a version's newest promotion; empty if it had passed its gate or was never
    promoted."""
    promotions = [each for each in changes if each.kind == "promote" and each.version == model.version]
    return promotions[-1].reason if promotions else ""


def _check_evidence(model: ModelVersion) -> None:
    if max(len(model.evaluations), len(model.verdicts)) > MAX_EVIDENCE:
        raise InvalidInput(f"{model.name} has more than {MAX_EVIDENCE} evaluations or verdicts; give fewer")
    check_evidence(
        model.export_sha256,
        {f"evaluation {index}": each for index, each in enumerate(model.evaluations)},
        {f"verdict {index}": each for index, each in enumerate(model.verdicts)},
    )


def _check_lineage(ledger: Ledger, model: ModelVersion) -> None:
    """Raise Conflict if a model contradicts the records of its run, NotFound for an unknown run."""
    if not model.run_id:
        for field in ("session", "step", "chain", "spec_sha256", "data", "code"):
            if getattr(model, field):
                raise InvalidInput(
                    f"{field} is {getattr(model, field)!r:.80}, but run_id is empty; give the run's id, or leave "
                    f"{field} empty"
                )
        return
    run = ledger.run(model.run_id)
    if not 0 <= model.step <= run["next_step"]:
        raise Conflict(
            f"run {model.run_id} has trained {counted(run['next_step'], 'step')}, so it has no model of step {model.step}"
        )
    if not 0 <= model.session <= run["session"]:
        raise Conflict(
            f"run {model.run_id} has had {run['session']} sessions, so there is no model of session {model.session}"
        )
    batch = ledger.batches.get(model.run_id, model.step - 1)
    expected = {
        "chain": batch["chain"] if batch is not None else "",
        "spec_sha256": hashlib.sha256(run["spec_yaml"].encode()).hexdigest(),
        "data": ledger.data_fingerprint(model.run_id),
        "code": ledger.bundle(model.run_id) or ledger.function_digests(model.run_id),
    }
    for field, value in expected.items():
        given = getattr(model, field)
        if given != value:
            raise Conflict(
                f"{field} is {given!r}, but the records of run {model.run_id} at step {model.step} say {value!r}; register again"
            )


def _check_parent(ledger: Ledger, parent: str) -> None:
    if parent:
        reference = read_reference(parent)
        if not reference.version:
            raise InvalidInput(f"parent is {parent!r}; name a version, as name:version")
        find(ledger, reference)


def _check_reason(reason: str, field: str) -> None:
    if len(reason) > MAX_REASON:
        raise InvalidInput(f"{field} has {len(reason)} characters, but at most {MAX_REASON} are recorded; shorten it")


def _checked(version: int) -> int:
    if not 1 <= version <= MAX_VERSION:
        raise InvalidInput(f"version is {version}; name a version from 1 to {MAX_VERSION}")
    return version


PAGE_SIZE = 100
MAX_PATH = 4096
"""Largest number of characters of the path or URL of a model's files."""
MAX_DOCUMENT = 1 << 20
"""Largest number of characters of the result of one evaluation, or of one verdict."""
SHA256 = re.compile(r"[0-9a-f]{64}")
COPIED = (
    *("name", "version", "run_id", "chain", "path", "export_sha256", "statement_sha256", "spec_sha256"),
    *("data", "code", "parent", "stage", "registered_by", "registered_s"),
)
Context = grpc.aio.ServicerContext[Any, Any]


class RegistryCalls:
    """The methods of ModelService on one ledger. Reads use `committed`, writes use `ledger`."""

    def __init__(self, ledger: Ledger, committed: Ledger, caller: Callable[[], str] = lambda: ""):
        self._ledger, self._committed, self._caller = ledger, committed, caller

    def Register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        model = _read(request.model, request.run_id, self._caller())
        return pb.RegisterResponse(model=message(self._ledger, register(self._ledger, model)))

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
        model = find(self._committed, reference)
        changes = [pb.ModelChange(**each._asdict()) for each in self._committed.models.changes(model.name)]
        return pb.ShowResponse(model=message(self._committed, model), changes=changes)

    def Promote(self, request: pb.PromoteRequest) -> pb.PromoteResponse:
        alias = request.alias or CHAMPION
        model = promote(self._ledger, request.name, request.version, alias, request.override, self._caller())
        return pb.PromoteResponse(model=message(self._ledger, model))

    def Rollback(self, request: pb.RollbackRequest) -> pb.RollbackResponse:
        alias = request.alias or CHAMPION
        model = roll_back(self._ledger, request.name, request.version, alias, request.reason, self._caller())
        return pb.RollbackResponse(model=message(self._ledger, model))


class ModelServicer(registry_pb2_grpc.ModelServiceServicer):
    """The registered models of one coordinator. `lock` serialises transactions with those of the exchange."""

    def __init__(self, ledger: Ledger, committed: Ledger, lock: asyncio.Lock):
        self._calls = RegistryCalls(ledger, committed, _caller_name)
        self._lock = lock

    @with_status
    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        caller = current_caller()
        if not request.run_id and caller is not None and not caller.steers_all:
            raise InvalidInput(
                f"run_id is empty; {caller.name} may register models of their own runs only, so name the run. To "
                "register a model without a run, a caller needs the role operator"
            )
        async with self._lock:
            return self._calls.Register(request)

    @with_status
    async def List(self, request: pb.ModelServiceListRequest, context: Context) -> pb.ModelServiceListResponse:
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
    aliases = ledger.models.aliases(model.name)
    found = pb.RegisteredModel(
        **{field: getattr(model, field) for field in COPIED},
        aliases=[alias for alias, version in aliases.items() if version == model.version],
        override=override_of(model, ledger.models.changes(model.name)),
    )
    found.policy.session, found.policy.step = model.session, model.step
    if with_evidence:
        found.evaluations_json.extend(json.dumps(each) for each in model.evaluations)
        found.verdicts_json.extend(json.dumps(each) for each in model.verdicts)
    return found


def _read(model: pb.RegisteredModel, run_id: str, caller: str) -> ModelVersion:
    """Return the model that a message describes. Raises InvalidInput."""
    for field in ("export_sha256", "statement_sha256"):
        if not SHA256.fullmatch(getattr(model, field)):
            raise InvalidInput(f"model.{field} is {getattr(model, field)[:80]!r}, but must be 64 hexadecimal digits")
    if not 0 < len(model.path) <= MAX_PATH:
        raise InvalidInput(f"model.path has {len(model.path)} characters, but must have 1 to {MAX_PATH}")
    return ModelVersion(
        **{field: getattr(model, field) for field in COPIED}
        | {"run_id": run_id, "stage": REGISTERED, "registered_by": caller, "registered_s": 0.0},
        session=model.policy.session,
        step=model.policy.step,
        evaluations=_read_documents("evaluations_json", model.evaluations_json),
        verdicts=_read_documents("verdicts_json", model.verdicts_json),
    )


def _read_documents(field: str, texts: Any) -> list[dict[str, Any]]:
    found = []
    for index, text in enumerate(texts):
        if len(text) > MAX_DOCUMENT:
            raise InvalidInput(f"{field}[{index}] has {len(text)} characters, but at most {MAX_DOCUMENT} are recorded")
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{field}[{index}] is not JSON: {error}") from None
        if not isinstance(document, dict):
            raise InvalidInput(f"{field}[{index}] is {text[:40]!r}, but must be an object")
        found.append(document)
    return found


def _read_token(token: str) -> tuple[str, int]:
    name, _, version = token.rpartition(":")
    if token and not (name and version.isascii() and version.isdigit() and len(version) < 19):
        raise InvalidInput(f"page_token {token[:40]!r} is invalid; send `next_page_token` of the previous answer")
    return (name, int(version)) if token else ("", 0)


def _caller_name() -> str:
    caller = current_caller()
    return caller.name if caller is not None else ""
