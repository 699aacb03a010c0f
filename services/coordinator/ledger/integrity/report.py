"""The report of `paceline ledger verify`, which goes on after records that cannot be read."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import PacelineError

UNREADABLE = (
    *(
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ),
    *(OSError, PacelineError, sqlite3.Error),
)
"""Errors of a comparison whose records are of another kind than was written."""

REMEDY = "restore a backup, or what `sqlite3 .recover` can read (docs/operate.md)"

MAX_TEXT = 500
"""Characters of a problem: a damaged record can be of any length."""


@dataclass(frozen=True)
class Problem:
    """A disagreement between records."""

    subject: str
    """Record, group, step or file with the problem."""
    text: str

    def __str__(self) -> str:
        printable = f"{self.subject}: {self.text}".encode(errors="backslashreplace").decode()
        line = " ".join(printable.split())
        return line if len(line) <= MAX_TEXT else line[:MAX_TEXT] + "…"


@dataclass
class VerifyReport:
    """Problems that were found. None: the promise holds for everything that the records can show."""

    found: list[Problem] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that were compared, and their number."""

    @property
    def problems(self) -> list[str]:
        """One line for each problem."""
        return [str(problem) for problem in self.found]

    def compare(self, subject: str, text: str, one: object, other: object) -> None:
        """Add a problem with `subject` unless both values are equal; `text` has two placeholders for them."""
        if one != other:
            self.problem(subject, text.format(one, other))

    def problem(self, subject: str, text: str) -> None:
        """Add a problem with `subject`."""
        self.found.append(Problem(subject, text))

    @contextlib.contextmanager
    def reading(self, subject: str, what: str = "it") -> Iterator[None]:
        """Add a problem where the records of the body cannot be read as what was written."""
        try:
            yield
        except UNREADABLE as error:
            remedy = f"; {REMEDY}" if isinstance(error, sqlite3.Error) else ""
            self.problem(subject, f"{what} cannot be read: {type(error).__name__}: {error}{remedy}")
