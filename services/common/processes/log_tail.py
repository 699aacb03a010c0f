"""The end of a service's log, and the line in it that says why the service died.

Services, Python and libraries each write the reason in their own form: a log line with the level ERROR, the last line of a
traceback, the `Error: ...` of a command. Warnings often follow it, as those of Python's resource tracker about a process
that did not clean up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

LOG_TAIL_BYTES = 1 << 16
"""Bytes of the end that are read: vLLM writes lines of several thousand characters before it says why it ends."""
MAX_REASON_CHARS = 500
FRAME = " |+-"
"""What precedes the lines of an exception group."""

TRACEBACK = "Traceback (most recent call last):"
LAST_WORDS = "Error: "
"""How a command says why it ends."""
LEVEL = re.compile(r"(?:\S+ \S+ |\([^)]*\) )?(?:ERROR|CRITICAL) (?:\d\d-\d\d [\d:]+ \[[^\]]*\] )?")
"""What precedes the message in a log line of an error, ours or vLLM's, which repeats it in each line of a traceback."""
FOLLOWS = re.compile(
    r"(?i:(stack trace|root cause)[^.]* (above|for)\b|(stack trace|root cause) \(above)"
    r"|RuntimeError: (Executor failed\.|cancelled)$|\[dump_input\.py:"
)
"""Text of an error that only follows from an earlier one, as vLLM's "See stack trace (above) for the root cause."."""
WARNING = re.compile(r"^\S+:\d+: \w*Warning: ")
"""First line of a Python warning; the second is the line of source, indented."""


def last_lines(log_path: Path, start: int = 0, count: int | None = None) -> list[str]:
    """Return the last `count` lines (default: all in LOG_TAIL_BYTES) that were written after byte `start`, without empty lines
    and without Python's warnings; none without a log."""
    if not log_path.exists():
        return []
    with log_path.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(start, end - LOG_TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    kept = list(_without_warnings(line.rstrip() for line in lines if line.strip()))
    return kept if count is None else kept[-count:]


def reason_in(lines: Sequence[str]) -> str:
    """Return the line of a log's end that says why its service died, shortened to MAX_REASON_CHARS: the last error that does not
    follow from an earlier one, else the last error, else the last line; "" without lines."""
    errors = _errors(lines)
    reasons = [line for line in errors if not FOLLOWS.search(line)] or errors or lines
    line = reasons[-1].strip() if reasons else ""
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 3] + "..."


def _errors(lines: Sequence[str]) -> list[str]:
    """Return the lines that name an error. Of a traceback that is its last line, which replaces the log line before it."""
    errors: list[str] = []
    before_is_error = False
    margin = -1  # of an open traceback: those of an exception group are indented and framed
    for line in lines:
        level = LEVEL.match(line)
        message = line[level.end() :] if level else line.lstrip(FRAME)
        is_error = False
        if message.removeprefix("Exception Group ").startswith(TRACEBACK):
            margin = -1 if level else len(line) - len(message)
            if before_is_error:
                errors.pop()
        elif level or line.startswith(LAST_WORDS):
            is_error = not message.startswith(" ")
        elif 0 <= margin == len(line) - len(message):
            is_error, margin = True, -1
        if is_error:
            errors.append(line.lstrip(FRAME))
        before_is_error = is_error
    return errors


def _without_warnings(lines: Iterator[str]) -> Iterator[str]:
    in_warning = False
    for line in lines:
        if in_warning and line[0].isspace():
            in_warning = False
            continue
        in_warning = WARNING.match(line) is not None
        if not in_warning:
            yield line
