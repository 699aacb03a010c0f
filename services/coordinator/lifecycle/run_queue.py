"""The queue of runs: a submitted spec is checked, its data sets are opened once, then the run is queued in the ledger.

`run:ID` as the name of a model means the final export of that run, or its newest export by step if there is no final
one. `run:ID/NAME` means the export of that name. A reward model may also be `run:ID/newest`: the folder of the exports,
in which its process always finds the newest one. The stored spec has the folder or URL instead, so that all later
readers use the same files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.encryption.storage_key import storage_key
from paceline.errors import Busy, InvalidInput, NotFound, NotPermitted, SpecError
from paceline.files.names import EXPORTS
from paceline.files.storage import Folder, check_place, refusal_of_store
from paceline.models.memory_plan import Room, is_open, planned
from paceline.models.shape import read_shape
from paceline.services.common.access.rights import Caller, current_caller
from paceline.services.coordinator.ledger.database import free_name
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.lifecycle.run_data import Openings, RunBundles, RunData
from paceline.services.coordinator.lifecycle.submission_checks import check_network, checked_data, refuse_large_groups
from paceline.services.coordinator.pool.run_context import Watchers
from paceline.spec import RewardFunctionSection, RunSpec
from paceline.spec.reading import MODEL_FIELDS, OUTPUT_FIELDS, parse_spec, spec_of_run, spec_to_yaml, submitted_spec

MAX_SUBMISSION = 128
STORE_WAIT_S = 10.0
"""Seconds to wait for the object store's answer; a store that does not answer in time delays no run."""
MAX_TO_READ = 16
"""Largest number of specs that are being read or wait to be read; the time to read a spec is bounded."""
MAX_QUEUED = 1000
"""Largest number of runs in the queue."""
MAX_QUEUED_OF_ONE = 250
"""Largest number of queued runs of one submitter, so that nobody fills the queue."""
QUEUE_AGAIN_S = 60.0
"""Seconds after which a client may retry while the queue is full."""

log = logging.getLogger(__name__)


