"""Set-up of a run on a worker: the assigned spec, and the report when the worker cannot work on it."""

from __future__ import annotations

import logging

from paceline.errors import InvalidInput, SpecError, Unavailable, Unreadable
from paceline.spec import RunSpec
from paceline.spec.reading import spec_from_ledger
from paceline.v1 import worker_pb2

log = logging.getLogger(__name__)


def spec_of(assignment: worker_pb2.RunAssignment) -> RunSpec:
    """Return the spec of an assignment, without keys of another version, which are logged. Raises Unavailable if this version cannot
    read it."""
    try:
        spec, warnings = spec_from_ledger(assignment.spec_yaml)
    except SpecError as error:
        raise Unavailable(
            f"this worker does not understand the run's spec: {error}. Bring worker and coordinator to one version"
        ) from None
    for warning in warnings:
        log.warning("%s", warning)
    return spec


def fault_of(error: BaseException) -> worker_pb2.Fault.ValueType:
    """Return FAULT_SPEC if only another spec (or its data, or its code) would help; other faults may pass."""
    is_spec = isinstance(error, InvalidInput) and not isinstance(error, Unreadable)
    return worker_pb2.FAULT_SPEC if is_spec else worker_pb2.FAULT_PASSING


def failed_set_up(run_id: str, error: Exception, session: int = 0) -> worker_pb2.ConnectRequest:
    """Log why a worker cannot work on a run, and return the report."""
    if isinstance(error, InvalidInput | Unavailable):
        text = str(error)
        log.error("cannot work on run %s: %s", run_id, text)
    else:
        text = f"{type(error).__name__}: {error}"
        log.error("cannot work on run %s: %s", run_id, text, exc_info=error)
    return worker_pb2.ConnectRequest(
        run_report=worker_pb2.RunReport(run_id=run_id, session=session, error=text, fault=fault_of(error))
    )
