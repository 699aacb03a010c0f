"""Keeps the run that the coordinator assigns to a worker. The run's spec gets the paths of its bundle's fetched files,
files that the worker may not load are refused, and a report says why the worker cannot work on the run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from paceline.bundle import allowed as allowed_code
from paceline.bundle.manifest import Kind, for_submitter
from paceline.calls.bundle_transfer import unpacked_spec
from paceline.calls.token import open_channel
from paceline.errors import DataError, InvalidInput, SpecError, Unavailable, Unreadable
from paceline.services.common.serving.grpc_server import CHANNEL_OPTIONS
from paceline.spec import RunSpec
from paceline.spec.reading import code_paths, spec_from_ledger
from paceline.user_code.surroundings import isolation_is_required
from paceline.v1 import worker_pb2

log = logging.getLogger(__name__)
Report = Callable[[worker_pb2.ConnectRequest], Awaitable[None]]


class AssignedRun:
    """The newest assignment, and the failure of its set-up as long as the set-up is retried."""

    def __init__(self) -> None:
        self.assignment: worker_pb2.RunAssignment | None = None
        self.failure: worker_pb2.ConnectRequest | None = None
        """Report of the last set-up's failure; None if the last set-up succeeded."""
        self.changed = asyncio.Event()
        """Event that a directive sets if the work changes; the worker clears the event."""
        self.on_readiness: Callable[[bool], Awaitable[None]] = _ignore
        """Called with True when the worker can work on its run or is idle, with False when the set-up has failed."""

    def assign(self, assignment: worker_pb2.RunAssignment) -> bool:
        """Follow a directive to work on a run; return whether the run is new. A failed set-up is tried again at once."""
        is_new = self.assignment is None or self.assignment.run_id != assignment.run_id
        if is_new or self.failure is not None:
            self.failure = None
            self.assignment = assignment
            self.changed.set()
        return is_new

    async def idle(self) -> None:
        """Follow a directive to work on nothing."""
        self.assignment = self.failure = None
        self.changed.set()
        await self.on_readiness(True)

    async def failed(self, run_id: str, error: Exception, report: Report) -> None:
        """Report that the run cannot be set up now."""
        self.failure = failed_set_up(run_id, error)
        await report(self.failure)
        await self.on_readiness(False)

    async def set_up(self) -> None:
        """Note that the set-up has succeeded."""
        self.failure = None
        await self.on_readiness(True)

    async def report(self, run_id: str | None, report: Report) -> None:
        """Report that the run `run_id` is ready, or the failure of its set-up."""
        if run_id is not None:
            await report(worker_pb2.ConnectRequest(run_report=worker_pb2.RunReport(run_id=run_id)))
        elif self.failure is not None:
            await report(self.failure)


async def _ignore(ready: bool) -> None:
    """Ignore the change."""


def spec_of(assignment: worker_pb2.RunAssignment) -> RunSpec:
    """Return an assignment's spec without keys that only another version knows, which are logged. Raises Unavailable."""
    try:
        spec, warnings = spec_from_ledger(assignment.spec_yaml)
    except SpecError as error:
        raise Unavailable(
            f"this worker does not understand the run's spec: {error}. Use one version for worker and coordinator"
        ) from None
    for warning in warnings:
        log.warning("%s", warning)
    return spec


def fault_of(error: BaseException) -> worker_pb2.Fault.ValueType:
    """Return FAULT_SPEC if only a change of the spec, of its data or of its code would help; else FAULT_PASSING."""
    is_spec = isinstance(error, InvalidInput) and not isinstance(error, Unreadable)
    return worker_pb2.FAULT_SPEC if is_spec else worker_pb2.FAULT_PASSING


def failed_set_up(run_id: str, error: Exception, session: int = 0) -> worker_pb2.ConnectRequest:
    """Log the reason why a worker cannot work on a run, and return the report."""
    if isinstance(error, InvalidInput | Unavailable):
        text = str(error)
        log.error("cannot work on run %s: %s", run_id, text)
    else:
        text = f"{type(error).__name__}: {error}"
        log.error("cannot work on run %s: %s", run_id, text, exc_info=error)
    return worker_pb2.ConnectRequest(
        run_report=worker_pb2.RunReport(run_id=run_id, session=session, error=text, fault=fault_of(error))
    )


def refusal_of_files(spec: RunSpec, bundle: str, allowed: Sequence[Path]) -> str:
    """Return the reason, as a sentence, why a worker may not load a spec's code from its disk; empty if it may, or if
    the code is in a bundle. `allowed` are the folders of `--functions-from`."""
    if bundle:
        return ""
    if isolation_is_required() and (named := code_paths(spec)):
        field, code = next(iter(named.items()))
        return (
            f"{field}: {code} is in no bundle, and --require-isolation accepts only code in bundles; submit the run with a client that "
            "sends its files"
        )
    return allowed_code.refusal_of_files(spec, allowed)


class BundledSpec:
    """A spec whose bundled files stay on disk until `close`."""

    def __init__(self, spec: RunSpec, coordinator: str, bundle: str, *kinds: Kind, allowed: Sequence[Path] = ()):
        """Fetch the bundle's files of these kinds, unless this user's cache has them. Blocks. `allowed` are the folders
        of `--functions-from`. Raises Unreadable (also for code outside of these folders), Unavailable, InvalidInput."""
        self.original = self.spec = spec
        self._unpacked = None
        if bundle:
            with open_channel(coordinator, options=CHANNEL_OPTIONS) as channel:
                self.spec, self._unpacked = unpacked_spec(channel, spec, bundle, *kinds, allowed=allowed)

    def close(self) -> None:
        """Allow the removal of the files."""
        if self._unpacked is not None:
            self._unpacked.close()

    @contextlib.contextmanager
    def original_paths(self) -> Iterator[None]:
        """Give errors the submitter's paths, and remove quotations of files that did not come in a bundle."""
        try:
            yield
        except InvalidInput as error:
            root = None if self._unpacked is None else self._unpacked.root
            is_of_data = isinstance(error, DataError | Unreadable)
            text = for_submitter(str(error), self.original, self.spec, root, is_of_data=is_of_data)
            raise type(error)(text) from error
