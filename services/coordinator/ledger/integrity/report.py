"""What `paceline ledger verify` says, and how a comparison of damaged records goes on."""

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
"""What a comparison raises whose records are of another kind than was written."""

REMEDY = "restore a backup, or run `paceline ledger verify --repair`"

MAX_TEXT = 500
"""Characters of a problem: a damaged record can be of any length."""


@dataclass(frozen=True)
class Problem:
    """One disagreement."""

    subject: str
    """The record, group, step or file that it is about."""
    text: str

    def __str__(self) -> str:
        printable = f"{self.subject}: {self.text}".encode(errors="backslashreplace").decode()
        line = " ".join(printable.split())
        return line if len(line) <= MAX_TEXT else line[:MAX_TEXT] + "…"


@dataclass
class VerifyReport:
    """What was found. No problems: the promise holds for everything that the records can show."""

    found: list[Problem] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """What was compared, and how much of it."""

    @property
    def problems(self) -> list[str]:
        """One line for each disagreement."""
        return [str(problem) for problem in self.found]

    def compare(self, subject: str, text: str, one: object, other: object) -> None:
        """Notes a problem with `subject` unless both are equal; `text` has two places for them."""
        if one != other:
            self.problem(subject, text.format(one, other))

    def problem(self, subject: str, text: str) -> None:
        """Notes a problem with `subject`."""
        self.found.append(Problem(subject, text))

    @contextlib.contextmanager
    def reading(self, subject: str, what: str = "it") -> Iterator[None]:
        """A comparison that ends with a problem where records cannot be read as what was written."""
        try:
            yield
        except UNREADABLE as error:
            remedy = f"; {REMEDY}" if isinstance(error, sqlite3.Error) else ""
            self.problem(subject, f"{what} cannot be read: {type(error).__name__}: {error}{remedy}")
