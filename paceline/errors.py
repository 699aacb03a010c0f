"""Every error that Paceline raises on purpose.

Below them: texts of exceptions that foreign code raises, such as a user's function, a chat template, a library that reads files.
"""

USUAL_S = 1.0
"""Seconds after which a refused call may come again, where the refusing side knows no better number."""


class PacelineError(Exception):
    """Base of every error raised on purpose. The message is written for the person who has to act."""


class InvalidInput(PacelineError):
    """The caller's input cannot be accepted. Says which field, which value, and what to do."""


class SpecError(InvalidInput):
    """A run spec that is misspelt, contradicts itself, or asks for what cannot work."""


class DataError(InvalidInput):
    """A data set or a row of it that cannot be used."""


class PromptTooLong(InvalidInput):
    """A prompt with as many tokens as prompt and completion may have together, or more."""


class Unreadable(InvalidInput):
    """A file, folder or hub that the input names cannot be read now. It may be wrong, or there again later."""


class WireError(PacelineError):
    """A ZeroMQ message that is not ours, not whole, too large, or of another protocol version."""


class NotFound(PacelineError):
    """No such run, group, step or checkpoint."""


class Conflict(PacelineError):
    """The current state does not allow the call: a stale term or session, an ended run, a locked ledger."""


class CheckpointFault(PacelineError):
    """The checkpoint that a session was to begin from is missing, damaged or cannot be read, or a checkpoint of another
    session is in its folder. An older checkpoint, or another session, may work."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path
        """Path of that checkpoint."""


class LedgerFault(PacelineError):
    """The ledger cannot be read or written: a full, read-only or damaged disk. Nothing may be acknowledged any more."""


class Unavailable(PacelineError):
    """The other side does not answer now; the same call may succeed later."""


class Busy(PacelineError):
    """As many requests as there is room for are under way; the same one may be taken later."""

    def __init__(self, message: str, retry_after_s: float = USUAL_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds after which the same request may be taken."""


class AccessDenied(PacelineError):
    """The token of the call is missing, unknown, revoked or has expired."""


class NotPermitted(PacelineError):
    """The caller is known and may not make this call. Says who may."""


class NonFiniteLoss(PacelineError):
    """A loss or gradient norm that is not finite. Raised on every rank before the optimizer moved any weight."""

    def __init__(self, message: str, group_ids: tuple[int, ...]) -> None:
        super().__init__(message)
        self.group_ids = group_ids
        """The groups at fault where the loss tells, else every group of the update; the same on all ranks."""


class EngineDied(Unavailable):
    """The rollout engine stopped with an internal error; its worker has to start a new one."""


MAX_CHARS = 500
ALIKE = "; every attempt would fail alike"
"""End of the text of a failure that no other attempt at the same group can avoid. The exchange reads it in the errors of
reward workers, and drops such a group at its first failure."""


def error_text(error: BaseException) -> str:
    """Return an exception in one line: its type and the first line of its text, with a mark where there are more."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = f"{type(error).__name__}: {lines[0]}"[:MAX_CHARS]
    return f"{text} …" if len(lines) > 1 else text


def first_line(error: BaseException) -> str:
    """Return the error's message without the native stack trace that torch appends."""
    return (str(error).strip() or repr(error)).splitlines()[0]


def is_about_input(error: BaseException) -> bool:
    """Return whether an exception may be about the input that was processed: every Exception, and a panic of a library in
    Rust, which Python does not count among them. A lack of memory is about the machine."""
    if isinstance(error, MemoryError):
        return False
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"
