"""All errors that Paceline raises on purpose, and texts for exceptions of foreign code, such as a user's function."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

USUAL_S = 1.0
"""Default seconds after which a refused call should be retried."""


class PacelineError(Exception):
    """Base class of Paceline's errors. The message is written for the person who has to act."""


class InvalidInput(PacelineError):
    """The caller's input is refused. Names the field, the value and the remedy."""


class SpecError(InvalidInput):
    """A run spec that is misspelt, contradicts itself, or requests something impossible."""


class DataError(InvalidInput):
    """A data set or a row of it that cannot be used."""


class PromptTooLong(InvalidInput):
    """A prompt that leaves no room for a completion, because one token limit applies to both together."""


class Unreadable(InvalidInput):
    """A file, folder or hub named in the input cannot be read now. The name may be wrong, or the fault temporary."""


class WireError(PacelineError):
    """A ZeroMQ message that is foreign, incomplete, too large, or of another protocol version."""


class NotFound(PacelineError):
    """No such run, group, step or checkpoint."""


class Conflict(PacelineError):
    """The current state does not allow the call: a stale term or session, an ended run, a locked ledger."""


class CheckpointFault(PacelineError):
    """The checkpoint at the start of a session is missing, damaged or unreadable, or its folder has a checkpoint of
    another session. An older checkpoint, or another session, may work."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class LedgerFault(PacelineError):
    """The ledger cannot be read or written (a full, read-only or damaged disk). Nothing may be acknowledged any more."""


class Unavailable(PacelineError):
    """The service or store that was called does not answer now; a retry may succeed."""


class Busy(PacelineError):
    """The limit of concurrent requests is reached; a retry may succeed."""

    def __init__(self, message: str, retry_after_s: float = USUAL_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds after which the request may be retried."""


class AccessDenied(PacelineError):
    """The token of the call is missing, unknown, revoked or has expired."""


class NotPermitted(PacelineError):
    """The caller is known but may not make this call. The message says who may."""


class NonFiniteLoss(PacelineError):
    """A loss or gradient norm that is not finite. Raised on every rank before the optimizer changed any weight."""

    def __init__(self, message: str, group_ids: tuple[int, ...]) -> None:
        super().__init__(message)
        self.group_ids = group_ids
        """The groups at fault if the loss identifies them, else every group of the update; the same on all ranks."""


class EngineDied(Unavailable):
    """The rollout engine stopped after an internal error; its worker has to start a new engine."""


MAX_CHARS = 500
ALIKE = "; every attempt would fail alike"
"""Suffix of a failure that every attempt at the group would repeat. The exchange looks for it in the errors of reward
workers, and drops such a group at its first failure."""


def error_text(error: BaseException) -> str:
    """Return an exception in one line: its type and the first line of its text, with a mark if more lines follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = f"{type(error).__name__}: {lines[0]}"[:MAX_CHARS]
    return f"{text} …" if len(lines) > 1 else text


def first_line(error: BaseException) -> str:
    """Return the error's message without the native stack trace that torch appends."""
    return (str(error).strip() or repr(error)).splitlines()[0]


def is_about_input(error: BaseException) -> bool:
    """Return whether an exception may concern the input: a Rust panic, and any Exception but a lack of memory."""
    if isinstance(error, MemoryError):
        return False
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return `, did you mean …?` with the nearest of some names; empty if none is near."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def counted(number: float, noun: str) -> str:
    """Return a number with its noun: `1 group`, `2,000 groups`."""
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"
