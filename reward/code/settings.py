"""Settings of `code_tests`: its `kwargs`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline.errors import InvalidInput
from paceline.reward.code.cases import Cases, Compare, Kind, Pairs, read_cases
from paceline.reward.sandbox import PYTHON, Limits, Sandbox, make_sandbox
from paceline.spec.sections.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section

SHARE_OF_CALL = 0.9
"""Share of `timeout_s` that the programs of a group may use. The rest is for the sandbox and the answer."""
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]


class CodeSettings(Section):
    sandbox: Literal["auto", "bwrap", "landlock", "remote", "none"] = "auto"
    """Isolation of the programs. `auto` is the first kind that works on the worker's host; without one the run is
    refused."""
    url: str | None = None
    """URL of the sandbox `remote`."""
    readable: tuple[str, ...] = ()
    """Further absolute paths that programs may read."""
    tests_column: Annotated[str, Field(min_length=1)] = "tests"
    """Column with the tests of a row; a null value gives the reward None."""
    kind: Kind | Literal["auto"] = "auto"
    """Form of the tests. `auto` recognises it from the value."""
    entry_point_column: Annotated[str, Field(min_length=1)] = "entry_point"
    """Column with the function's name if tests do not name it (`humaneval`), or LiveCodeBench's `metadata`."""
    setup_columns: tuple[str, ...] = ("test_setup_code", "test_imports")
    """Columns with Python that runs before each of the `asserts`, as in MBPP; missing columns are ignored."""
    score: Literal["all", "share"] = "all"
    """Reward. `all`: 1 if all tests pass, else 0; `share`: the share of tests that pass."""
    command: Annotated[tuple[str, ...], Field(min_length=1)] = (PYTHON, "main.py")
    """Command that runs a program with pairs of input and output, in its folder; `python` is the worker's interpreter."""
    file: FileName = "main.py"
    """Name of the program's file for `command`."""
    extract: Literal["auto", "block", "none"] = "auto"
    """Part of a completion that is the program. `auto`: its last fenced block, or all of it if there is no block;
    `block`: its last fenced block, or nothing if there is no block; `none`: all of it."""
    compare: Compare = "lines"
    """Comparison of outputs. `lines`: without white space at the ends of lines; `tokens`: only the words; `decimals`:
    lines are equal or have equal numbers (the default for tests with a `testtype`); `exact`: every byte."""
    tolerance: NonNegativeFloat = 0.0
    """Largest difference, absolute or relative, of numbers that count as equal, for `lines`, `tokens` and values of
    calls."""
    time_s: PositiveFloat = 3.0
    """Seconds that one test may take."""
    total_time_s: PositiveFloat = 6.0
    """Seconds that all tests of one completion may take. A test that has not run by then counts as not passed."""
    parallel: PositiveInt = 2
    """Number of programs that one call runs at the same time. A worker runs this many programs for each of its
    `--processes`."""
    memory_mb: PositiveInt = 512
    """Largest memory of a program in MiB; see the sandbox's limit of that name."""
    processes: PositiveInt = 1
    """Number of processes that a program may have at the same time; `landlock` allows only 1."""
    disk_mb: PositiveInt = 64
    """Largest size of a program's files together, in MiB."""
    output_bytes: PositiveInt = 1 << 20
    """Largest output of a program, in bytes."""

    @property
    def columns(self) -> set[str]:
        named = {self.entry_point_column} if self.kind == "humaneval" else set()
        return {self.tests_column} | named

    def read_row(self, row: Mapping[str, Any]) -> Cases | None:
        setup = [row.get(name) for name in self.setup_columns]
        try:
            cases = read_cases(row.get(self.tests_column), self.kind, row.get(self.entry_point_column), setup)
        except InvalidInput as error:
            raise InvalidInput(f"column {self.tests_column!r}: {error}") from None
        if cases is not None and not isinstance(cases, Pairs) and self.command != (PYTHON, "main.py"):
            raise InvalidInput(
                f"column {self.tests_column!r} has tests in Python, but command is {list(self.command)}; for another "
                "interpreter, write the tests as pairs of input and output"
            )
        return cases

    def longest_s(self, num_completions: int) -> float:
        """Return the seconds of a call if every program uses all of its time."""
        return math.ceil(num_completions / self.parallel) * self.total_time_s / SHARE_OF_CALL

    def limits(self, time_s: float) -> Limits:
        return Limits(
            time_s=time_s,
            memory_mb=self.memory_mb,
            processes=self.processes,
            output_bytes=self.output_bytes,
            disk_mb=self.disk_mb,
        )

    def make_sandbox(self) -> Sandbox:
        """Return the sandbox. Raises InvalidInput if it does not isolate programs on this host."""
        return make_sandbox(self.sandbox, readable=self.readable, url=self.url)

    def check_host(self) -> None:
        self.make_sandbox()
        if self.kind == "pytest" and self.sandbox != "remote" and importlib.util.find_spec("pytest") is None:
            raise InvalidInput(
                "code_tests: kind is pytest, but pytest is not installed on this worker; pip install pytest"
            )

    def check_submitted(self, row: Mapping[str, Any], num_completions: int, timeout_s: float) -> None:
        """Raise InvalidInput for unreadable tests of a row, or for groups whose programs may take longer than a call."""
        self.read_row(row)
        if (longest_s := self.longest_s(num_completions)) > timeout_s:
            raise InvalidInput(
                f"{num_completions} programs of up to total_time_s {self.total_time_s:g}, {self.parallel} at a time (parallel), "
                f"may take {longest_s:.0f} s, but timeout_s of the function is {timeout_s:g}; raise timeout_s "
                f"to {longest_s:.0f}, or change total_time_s or parallel"
            )

    @model_validator(mode="after")
    def _check(self) -> CodeSettings:
        if (self.sandbox == "remote") != (self.url is not None):
            raise ValueError(
                "sandbox remote needs the setting url, such as url: http://sandbox:8080"
                if self.url is None
                else f"url {self.url!r} is for sandbox remote, but sandbox is {self.sandbox}; remove url"
            )
        if self.time_s > self.total_time_s:
            raise ValueError(f"time_s {self.time_s:g} exceeds total_time_s {self.total_time_s:g}; lower time_s")
        if self.sandbox == "landlock" and self.processes > 1:
            raise ValueError(
                f"processes is {self.processes}, but sandbox landlock runs one process; set processes to 1"
            )
        if self.kind not in ("auto", "pairs") and self.command != (PYTHON, "main.py"):
            raise ValueError(
                f"command is for kind pairs, but kind is {self.kind}, whose tests are Python; remove command"
            )
        if self.tolerance and self.compare in ("exact", "decimals"):
            raise ValueError(
                f"tolerance {self.tolerance:g} is for compare lines or tokens, not {self.compare}; remove tolerance"
            )
        return self
