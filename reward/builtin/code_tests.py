"""Scores programs by running their tests in a sandbox.

Promise: a program that fails tests gets 0 or the share of passed tests, and the outcome of each test is kept. A failed
sandbox ends the attempt and never gives 0.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from paceline.reward.builtin.inputs import column_values, completion_text
from paceline.reward.trainer_view import CallView

if TYPE_CHECKING:
    from paceline.reward.code.cases import Cases
    from paceline.reward.code.grading import CaseResult
    from paceline.reward.code.settings import CodeSettings
    from paceline.reward.sandbox import Sandbox

LOGGED = ("passed", "wrong", "error", "time")
"""States of tests; the share of each is a metric."""


def code_tests(
    prompts: list[Any], completions: list[Any], call: CallView, settings: Mapping[str, Any], **columns: Any
) -> list[float | None]:
    """Return [C] 1 if the program in a completion passes all its tests, else 0; or the share of passed tests (`score`).

    `settings` are `paceline.reward.code.settings.CodeSettings`. None for a row without tests. Raises InvalidInput for
    unreadable tests, SandboxFailed if the sandbox cannot run a program now.
    """
    from paceline.reward.code.grading import reward_of

    chosen = code_settings(settings)
    sandbox = _sandbox(json.dumps(chosen.model_dump(mode="json"), sort_keys=True))
    column_values(columns, chosen.tests_column)
    rows = [{name: values[index] for name, values in columns.items()} for index in range(len(completions))]
    work = [
        _work(prompt, completion_text(completion), chosen.read_row(row), chosen)
        for prompt, completion, row in zip(prompts, completions, rows, strict=True)
    ]
    with ThreadPoolExecutor(chosen.parallel, "code") as threads:
        graded = list(threads.map(lambda each: _graded(each, sandbox, chosen), work))
    _log(call, graded)
    return [None if each is None else reward_of(each, chosen.score) for each in graded]


def code_settings(values: object) -> CodeSettings:
    from paceline.reward.code.settings import CodeSettings
    from paceline.reward.endpoints.settings import checked_settings

    return checked_settings(CodeSettings, values, "code_tests")


@functools.cache
def _sandbox(settings_json: str) -> Sandbox:
    return code_settings(json.loads(settings_json)).make_sandbox()


def _work(prompt: Any, text: str, cases: Cases | None, chosen: CodeSettings) -> tuple[list[str], Cases] | None:
    """Return the candidate programs (the first that loads counts) and the tests; None without tests."""
    from paceline.reward.code.cases import Checks, names_in
    from paceline.reward.code.extraction import program_of, with_prompt

    if cases is None:
        return None
    program = program_of(text, chosen.extract, names_in(cases), python=chosen.file.endswith(".py"))
    if program is not None and isinstance(cases, Checks) and cases.entry_point:
        return with_prompt(_last_text(prompt), text, program, cases.entry_point), cases
    return [] if program is None else [program], cases


def _last_text(prompt: Any) -> str:
    last = prompt[-1] if isinstance(prompt, list | tuple) and prompt else prompt
    content = last.get("content") if isinstance(last, Mapping) else last
    return content if isinstance(content, str) else ""


def _graded(
    work: tuple[list[str], Cases] | None, sandbox: Sandbox, chosen: CodeSettings
) -> Sequence[CaseResult] | None:
    from paceline.reward.code.grading import CaseResult, grade

    if work is None:
        return None
    programs, cases = work
    if not programs:
        return [CaseResult("not run", 0.0, "the completion has no fenced block")]
    return grade(programs[0], cases, sandbox, chosen, programs[1:])


def _log(call: CallView, graded: Sequence[Sequence[CaseResult] | None]) -> None:
    """Log the share of tests in each state as metrics of the run, and store the outcomes beside the rewards."""
    from paceline.reward.code.grading import describe

    label = call.label[:40]
    for results in graded:
        for state in LOGGED if results else ():
            share = sum(result.state == state for result in results or ()) / len(results or ())
            call.log_metric(f"{label}_{state}", share)
    call.log_extra(f"{label}_tests", [None if each is None else describe(each) for each in graded])
