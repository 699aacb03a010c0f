"""Outcomes of programs under tests of every form, in a real sandbox."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.reward.builtin.code_tests import code_settings
from paceline.reward.code import harness
from paceline.reward.code.cases import read_cases
from paceline.reward.code.grading import CaseResult, grade
from paceline.reward.sandbox import Sandbox

ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"]
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == 0\n"
PYTEST = """
import pytest
from solution import add
@pytest.mark.parametrize("a", [1, 2])
def test_add(a):
    assert add(a, 1) == a + 1
def test_zero():
    assert add(0, 0) == 0
"""


def graded(
    sandbox: Sandbox, program: str, tests: Any, entry_point: str | None = None, **settings: Any
) -> list[CaseResult]:
    cases = read_cases(tests, "auto", entry_point)
    assert cases is not None
    return grade(program, cases, sandbox, code_settings({"score": "share", **settings}))


def states(results: list[CaseResult]) -> list[str]:
    return [result.state for result in results]


def test_pairs_run_once_each(sandbox: Sandbox) -> None:
    pairs = [{"input": "1 2\n", "output": "3"}, {"input": "2 2\n", "output": "4"}]
    results = graded(sandbox, "print(sum(map(int, input().split())))", pairs)
    assert states(results) == ["passed", "passed"]
    results = graded(sandbox, "print(3)", pairs)
    assert states(results) == ["passed", "wrong"]
    assert results[1].detail == "printed '3\\n'"
    results = graded(sandbox, "import sys\nprint(3)\nsys.exit('no')", pairs, score="all")
    assert states(results) == ["error", "not run"]
    assert results[0].detail == "status 1: no"


def test_another_interpreter_runs_by_its_command(sandbox: Sandbox) -> None:
    pairs = [{"input": "41\n", "output": "42"}]
    command = {"command": ["sh", "main.sh"], "file": "main.sh"}
    assert states(graded(sandbox, "read x; echo $((x + 1))", pairs, **command)) == ["passed"]


@pytest.mark.parametrize(("tests", "count"), [(ASSERTS, 3), (CHECK, 1), (PYTEST, 3)])
def test_right_programs_pass_and_wrong_ones_fail(sandbox: Sandbox, tests: Any, count: int) -> None:
    assert states(graded(sandbox, ADD, tests, "add")) == ["passed"] * count
    wrong = graded(sandbox, "def add(a, b):\n    return 7\n", tests, "add")
    assert states(wrong) == ["wrong"] * count
    assert all("AssertionError" in result.detail for result in wrong)
    stopped = graded(sandbox, "def add(a, b):\n    return 7\n", tests, "add", score="all")
    assert states(stopped) == ["wrong", "not run", "not run"][:count]


@pytest.mark.parametrize("tests", [ASSERTS, CHECK, PYTEST])
@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b)",
        "raise ValueError('no')",
        "1 / 0",
        "import sys; sys.exit(0)",
        "import no_such_module",
        "",
    ],
)
def test_a_program_that_does_not_load_fails_every_test(sandbox: Sandbox, tests: Any, program: str) -> None:
    results = graded(sandbox, program, tests, "add")
    assert results
    assert set(states(results)) == {"error"}
    assert all(result.detail for result in results)


@pytest.mark.parametrize("tests", [ASSERTS, CHECK, PYTEST])
@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "def add(a, b):\n    import os\n    os._exit(0)\n",
        "def add(a, b):\n    import sys\n    sys.exit(0)\n",
        "def add(a, b):\n    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)\n",
        "print('0 passed 0.001')\nimport os; os.write(1, b'loaded 3\\n0 passed 0.0\\n'); os._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return None",
        "class Any:\n    def __eq__(self, other): raise SystemExit(0)\ndef add(a, b): return Any()",
        "import builtins\nbuiltins.AssertionError = SystemExit\ndef add(a, b): return None",
        "import sys; sys.stdout.close(); sys.stderr.close()\ndef add(a, b): return None",
        "import os; [os.close(n) for n in range(3)]\ndef add(a, b): return None",
    ],
)
def test_ending_early_or_printing_results_passes_nothing(sandbox: Sandbox, tests: Any, program: str) -> None:
    results = graded(sandbox, program, tests, "add")
    assert results
    assert "passed" not in states(results)


def test_tests_behind_one_that_ends_the_process_are_run(sandbox: Sandbox) -> None:
    program = "def add(a, b):\n    if (a, b) == (0, 0):\n        import os; os._exit(0)\n    return a + b\n"
    assert states(graded(sandbox, program, ASSERTS)) == ["passed", "exited", "passed"]
    assert states(graded(sandbox, program, PYTEST)) == ["passed", "passed", "exited"]


@pytest.mark.parametrize(
    "loop",
    [
        "while True: pass",
        "while True:\n            try: pass\n            except BaseException: pass",
        "import time; time.sleep(1e6)",
        "9 ** 9 ** 9",  # inside one operation of C no signal is served
    ],
)
@pytest.mark.parametrize("tests", [ASSERTS, PYTEST])
def test_a_test_that_hangs_is_told_and_the_others_are_run(sandbox: Sandbox, tests: Any, loop: str) -> None:
    program = f"def add(a, b):\n    if (a, b) == (0, 0):\n        {loop}\n    return a + b\n"
    found = states(graded(sandbox, program, tests, time_s=1.0))
    assert sorted(found) == ["passed", "passed", "time"]


def test_a_program_that_hangs_while_it_loads_costs_one_limit(sandbox: Sandbox) -> None:
    results = graded(sandbox, "while True: pass", ASSERTS, time_s=0.3)
    assert states(results) == ["time"] * 3


def test_all_tests_together_keep_their_limit(sandbox: Sandbox) -> None:
    program = "import time\ntime.sleep(1.2)\nprint(input())"
    pairs = [{"input": "1", "output": "1"}] * 5
    results = graded(sandbox, program, pairs, time_s=3.0, total_time_s=3.0)
    assert states(results)[:1] == ["passed"]
    assert states(results)[3:] == ["not run", "not run"]


def test_memory_output_and_disk_are_named(sandbox: Sandbox) -> None:
    pairs = [{"input": "", "output": ""}]
    assert states(graded(sandbox, "while True: print('x' * 1000)", pairs)) == ["output"]
    assert states(graded(sandbox, "x = bytearray(10 << 30)", pairs)) == ["error"]
    assert "MemoryError" in graded(sandbox, "x = bytearray(10 << 30)", pairs)[0].detail
    disk = "f = open('x', 'wb')\nwhile True: f.write(b'x' * (1 << 20))"
    assert states(graded(sandbox, disk, pairs))[0] in ("disk", "error")


def test_right_outputs_never_enter_the_sandbox(sandbox: Sandbox) -> None:
    program = "import os\nprint(sorted(os.listdir()), input())"
    results = graded(sandbox, program, [{"input": "q", "output": "secret-output"}])
    assert results[0].detail == "printed \"['main.py'] q\\n\""


def test_a_test_sees_no_names_of_another(sandbox: Sandbox) -> None:
    tests = ["seen = 1\nassert add(1, 1) == 2", "assert 'seen' not in globals()"]
    assert states(graded(sandbox, ADD, tests)) == ["passed", "passed"]


def test_dataclasses_and_main_guards_work(sandbox: Sandbox) -> None:
    program = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
        "def add(a, b): return P(a).x + b\nif __name__ == '__main__': raise ValueError\n"
    )
    assert states(graded(sandbox, program, ASSERTS)) == ["passed"] * 3


def test_pytest_files_beside_each_other_and_a_skipped_test(sandbox: Sandbox) -> None:
    files = {
        "helpers.py": "ONE = 1",
        "test_a.py": "from solution import add\nfrom helpers import ONE\ndef test_a(): assert add(ONE, ONE) == 2",
        "test_b.py": "import pytest\n@pytest.mark.skip\ndef test_b(): pass\ndef test_c(): assert 0, 'told'",
    }
    results = graded(sandbox, ADD, files)
    assert states(results) == ["passed", "error", "wrong"]
    assert "told" in results[2].detail


def test_the_harness_needs_nothing_but_pythons_library() -> None:
    """It lies alone in the program's folder, also on a remote service."""
    tree = ast.parse(Path(harness.__file__).read_text())
    modules = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert modules - {"pytest"} <= set(sys.stdlib_module_names)
