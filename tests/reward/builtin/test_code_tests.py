"""`code_tests` through the runner, in its own process, with programs of every kind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sandbox_attacks import ATTACKS, PRELUDE, surroundings

from paceline.errors import InvalidInput
from paceline.reward.builtin.code_tests import code_settings, code_tests
from paceline.reward.calling import load_function
from paceline.reward.results import RewardResult
from paceline.reward.runner import RewardRunner
from paceline.reward.sandbox import choosing
from paceline.reward.trainer_view import CallView
from paceline.spec import RewardFunctionSection

TASKS = Path(__file__).resolve().parents[3] / "examples" / "code" / "tasks.jsonl"
ADD = "def add(a, b): return a + b"
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]


@pytest.fixture(autouse=True, scope="module")
def _a_sandbox_holds() -> None:
    try:
        choosing.make_sandbox("auto")
    except InvalidInput as error:
        pytest.skip(str(error))


def section(**kwargs: Any) -> RewardFunctionSection:
    return RewardFunctionSection(function="code_tests", kwargs=kwargs, timeout_s=120)


async def score(completions: list[Any], tests: Any, prompt: Any = "", **kwargs: Any) -> RewardResult:
    async with RewardRunner([section(**kwargs)]) as runner:
        return await run(runner, completions, tests, prompt)


async def run(runner: RewardRunner, completions: list[Any], tests: Any, prompt: Any = "") -> RewardResult:
    count = len(completions)
    columns = {"tests": [tests] * count}
    return await runner.score([prompt] * count, completions, [[1]] * count, columns)


def rewards(result: RewardResult) -> list[float]:
    assert result.failure is None, result.failure
    assert result.rewards_CF is not None
    values: list[float] = result.rewards_CF[:, 0].tolist()
    return values


async def test_all_or_the_share_with_each_outcome_kept_beside() -> None:
    programs = [f"Here:\n```python\n{ADD}\n```", "def add(a, b): return 3", "no program at all"]
    result = await score(programs, TESTS)
    assert rewards(result) == [1.0, 0.0, 0.0]
    right, wrong, none = result.extra["code_tests_tests"]
    assert right.startswith("2/2 passed in ")
    assert "1/2 passed" in wrong
    assert "test 1 wrong" in wrong
    assert "AssertionError" in wrong
    assert "test 0 error" in none
    assert "SyntaxError" in none
    shares = await score(programs, TESTS, score="share")
    assert rewards(shares) == [1.0, 0.5, 0.0]
    assert shares.metrics["code_tests_passed"] == (1.5, 3)


async def test_chats_and_rows_without_tests() -> None:
    chat = [{"role": "assistant", "content": ADD}]
    assert rewards(await score([chat], TESTS, [{"role": "user", "content": "add"}])) == [1.0]
    (nothing,) = rewards(await score([ADD], None))
    assert nothing != nothing  # None


async def test_tests_that_cannot_be_read_are_no_reward() -> None:
    result = await score([ADD], ["assert ("])
    assert result.rewards_CF is None
    assert result.failure is not None
    assert "column 'tests': test 0 is not Python" in result.failure.message


@pytest.mark.merge
@pytest.mark.slow
async def test_canonical_solutions_pass_and_broken_ones_fail() -> None:
    """Made tasks in HumanEval's form: 100 % and 0 %."""
    tasks = [json.loads(line) for line in TASKS.read_text().splitlines()]
    assert len(tasks) == 20
    found = []
    async with RewardRunner([section(kind="humaneval")]) as runner:
        for task in tasks:
            texts = [
                task["canonical_solution"],
                f"```python\n{task['prompt']}{task['canonical_solution']}```",
                task["broken_solution"],
                f"```python\n{task['prompt']}{task['broken_solution']}```",
            ]
            columns = {name: [task[name]] * 4 for name in ("test", "entry_point")}
            columns["tests"] = columns.pop("test")
            result = await runner.score([task["prompt"]] * 4, texts, [[1]] * 4, columns)
            found.append(rewards(result))
    assert found == [[1.0, 1.0, 0.0, 0.0]] * 20


QUICK = (
    "fork bomb", "10 GB at once", "TCP to loopback", "writing outside", "1 GB of output", "a full disk by one file",
    "signals to others", "ptrace", "daemon",
)  # fmt: skip
ALL = [name for name in ATTACKS if ATTACKS[name].time_s <= 10 and not ATTACKS[name].x86_64_only]


