"""Runs the tests of one program in a sandbox and returns the outcome of each.

Promises: a program that hangs, dies or fakes its end fails only its own tests, by name. Expected outputs of `pairs` and
expected values of calls never enter the sandbox. A fault of the sandbox is raised and is not an outcome. All runs
together stay within `total_time_s`.
"""

from __future__ import annotations

import functools
import json
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.reward.code.cases import (
    MAX_TESTS,
    MODULE,
    Calls,
    Cases,
    Checks,
    Compare,
    Pairs,
    PytestFiles,
    equal_outputs,
    equal_values,
)
from paceline.reward.code.settings import CodeSettings
from paceline.reward.sandbox import PYTHON, Outcome, Sandbox

State = Literal[
    "passed", "wrong", "error", "exited", "signal", "time", "memory", "output", "disk", "processes", "not run"
]
"""`wrong`: another output, or a failed assertion; `error`: an exception, or a status other than 0; `exited`: the
program ended before its test; `not run`: an earlier test failed or used up the time. The other states are those of
`Outcome.ended`."""

MAX_SHOWN = 20
MAX_DETAIL = 200


@dataclass(frozen=True)
class CaseResult:
    state: State
    duration_s: float = 0.0
    detail: str = ""
    """The error, the wrong output, or the end of standard error."""


def reward_of(results: Sequence[CaseResult], score: Literal["all", "share"]) -> float:
    """Return 1 if all tests passed, else 0; or the share of passed tests (`score`). Without tests the reward is 0."""
    passed = sum(result.state == "passed" for result in results)
    if score == "share":
        return passed / len(results) if results else 0.0
    return float(bool(results) and passed == len(results))


def describe(results: Sequence[CaseResult]) -> str:
    """Return a summary for people: `3/5 passed in 0.21 s; 2 wrong: AssertionError; 5 time`."""
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
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if len(line) <= MAX_DETAIL:
        return line
    return f"{line[: MAX_DETAIL // 2]} … {line[-MAX_DETAIL // 2 :]}"


HARNESS = "harness.py"
LOAD_S = 1.0
"""Seconds for starting the interpreter and the harness, in addition to the seconds of the tests."""
STATES: tuple[State, ...] = ("passed", "wrong", "error", "time")


def grade(
    program: str, cases: Cases, sandbox: Sandbox, settings: CodeSettings, others: Sequence[str] = ()
) -> list[CaseResult]:
    """Return the outcome of each test. If there are `others`, checks and calls test the first program that loads.
    Raises SandboxFailed, InvalidInput for a program that no sandbox accepts, RuntimeError if tests cannot run."""
    if isinstance(cases, Pairs):
        return _grade_pairs(program, cases, sandbox, settings)
    return _grade_in_harness([program, *others], cases, sandbox, settings)


def _grade_pairs(program: str, cases: Pairs, sandbox: Sandbox, settings: CodeSettings) -> list[CaseResult]:
    files = {settings.file: program.encode(errors="replace")}
    command = list(settings.command)
    if cases.decimals and settings.command == (PYTHON, "main.py"):
        files[HARNESS], command[1:1] = _harness(), [HARNESS]
    if command[0] == PYTHON:  # the benchmarks' judges print integers of any length
        command[1:1] = ["-X", "int_max_str_digits=0"]
    results: list[CaseResult] = []
    left_s = settings.total_time_s
    for given, right in cases.pairs:
        if left_s <= 0 or (settings.score == "all" and results and results[-1].state != "passed"):
            results.append(CaseResult("not run"))
            continue
        limits = settings.limits(min(settings.time_s, left_s))
        outcome = sandbox.run(command, files, limits, given.encode(errors="replace"))
        left_s -= outcome.duration_s
        by_number = cases.decimals and "compare" not in settings.model_fields_set
        results.append(_compared(outcome, right, "decimals" if by_number else settings.compare, settings.tolerance))
    return results


def _compared(outcome: Outcome, right: str, compare: Compare, tolerance: float) -> CaseResult:
    if outcome.ended != "exited":
        return CaseResult(outcome.ended, outcome.duration_s, _errors(outcome))
    if outcome.exit_code != 0:
        return CaseResult("error", outcome.duration_s, f"status {outcome.exit_code}: {_errors(outcome)}")
    found = outcome.stdout.decode(errors="replace")
    if equal_outputs(found, right, compare, tolerance):
        return CaseResult("passed", outcome.duration_s)
    return CaseResult("wrong", outcome.duration_s, f"printed {found[:100]!r}")


