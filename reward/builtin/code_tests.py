"""`code_tests`: a program's tests, run in a sandbox, as a reward.

Promise: a program that fails its tests gets 0, or their share, with the outcome of each test kept beside; a sandbox that fails
ends the attempt, and never makes a 0. The parts are in `reward.code` and `reward.sandbox`, imported at the first call.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidInput
from reward.builtin.inputs import column_values, completion_text
from reward.trainer_view import CallView

if TYPE_CHECKING:
    from reward.code.cases import Cases
    from reward.code.results import CaseResult
    from reward.code.settings import CodeSettings
    from reward.sandbox import Sandbox

LOGGED = ("passed", "wrong", "error", "time")
"""States of tests whose share is a metric."""


def code_tests(
    prompts: list[Any], completions: list[Any], call: CallView, settings: Mapping[str, Any], **columns: Any
) -> list[float | None]:
    """Return [C] 1 where the program in a completion passes all its tests, else 0; or the share of tests that it passes.

    `settings` are those of `reward.code.settings.CodeSettings`. None where a row has no tests. Raises InvalidInput for
    tests that cannot be read, SandboxFailed where the sandbox cannot run a program now.
    """
    from reward.code.results import reward_of

    chosen = code_settings(settings)
    sandbox = _sandbox(json.dumps(chosen.model_dump(mode="json"), sort_keys=True))
    tests = column_values(columns, chosen.tests_column)
    names = columns.get(chosen.entry_point_column) or [None] * len(completions)
    work = [
        _work(prompt, completion_text(completion), read_tests(value, name, chosen), chosen)
        for prompt, completion, value, name in zip(prompts, completions, tests, names, strict=True)
    ]
    with ThreadPoolExecutor(chosen.parallel, "code") as threads:
        graded = list(threads.map(lambda each: _graded(each, sandbox, chosen), work))
    _log(call, graded)
    return [None if each is None else reward_of(each, chosen.score) for each in graded]


def read_tests(value: Any, entry_point: Any, chosen: CodeSettings) -> Cases | None:
    """Return the tests of one row. Raises InvalidInput."""
    from reward.code.cases import Pairs, read_cases
    from reward.sandbox import PYTHON

    try:
        cases = read_cases(value, chosen.kind, entry_point)
    except InvalidInput as error:
        raise InvalidInput(f"column {chosen.tests_column!r}: {error}") from None
    if cases is not None and not isinstance(cases, Pairs) and chosen.command != (PYTHON, "main.py"):
        raise InvalidInput(
            f"column {chosen.tests_column!r} has tests in Python, but command is {list(chosen.command)}; other interpreters take "
            "pairs of input and output"
        )
    return cases


def code_settings(values: object) -> CodeSettings:
    """Return the settings of `code_tests`. Raises InvalidInput."""
    from reward.code.settings import CodeSettings
    from reward.endpoints.settings import checked_settings

    return checked_settings(CodeSettings, values, "code_tests")


@functools.cache
def _sandbox(settings_json: str) -> Sandbox:
    """Return the sandbox of these settings, probed once a process."""
    return code_settings(json.loads(settings_json)).make_sandbox()


def _work(
    prompt: Any, text: str, cases: Cases | None, chosen: CodeSettings
) -> tuple[str | None, Cases] | None:
    """Return the program and its tests; None without tests."""
    from reward.code.cases import Checks
    from reward.code.extraction import program_of, with_prompt

    if cases is None:
        return None
    program = program_of(text, chosen.extract)
    if program is not None and isinstance(cases, Checks) and cases.entry_point and isinstance(prompt, str):
        program = with_prompt(prompt, text, program, cases.entry_point)
    return program, cases


def _graded(
    work: tuple[str | None, Cases] | None, sandbox: Sandbox, chosen: CodeSettings
) -> Sequence[CaseResult] | None:
    from reward.code.grading import grade
    from reward.code.results import CaseResult

    if work is None:
        return None
    program, cases = work
    if program is None:
        return [CaseResult("not run", 0.0, "the completion has no fenced block")]
    return grade(program, cases, sandbox, chosen)


def _log(call: CallView, graded: Sequence[Sequence[CaseResult] | None]) -> None:
    """Log the shares of tests by what became of them, for the metrics of the run, and the outcomes beside the rewards."""
    from reward.code.results import describe

    label = call.label[:40]
    for results in graded:
        for state in LOGGED if results else ():
            share = sum(result.state == state for result in results or ()) / len(results or ())
            call.log_metric(f"{label}_{state}", share)
    call.log_extra(f"{label}_tests", [None if each is None else describe(each) for each in graded])