@pytest.mark.parametrize("names", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)], ids=["quick", "all"])
async def test_attacks_get_nothing_and_groups_beside_them_are_scored(tmp_path: Path, names: Sequence[str]) -> None:
    """One process of the pool scores hostile programs, another one honest ones, and both are the same ones at the end."""
    with surroundings(tmp_path) as around:
        told = f"import sys\nsys.argv = ['', {json.dumps(json.dumps(around.told))}]\n"
        hostile = [told + PRELUDE + ATTACKS[name].program for name in names]
        async with RewardRunner(
            [section(kind="pairs", time_s=10.0, total_time_s=10.0, parallel=2)], num_processes=2
        ) as runner:
            pids = [process.pid for process in runner._processes]
            attacked = asyncio.create_task(run(runner, hostile, [{"input": "", "output": "the secret is out"}]))
            honest = []
            while not attacked.done():
                honest.append(
                    rewards(await run(runner, ["print(int(input()) + 1)"] * 2, [{"input": "1", "output": "2"}]))
                )
            assert rewards(await attacked) == [0.0] * len(names)
            assert [process.pid for process in runner._processes] == pids
        assert len(honest) > 1
        assert all(each == [1.0, 1.0] for each in honest)
        assert around.reached == []
        assert list((tmp_path / "tmp").iterdir()) == []
        assert around.secret.read_text() == around.told["secret_text"]
    texts = (await attacked).extra["code_tests_tests"]
    for name, text in zip(names, texts, strict=True):
        assert "test 0" in text, name


async def test_a_sandbox_that_fails_is_no_reward() -> None:
    """The group is scored again later; a service that cannot be reached says nothing about the program."""
    result = await score([ADD], TESTS, sandbox="remote", url="http://127.0.0.1:9")
    assert result.rewards_CF is None
    assert result.failure is not None
    assert result.failure.kind == "unavailable"
    assert "127.0.0.1:9" in result.failure.message


async def test_a_run_is_refused_where_nothing_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(readable: object) -> Any:
        raise choosing.SandboxFailed("it is not installed")

    monkeypatch.setattr(choosing, "LOCAL", dict.fromkeys(choosing.AUTO, absent))
    with pytest.raises(InvalidInput, match=r"sandbox auto does not hold on this host .* write sandbox: none"):
        load_function("code_tests", {})
    load_function("code_tests", {"sandbox": "none"})  # it has to be written out


