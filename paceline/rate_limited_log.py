"""Writes at most one log line a second of each kind that a sender can cause, so that no caller fills the disk.
`unforeseen` counts unexpected exceptions of all handlers. The sender gets an answer and the service continues."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

INTERVAL_S = 1.0
MAX_KINDS = 1000
"""Largest number of kinds that are kept. The oldest are dropped, because a kind's name may contain a sender's text."""


class RateLimitedLog:
    """Writes each kind of line to `log` at most once in `interval_s`; the next line has the number of omitted lines."""

    def __init__(
        self, log: logging.Logger, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ):
        self._log, self._interval_s, self._clock = log, interval_s, clock
        self._kinds: dict[str, tuple[float, int]] = {}
        """Maps each kind to the time of the kind's last line, and the number of lines left out since."""

    def warning(self, kind: str, message: str, *args: object, error: BaseException | None = None) -> None:
        """Write a warning, with the traceback of `error` if there is one."""
        now_s = self._clock()
        written_s, left_out = self._kinds.get(kind, (now_s - self._interval_s, 0))
        if now_s - written_s < self._interval_s:
            self._kinds[kind] = (written_s, left_out + 1)
            return
        self._kinds.pop(kind, None)
        self._kinds[kind] = (now_s, 0)
        while len(self._kinds) > MAX_KINDS:
            self._kinds.pop(next(iter(self._kinds)))
        if left_out:
            message, args = message + " (and %d more since this message was last logged)", (*args, left_out)
        self._log.warning(message, *args, exc_info=error)


class SeldomFilter(logging.Filter):
    """Passes each text of a library's log once in `interval_s`; the text's arguments are not compared."""

    def __init__(self, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._interval_s, self._clock = interval_s, clock
        self._written_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now_s, text = self._clock(), str(record.msg)
        if now_s - self._written_s.get(text, now_s - self._interval_s) < self._interval_s:
            return False
        self._written_s.pop(text, None)
        self._written_s[text] = now_s
        while len(self._written_s) > MAX_KINDS:
            del self._written_s[next(iter(self._written_s))]
        return True


class Unforeseen:
    """Counts unexpected exceptions, and logs each with its traceback once a second for each place and type."""

    def __init__(self, log: logging.Logger):
        self.total = 0
        """Number of unexpected exceptions since the process started; a gauge."""
        self._seldom = RateLimitedLog(log)

    def note(self, where: str, error: BaseException) -> str:
        """Count an exception; return the message for the sender whose call raised it."""
        self.total += 1
        kind = type(error).__name__
        self._seldom.warning(f"{where} {kind}", "unexpected %s in %s", kind, where, error=error)
        return f"unexpected {kind} in {where}; the traceback is in this service's log"


unforeseen = Unforeseen(logging.getLogger(__name__))