class RunQueue:
    """Submitted runs, each with a folder below `directory`. `lock` serialises transactions with the exchange's."""

    def __init__(self, ledger: Ledger, directory: Path, lock: asyncio.Lock, watchers: Watchers, bundles: RunBundles):
        self._ledger, self._directory, self._lock, self._watchers = ledger, directory, lock, watchers
        self._bundles = bundles
        self._reading = asyncio.Lock()
        """Held while a thread reads a spec, so that the event loop gets its turn between two specs."""
        self._to_read = 0
        """Number of specs that are being read or wait to be read."""
        self._openings = Openings()

    async def submit(self, spec_yaml: str, submission: str = "", bundle: str = "") -> str:
        """Check a spec, its `bundle` and its data sets, and queue a run; return its id, the same for the same
        `submission`. Raises SpecError, InvalidInput, DataError, Unreadable, Busy."""
        if len(submission) > MAX_SUBMISSION:
            raise InvalidInput(
                f"the name of a submission has {len(submission)} characters, but at most {MAX_SUBMISSION} are allowed"
            )
        spec, text = await self._read(spec_yaml)
        refuse_large_groups(spec)
        check_network(spec, self._ledger.store)
        caller = current_caller()
        if caller is not None and spec.priority > 0 and not caller.steers_all:
            raise NotPermitted(
                f"priority is {spec.priority}, which would put the run before the runs of others; a submitter may set at most 0"
            )
        if submission and (run_id := self._ledger.run_of_submission(submission)) is not None:
            return run_id
        self._check_room(caller)
        if found := references(spec, self._ledger):
            spec = await asyncio.to_thread(with_locations, spec, found)
            text = await asyncio.to_thread(spec_to_yaml, spec)
        await asyncio.to_thread(self._bundles.check, spec, bundle)
        notes: list[str] = []
        if is_open(spec):
            shape = await asyncio.to_thread(read_shape, spec.policy.model_name)
            spec, notes = planned(spec, shape, Room())
            text = await asyncio.to_thread(spec_to_yaml, spec)
        data, warnings = await self._openings.open(
            submission or uuid.uuid4().hex, partial(self._checked_data, spec, bundle)
        )
        if data.report:
            notes.append(f"data.train: {data.report}")
        if report := await asyncio.to_thread(self._bundles.preparation_report, bundle):
            notes.append(report)
        if spec.max_num_epochs is not None:
            spec = spec.with_steps_of_epochs(data.num_rows)
            text = await asyncio.to_thread(spec_to_yaml, spec)
            notes.append(
                f"{spec.max_num_steps} steps, because max_num_epochs is {spec.max_num_epochs:g} and the data has "
                f"{data.num_rows} rows"
            )
        for section, key in OUTPUT_FIELDS:
            if place := getattr(getattr(spec, section), key):
                check_place(place, f"{section}.{key}")
        await self._check_store()
        async with self._lock:
            run_id = self._ledger.run_of_submission(submission) if submission else None
            if run_id is not None:
                return run_id
            self._check_room(caller)
            run_id = self._add_run(
                spec,
                text,
                submission,
                warnings,
                {"message": "; ".join(notes), "bundle": bundle, "submitter": caller.name if caller is not None else ""},
            )
        log.info("run %s is queued", run_id)
        await self._watchers.notify()
        return run_id

    def _check_room(self, caller: Caller | None) -> None:
        """Raise Busy if the queue is full, or if the submitter has as many queued runs as one submitter may have."""
        queue = self._ledger.queue()
        if len(queue) >= MAX_QUEUED:
            raise Busy(
                f"{len(queue)} runs are in the queue, the most that it takes; cancel some runs, or submit again later",
                QUEUE_AGAIN_S,
            )
        if caller is None or caller.steers_all or len(queue) < MAX_QUEUED_OF_ONE:
            return
        number = sum(self._ledger.submitter(row["run_id"]) == caller.name for row in queue)
        if number >= MAX_QUEUED_OF_ONE:
            raise Busy(
                f"{number} runs of {caller.name} are in the queue, the most for one submitter; cancel some runs, or submit again "
                "later",
                QUEUE_AGAIN_S,
            )

    async def _check_store(self) -> None:
        """Raise InvalidInput if the deployment's store refuses writes: wrong name, permissions or credentials."""
        if not self._ledger.store:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STORE_WAIT_S):
                why = await asyncio.to_thread(refusal_of_store, self._ledger.store)
            if why:
                raise InvalidInput(why)

    def _checked_data(self, spec: RunSpec, bundle: str) -> tuple[RunData, list[str]]:
        with self._bundles.opened(spec, bundle, "code", "data") as local:
            return checked_data(local)

    async def _read(self, spec_yaml: str) -> tuple[RunSpec, str]:
        """Read a submitted spec and its resolved text on a thread. Raises SpecError, Busy."""
        if self._to_read == MAX_TO_READ:
            raise Busy(f"{self._to_read} specs are being read; submit again later")
        self._to_read += 1
        try:
            async with self._reading:
                return await asyncio.to_thread(_read_submitted, spec_yaml)
        finally:
            self._to_read -= 1

    def _add_run(self, spec: RunSpec, text: str, submission: str, of_data: Sequence[str], facts: dict[str, str]) -> str:
        """Add a run to the ledger; the non-empty `facts` go into its first event."""
        warnings = [*spec.warnings, *of_data]
        with self._ledger.transaction():
            run_id = f"{spec.name}-{self._ledger.num_runs() + 1}"
            directory = self._directory / run_id
            self._ledger.add_run(run_id, text, str(directory), spec.max_num_steps, warnings)
            queued: dict[str, Any] = {"state": "queued"} | ({"submission": submission} if submission else {})
            queued |= {"priority": spec.priority} if spec.priority else {}
            queued |= {name: fact for name, fact in facts.items() if fact}
            self._ledger.add_event(run_id, "state", queued)
            for warning in warnings:
                self._ledger.add_event(run_id, "warning", {"message": warning})
        self._make_run_directory(directory, text)
        return run_id

    def _make_run_directory(self, directory: Path, spec_yaml: str) -> None:
        """Make the run's folder, with its spec and links to the files that all runs share. An existing folder of that
        name is set aside, because this ledger does not know its run. With a storage key only the ledger has the
        spec, because people could not read an encrypted file."""
        if directory.exists() and any(directory.iterdir()):
            set_aside = free_name(directory.with_name(f"{directory.name}.set-aside"))
            directory.rename(set_aside)
            log.warning("%s belongs to a run that this ledger does not know; it was moved to %s", directory, set_aside)
        directory.mkdir(parents=True, exist_ok=True)
        if storage_key() is None:
            (directory / "spec.yaml").write_text(spec_yaml)
        for shared in (self._ledger.path, self._directory / "logs"):
            link = directory / shared.name
            if shared.exists() and not link.is_symlink():
                link.symlink_to(Path("..") / shared.name)


def _read_submitted(spec_yaml: str) -> tuple[RunSpec, str]:
    spec = submitted_spec(spec_yaml)
    return spec, spec_to_yaml(spec)


PREFIX = "run:"
NEWEST = "newest"
"""Name that means, at each reading of a reward model, the newest export by step."""
OF_STEP = re.compile(r"step-(\d{1,18})")
MAX_NAMED = 8
"""Largest number of runs that a message names."""


@dataclass(frozen=True)
class Reference:
    """A reference to a run's export, with the folders and URLs where it may be."""

    field: str
    value: str
    final: str
    """Folder or URL of the final export; empty while there is none."""
    exports: str
    """Parent folder of the exports by name."""
    name: str
    missing: str
    """Message of the error if the export does not exist."""
    follows: bool = False
    """True for the folder of the exports itself, in which the newest one is searched repeatedly."""


