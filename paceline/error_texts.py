"""Texts of exceptions that foreign code raises: a user's function, a chat template, a library that reads files."""

from __future__ import annotations

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
