"""What became of the tests of one program, as a reward and as a text. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal[
    "passed", "wrong", "error", "exited", "signal", "time", "memory", "output", "disk", "processes", "not run"
]
"""`wrong`: another output, or an assertion; `error`: an exception, or a status other than 0; `exited`: the program ended before
its test did; `not run`: an earlier test failed or took the time; the others as a sandbox's `Outcome.ended`."""

MAX_SHOWN = 20
MAX_DETAIL = 200


@dataclass(frozen=True)
class CaseResult:
    """Outcome of one test."""

    state: State
    duration_s: float = 0.0
    detail: str = ""
    """The error, what was printed in place of the right output, or the end of standard error."""


def reward_of(results: Sequence[CaseResult], score: Literal["all", "share"]) -> float:
    """Return 1 where all tests have passed, else 0; or the share of them. No test is no success."""
    passed = sum(result.state == "passed" for result in results)
    if score == "share":
        return passed / len(results) if results else 0.0
    return float(bool(results) and passed == len(results))


def describe(results: Sequence[CaseResult]) -> str:
    """Return one text for people: `3/5 passed in 0.21 s; 2 wrong: AssertionError; 5 time`."""
    passed = sum(result.state == "passed" for result in results)
    total_s = math.fsum(result.duration_s for result in results)
    parts = [f"{passed}/{len(results)} passed in {total_s:.2f} s"]
    failed = [(index, result) for index, result in enumerate(results) if result.state != "passed"]
    for index, result in failed[:MAX_SHOWN]:
        detail = f": {shortened(result.detail)}" if result.detail else ""
        parts.append(f"test {index} {result.state} ({result.duration_s:.2f} s){detail}")
    if len(failed) > MAX_SHOWN:
        parts.append(f"and {len(failed) - MAX_SHOWN} more")
    return "; ".join(parts)


def shortened(text: str) -> str:
    """Return a text in one line; of a long one the beginning and the end."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if len(line) <= MAX_DETAIL:
        return line
    return f"{line[: MAX_DETAIL // 2]} … {line[-MAX_DETAIL // 2 :]}"