def references(spec: RunSpec, ledger: Ledger) -> list[Reference]:
    """Return the references to exports in a spec, from the ledger alone. Raises SpecError for a reference in `data`,
    for an unknown run, and for a run that has trained another kind of model than is needed."""
    for field in ("train", "validation"):
        names = getattr(spec.data, field)
        for name in (names,) if isinstance(names, str) else names or ():
            if name.startswith(PREFIX):
                run_id = name.removeprefix(PREFIX)
                raise SpecError(
                    f"data.{field} {name!r}: a run's export is a model; `paceline samples export {run_id} FILE.jsonl` writes "
                    "the run's samples as data"
                )
    return [_reference(field, value, ledger) for field, value in _named(spec)]


def _named(spec: RunSpec) -> Iterator[tuple[str, str]]:
    for section, key in MODEL_FIELDS:
        value = getattr(getattr(spec, section), key)
        if value is not None and value.startswith(PREFIX):
            yield f"{section}.{key}", value
    for index, reward in enumerate(spec.rewards):
        argument = RewardFunctionSection.PATH_ARGUMENTS.get(reward.function)
        value = reward.kwargs.get(argument) if argument is not None else None
        if isinstance(value, str) and value.startswith(PREFIX):
            yield f"rewards.{index}.kwargs.{argument}", value


def _reference(field: str, value: str, ledger: Ledger) -> Reference:
    run_id, _, name = value.removeprefix(PREFIX).partition("/")
    try:
        row = ledger.run(run_id)
    except NotFound:
        raise SpecError(f"{field} {value!r}: this coordinator has no run {run_id!r}; {_with_exports(ledger)}") from None
    has_scoring_head, rewards = (
        spec_of_run(run_id, row["spec_yaml"])[0].has_scoring_head,
        field.startswith("rewards."),
    )
    if rewards and not has_scoring_head:
        raise SpecError(
            f"{field} {value!r}: run {run_id} has trained a language model; name a run with algorithm rm, whose export gives "
            "scores"
        )
    if field != "value.model_name" and has_scoring_head and not rewards:
        raise SpecError(
            f"{field} {value!r}: run {run_id} has trained a reward model, which generates no text; name a run that has trained "
            "a language model"
        )
    state = f"the run is {row['state']} at step {row['next_step']} of {row['max_num_steps']}"
    what = f"has no export {name!r}" if name else "has exported no model"
    missing = (
        f"{field} {value!r}: run {run_id} {what} ({state}); `paceline export {run_id}` writes a model from its newest checkpoint. "
        f"{_with_exports(ledger)}"
    )
    exports = f"{ledger.run_store(run_id)}/{EXPORTS}"
    if rewards and name == NEWEST:
        return Reference(field, value, "", exports, "", missing, follows=True)
    return Reference(field, value, "" if name else ledger.export_path(run_id), exports, name, missing)


def _with_exports(ledger: Ledger) -> str:
    run_ids = [str(row["run_id"]) for row in ledger.runs() if ledger.export_path(row["run_id"])]
    named = ", ".join(run_ids[-MAX_NAMED:])
    return f"runs with exports: {named}" if run_ids else "no run has an export yet"


def located(reference: Reference) -> str:
    """Find an export in the object store, and return its folder or URL. Raises SpecError if missing or unreadable."""
    try:
        for place in _places(reference):
            if Folder(place).exists("config.json"):
                return reference.exports if reference.follows else place
    except Exception as error:  # the clients of object stores raise errors without a common base
        raise SpecError(
            f"{reference.field} {reference.value!r} cannot be read in {reference.final or reference.exports}: "
            f"{type(error).__name__}: {error}; correct the store's name or credentials, or submit again when it is reachable"
        ) from None
    raise SpecError(reference.missing)


def _places(reference: Reference) -> Iterator[str]:
    if reference.name:
        yield f"{reference.exports}/{reference.name}"
        return
    if reference.final:
        yield reference.final
    steps = {folder.name: OF_STEP.fullmatch(folder.name) for folder in Folder(reference.exports).folders()}
    for _, name in sorted(((int(match[1]), name) for name, match in steps.items() if match), reverse=True):
        yield f"{reference.exports}/{name}"


def with_locations(spec: RunSpec, found: list[Reference]) -> RunSpec:
    """Return the spec with a folder or URL instead of each reference. Raises SpecError."""
    if not found:
        return spec
    tree: dict[str, Any] = spec.model_dump(mode="json")
    for reference in found:
        *sections, key = reference.field.split(".")
        node: Any = tree
        for section in sections:
            node = node[int(section)] if isinstance(node, list) else node[section]
        node[key] = located(reference)
    return parse_spec(tree)