async def test_the_refusal_reaches_the_run() -> None:
    with pytest.raises(InvalidInput, match="readable path 'relative' of the sandbox must be absolute"):
        async with RewardRunner([section(readable=["relative"])]):
            pass


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"sandbox": "docker"}, "code_tests.sandbox"),
        ({"sandbox": "remote"}, "needs the setting url"),
        ({"url": "http://x"}, "is for sandbox remote"),
        ({"time_s": 20}, "time_s 20 exceeds total_time_s 6"),
        ({"sandbox": "landlock", "processes": 2}, "landlock runs one process"),
        ({"kind": "asserts", "command": ["node", "x.js"]}, "command is for kind pairs"),
        ({"compare": "exact", "tolerance": 0.1}, "tolerance 0.1"),
        ({"test_column": "x"}, "takes no 'test_column', did you mean 'tests_column'"),
        ({"file": "../x"}, "code_tests.file"),
    ],
)
def test_wrong_settings_are_told(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        code_settings(kwargs)


async def test_python_tests_with_another_interpreter_are_told() -> None:
    result = await score([ADD], TESTS, command=["sh", "main.sh"])
    assert result.failure is not None
    assert "has tests in Python, but command is ['sh', 'main.sh']" in result.failure.message


FN = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
LCB = [{"input": "[1, 2]\n3", "output": "true", "testtype": "functional"}]
HAS = "class Solution:\n    def has(self, xs: List[int], x: int) -> bool:\n        return x in xs or x == 3\n"
EVEN = "def even(n): return n % 2 == 0"
TYPED = 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Return the sum.\n    >>> total([1])\n    1\n    """\n'
TOTAL = {"entry_point": "total", "tests": "def check(candidate):\n    assert candidate([1, 2]) == 3\n"}
HELPED = 'def twice(x):\n    return 2 * x\n\n\ndef total(xs):\n    """Sum of twice each."""\n'
ONE = [{"input": "1\n", "output": "1\n"}]


def fn(inputs: Any, outputs: Any, name: str = "f") -> dict[str, Any]:
    return {"tests": {"fn_name": name, "inputs": inputs, "outputs": outputs}}


def stdin(output: str, given: str = "", **more: Any) -> dict[str, Any]:
    return {"tests": [{"input": given, "output": output, **more}]}


PROGRAMS: dict[str, tuple[str, dict[str, Any], float]] = {
    # calls of a function (APPS, TACO, PRIME, LiveCodeBench); volcengine/verl#2811
    "a function by name": (ADD, {"tests": FN}, 1.0),
    "as JSON text": (ADD, {"tests": json.dumps(FN)}, 1.0),
    "a wrong function": ("def add(a, b): return 3", {"tests": FN}, 0.0),
    "a method of Solution": ("class Solution:\n    def add(self, a, b): return a + b", {"tests": FN}, 1.0),
    "arguments on lines, a boolean": (HAS, {"tests": LCB, "entry_point": json.dumps({"func_name": "has"})}, 1.0),
    "the same as PRIME has it": (EVEN, fn(["2", "3"], ["true", "false"], "even"), 1.0),
    "booleans as Python writes them": (EVEN, fn(["2", "3"], ["True", "False"], "even"), 1.0),
    "booleans as text beside arguments": (EVEN, fn([[2], [3]], ["true", "false"], "even"), 1.0),
    "a wrong boolean": ("def even(n): return True", fn([[2], [3]], ["true", "false"], "even"), 0.0),
    "an output within a list": ("def f(x): return x + 1", fn([[1], [2]], [[2], [3]]), 1.0),
    "a list of two is no wrapped value": ("def f(x): return 1", fn([[1]], [[1, 2]]), 0.0),
    "a tuple for a list": ("def f(x): return (x, (x, 1))", fn([[1]], [[1, [1, 1]]]), 1.0),
    "an order": ("def f(x): return sorted(x)", fn([[[2, 1]]], [[2, 1]]), 0.0),
    "a set is no list": ("def f(x): return {x}", fn([[1], [2]], [[1], [2]]), 0.0),
    "a generator is no list": ("def f(x): yield x; yield x", fn([[1]], [[1, 1]]), 0.0),
    "None": ("def f(x): return None", fn([[1]], [None]), 1.0),
    "text of a number is no number": ("def f(x): return str(x)", fn([[1]], [1]), 0.0),
    "keys that are numbers": ("def f(d): return {k + 1: v for k, v in d.items()}", fn([[{"1": 2}]], [{"2": 2}]), 1.0),
    "a float that is an integer": ("def f(x): return x / 2", fn([[4]], [2]), 1.0),
    "a float, exactly": ("def f(x): return x / 3 + 1e-9", fn([[1]], [1 / 3]), 0.0),
    "a float with a tolerance": ("def f(x): return x / 3 + 1e-9", {**fn([[1]], [1 / 3]), "tolerance": 1e-6}, 1.0),
    "floats in a list with a tolerance": ("def f(x): return [x / 3 + 1e-9]", {**fn([[1], [1]], [[1 / 3], [1 / 3]]), "tolerance": 1e-6}, 1.0),
    "arguments that are mutated": ("def f(xs): xs.append(1); return len(xs)", fn([[[]], [[]]], [1, 1]), 1.0),
    "debugging in function mode": ("def f(x): print('x', x); return x", fn([[1]], [1]), 1.0),
    "names that a starter presumes": ("def f(xs: List[int]): return Counter(xs).most_common(1)[0][0]", fn([[[1, 1]]], [1]), 1.0),
    "a presumed name is not the program's": ("x = 1", fn([[12, 18]], [6], "gcd"), 0.0),
    "deep recursion": ("def f(n): return n and 1 + f(n - 1)", fn([[5000]], [5000]), 1.0),
    "no arguments": ("def f(): return 1", {"tests": [{"input": "", "output": "1", "testtype": "functional"}], "entry_point": "f"}, 1.0),
    "a row of SYNTHETIC-1": (ADD, {"tests": {"language": "python", "test_cases": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}]}}, 1.0),
    "a list of PRIME around the value, as in the rows of APPS that it took apart": (ADD, {"tests": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}]}, 1.0),
    "a type and a name, as PRIME has them": (ADD, {"tests": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}]}, 1.0),
    # verdicts that a program forges
    "equal to all": ("class A:\n    def __eq__(s, o): return True\ndef add(a, b): return A()", {"tests": FN}, 0.0),
    "a number equal to all": ("class A(int):\n    def __eq__(s, o): return True\ndef add(a, b): return A()", {"tests": FN}, 0.0),
    "an end of its own": ("import os\ndef add(a, b): os._exit(0)", {"tests": FN}, 0.0),
    "JSON of its own": ("import json\njson.dumps = lambda *a, **k: 'true'\ndef add(a, b): return 1", {"tests": FN}, 0.0),
    "claims": ("import os, gc\nfor o in gc.get_objects():\n    w = getattr(o, '_word', None)\n    if isinstance(w, str): os.write(o._out, f'{w} loaded 2\\n{w} 0 passed 0 \\n{w} 1 passed 0 \\n'.encode())\nos._exit(0)", {"tests": FN}, 0.0),
    # standard input
    "input and sys.stdin": ("import sys\na = input()\nprint(a + sys.stdin.readline().strip())", stdin("12", "1\n2\n"), 1.0),
    "reading beyond the input": ("input(); input()", stdin("", "1\n"), 0.0),
    "bytes to standard output": ("import sys\nsys.stdout.buffer.write(b'7')", stdin("7"), 1.0),  # NVIDIA-NeMo/Gym#2956
    "an integer of 5000 digits": ("print(10 ** 5000)", stdin("1" + "0" * 5000), 1.0),
    "a main guard": ("if __name__ == '__main__':\n    print(input())", stdin("7", "7"), 1.0),
    "right, and then a status": ("print(7)\nraise SystemExit(3)", stdin("7"), 0.0),
    "decimals of LiveCodeBench": ("print('  1.50 2')", stdin("1.5 2.0", testtype="stdin"), 1.0),
    "names that LiveCodeBench presumes": ("n = int(sys.stdin.readline())\nprint(Counter([n]).most_common(1)[0][0], gcd(4, 6))", stdin("7 2", "7\n", testtype="stdin"), 1.0),
    "the future, a main guard and depth there": ("from __future__ import annotations\ndef f(n: List[int]): return n and 1 + f(n - 1)\nif __name__ == '__main__':\n    print(f(int(input())))", stdin("5000", "5000", testtype="stdin"), 1.0),
    "an error there": ("print(7)\nraise ValueError", stdin("7", testtype="stdin"), 0.0),
    "decimals are exact there": ("print(0.1 + 0.2)", stdin("0.3", testtype="stdin"), 0.0),
    "numbers as text elsewhere": ("print('1.50')", stdin("1.5"), 0.0),
    "columns of CodeContests": ("print(int(input()) + 1)", {"tests": {"input": ["1\n", "2\n"], "output": ["2\n", "3\n"]}}, 1.0),
    "a null name of a function": ("print(input())", {"tests": {"fn_name": None, "inputs": ["1"], "outputs": ["1"]}}, 1.0),
    # HumanEval
    "a body": ("    return sum(xs)\n", {**TOTAL, "prompt": TYPED}, 1.0),
    "a body in a fence": ("```python\n    return sum(xs)\n```", {**TOTAL, "prompt": TYPED}, 1.0),
    "a body and a run-on that is cut off": ("    return sum(xs)\n\n\ndef more(x):\n    return (", {**TOTAL, "prompt": TYPED}, 1.0),
    "a body and a run-on that reads": ("    return sum(xs)\n\nprint(total(input()))\n", {**TOTAL, "prompt": TYPED}, 1.0),
    "a body without its first indentation": ("n = 0\n    for x in xs:\n        n += x\n    return n", {**TOTAL, "prompt": TYPED}, 1.0),  # EleutherAI/lm-evaluation-harness#3126
    "a body behind reasoning": ("<think>hm</think>    return sum(xs)\n", {**TOTAL, "prompt": TYPED}, 1.0),
    "a body, a fence and words": ("    return sum(xs)\n```\nThis adds them.\n", {**TOTAL, "prompt": TYPED}, 1.0),
    "a function without the prompt's imports": ("```python\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n```", {**TOTAL, "prompt": TYPED}, 1.0),
    "the same of a chat": ("```python\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n```", {**TOTAL, "prompt": [{"role": "user", "content": f"Complete it:\n```python\n{TYPED}```"}]}, 1.0),
    "a function of the prompt": ("def total(xs):\n    return sum(map(twice, xs)) // 2", {**TOTAL, "prompt": HELPED}, 1.0),
    "a prompt in words": ("def total(xs): return sum(xs)", {**TOTAL, "prompt": "Add a list."}, 1.0),
    "imports of the future": ("from __future__ import annotations\ndef total(xs: List[int]): return sum(xs)", {**TOTAL, "prompt": TYPED}, 1.0),
    "a method by its path": ("class Solution:\n    def total(self, xs): return sum(xs)", {**TOTAL, "entry_point": "Solution().total"}, 1.0),
    "names that LeetCode's starter presumes": ("class Solution:\n    def total(self, xs: List[int]): return sum(xs)", {**TOTAL, "entry_point": "Solution().total"}, 1.0),
    # MBPP
    "a run-on behind MBPP's mark": ("def f(): return 3\n[DONE]\nNow f(5):\n[BEGIN]\ndef f(): return 5\n", {"tests": ["assert f() == 3"]}, 1.0),
    "set-up code": ("def f(): return ROOT", {"tests": ["assert f() == 3"], "test_setup_code": "ROOT = 3"}, 0.0),
    "set-up code that uses the program": ("class Node:\n    pass\ndef f(n): return isinstance(n, Node)", {"tests": ["assert f(root)"], "test_setup_code": "root = Node()"}, 1.0),
    "imports of tests": ("def f(): return 0.1 + 0.2", {"tests": ["assert math.isclose(f(), 0.3)"], "test_imports": ["import math"]}, 1.0),
    # fences
    "tildes": ("~~~py\ndef add(a, b): return a + b\n~~~", {"tests": TESTS}, 1.0),
    "a fence in a list": ("1. So:\n\n   ```python\n   def add(a, b):\n       return a + b\n   ```", {"tests": TESTS}, 1.0),
    "an example behind it": (f"```python\n{ADD}\n```\nUse it:\n```python\nprint(add(1, int(input())))\n```", {"tests": TESTS}, 1.0),
    "its output behind it, without a word": ("```python\nprint(input())\n```\nIt prints\n```\n1\n```", {"tests": ONE}, 1.0),
    "its output behind it": ("```python3\nprint(input())\n```\nIt prints\n```text\n1\n```", {"tests": ONE}, 1.0),
    "how to run it behind it": ("```python\nprint(input())\n```\n```bash\npython main.py\n```", {"tests": ONE}, 1.0),
    "a stray fence behind it": (f"```python\n{ADD}\n```\n```", {"tests": TESTS}, 1.0),
    "a fence in a docstring": ('```python\ndef add(a, b):\n    """Add.\n\n    ```\n    add(1, 2)\n    ```\n    """\n    return a + b\n```', {"tests": TESTS}, 1.0),
    "longer fences": ("````python\ns = '''\n```\n'''\nprint(input())\n````", {"tests": ONE}, 1.0),
    "a block in a block of Markdown": (f"```markdown\n# Sum\n```python\n{ADD}\n```\n```", {"tests": TESTS}, 1.0),
    "a fence behind words": (f"Here: ```python\n{ADD}\n```", {"tests": TESTS}, 1.0),
    "lines of Windows": (f"```python\r\n{ADD}\r\n```\r\nDone.\r\n", {"tests": TESTS}, 1.0),
    "a block that its prompt has opened": (f"{ADD}\n```", {"tests": TESTS}, 1.0),  # noonghunna/benchlocal-cli#120
    "words behind such a block": (f"{ADD}\n```\nIt adds:\n```python\nprint(add(1, 2))\n```", {"tests": TESTS}, 1.0),
    "it reads standard input": ("print(input())\n```", {"tests": ONE}, 1.0),
    "two attempts": (f"```python\ndef add(a, b): return 0\n```\nNo:\n```python\n{ADD}\n```", {"tests": TESTS}, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_count_as_in_their_benchmarks(name: str) -> None:
    completion, given, expected = PROGRAMS[name]
    settings = {key: given[key] for key in given.keys() & {"tolerance"}} | {"sandbox": "none"}
    columns = {key: [given[key]] for key in given.keys() - {"tolerance", "prompt"}}
    prompt = given.get("prompt", "")
    text = [{"role": "assistant", "content": completion}] if isinstance(prompt, list) else completion
    assert code_tests([prompt], [text], CallView(), settings, **columns) == [expected]


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ({**FN, "timeout": 3}, "the tests have the key 'timeout'"),
        ([{"input": "1", "output": "1", "explanation": "x"}], "test 0 has the key 'explanation'"),
        ([{"input": "1", "output": "1", "testtype": "interactive"}], "the type 'interactive'"),
        (LCB, "need its name, not None; set entry_point_column"),
        ([*LCB, {"input": "1", "output": "1", "testtype": "stdin"}], "tests of one type"),
        ([{"input": "a b", "output": "1", "testtype": "functional", "fn_name": "f"}], "each on a line as JSON"),
        ({"input": ["1"], "output": ["1", "2"]}, "1 inputs but 2 outputs"),
        ("eJxrYJ0qwAABU3oYo6tKUpVqIQ", "asserts nothing"),
        ({"base_input": [[1]], "plus_input": [[2]]}, "an object with input and output"),
        ([{**LCB[0], "fn_name": "f"}, {**LCB[0], "fn_name": "g"}], "the tests call 2 functions"),
    ],
)  # fmt: skip
def test_tests_of_no_known_form_are_refused_by_name(tests: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=f"column 'tests': .*{said}"):
        code_settings({}).check_submitted({"tests": tests}, 1, 60.0)