def _grade_in_harness(
    programs: list[str], cases: Calls | Checks | PytestFiles, sandbox: Sandbox, settings: CodeSettings
) -> list[CaseResult]:
    """Run the tests in one process. After a test that ends it, run the remaining ones in a new process."""
    files, request = _request(programs, cases, settings)
    # The first run counts the tests of pytest.
    count = None if isinstance(cases, PytestFiles) else len(request["tests"])
    judged = _judge(cases, settings.tolerance) if isinstance(cases, Calls) else None
    results: list[CaseResult] = []
    left_s = settings.total_time_s
    while left_s > 0 and (count is None or len(results) < count):
        word, first = secrets.token_hex(12), len(results)
        request |= {"word": word, "first": first}
        time_s = min(left_s, settings.time_s * ((count or MAX_TESTS) - first)) + LOAD_S
        outcome = sandbox.run([PYTHON, HARNESS], files, settings.limits(time_s), json.dumps(request).encode())
        left_s -= outcome.duration_s
        report = _reported(outcome.stdout, word, first, judged)
        results += report.results
        count = report.count if count is None else count
        if not report.loaded or not count:
            ended = _ended(outcome)
            if report.loaded:  # pytest finds no test, or the files do not load
                ended = CaseResult("error", outcome.duration_s, _errors(outcome))
            return results + [ended] * max(1, (count or 0) - len(results))
        if settings.score == "all" and any(result.state != "passed" for result in results):
            break
        if len(results) < count:
            results.append(_ended(outcome))  # in this test
    return results + [CaseResult("not run")] * max(0, (count or 0) - len(results))


def _request(
    programs: list[str], cases: Calls | Checks | PytestFiles, settings: CodeSettings
) -> tuple[dict[str, bytes], dict[str, Any]]:
    files = {f"{MODULE}.py": programs[0].encode(errors="replace"), HARNESS: _harness()}
    sources = [program.encode(errors="replace").decode() for program in programs]
    request: dict[str, Any] = {"time_s": settings.time_s, "stop": settings.score == "all", "programs": sources}
    of_cases: dict[str, Any]
    match cases:
        case Checks():
            of_cases = {
                "kind": cases.kind,
                "tests": cases.tests,
                "entry_point": cases.entry_point,
                "setup": cases.setup,
            }
        case Calls():
            of_cases = {"kind": "calls", "tests": cases.arguments, "entry_point": cases.function}
        case _:
            of_cases = {"kind": "pytest", "tests": sorted(cases.files)}
            files |= {name: content.encode(errors="replace") for name, content in cases.files.items()}
    return files, request | of_cases


def _judge(cases: Calls, tolerance: float) -> Callable[[int, str], bool]:
    """Return a function that decides, by a call's index and its result as JSON text, whether the result is right."""

    def judged(index: int, text: str) -> bool:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return False
        return any(equal_values(found, right, tolerance) for right in cases.outputs[index])

    return judged


@dataclass(frozen=True)
class Report:
    results: list[CaseResult]
    """Results of consecutive tests, from the first test that was run."""
    count: int | None
    loaded: bool
    """True if the program was loaded."""


def _reported(stdout: bytes, word: str, first: int, judged: Callable[[int, str], bool] | None) -> Report:
    """Return the harness's report. `judged` decides which calls passed. Raises RuntimeError if tests cannot run."""
    results: list[CaseResult] = []
    count, loaded = None, False
    for line in stdout.decode(errors="replace").splitlines():
        begin, _, rest = line.partition(" ")
        if begin != word:
            continue
        name, _, text = rest.partition(" ")
        if name == "cannot":
            raise RuntimeError(text)
        if name == "loaded":
            loaded, count = True, int(text) if text.isdecimal() else None
        elif name == str(first + len(results)):
            state, seconds, detail = (*text.split(" ", 2), "", "")[:3]
            known: dict[str, State] = {each: each for each in STATES}
            if judged is not None and state in ("passed", "returned"):
                is_right = state == "returned" and judged(first + len(results), detail)
                state, detail = ("passed", "") if is_right else ("wrong", f"returned {detail[:100]}")
            if state in known:
                results.append(CaseResult(known[state], _number(seconds), detail))
    return Report(results, count, loaded)


def _ended(outcome: Outcome) -> CaseResult:
    state: State = outcome.ended
    errors = _errors(outcome)
    if state == "exited":
        hung = "Timeout (" in errors  # written by faulthandler before it ends the process
        state = "time" if hung else "exited"
    return CaseResult(state, outcome.duration_s, errors)


def _errors(outcome: Outcome) -> str:
    return outcome.stderr[-2000:].decode(errors="replace").strip()


def _number(text: str) -> float:
    try:
        return max(0.0, min(float(text), 1e6))
    except ValueError:
        return 0.0


@functools.cache
def _harness() -> bytes:
    return Path(__file__).with_name(HARNESS).read_bytes()
