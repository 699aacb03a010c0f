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
from paceline.spec import RewardFunctionSection
from reward.builtin.code_tests import code_settings
from reward.loading import load_function
from reward.results import RewardResult
from reward.runner import RewardRunner
from reward.sandbox import choosing

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
async def test_attacks_get_nothing_and_groups_beside_them_are_scored(
    tmp_path: Path, names: Sequence[str]
) -> None:
    """One process of the pool scores hostile programs, another one honest ones, and both are the same ones at the end."""
    with surroundings(tmp_path) as around:
        told = f"import sys\nsys.argv = ['', {json.dumps(json.dumps(around.told))}]\n"
        hostile = [told + PRELUDE + ATTACKS[name].program for name in names]
        async with RewardRunner(
            [section(kind="pairs", time_s=10.0, total_time_s=10.0, parallel=2)], num_processes=2
        ) as runner:
            pids = [process.pid for process in runner._processes]
            attacked = asyncio.create_task(
                run(runner, hostile, [{"input": "", "output": "the secret is out"}])
            )
            honest = []
            while not attacked.done():
                honest.append(
                    rewards(
                        await run(runner, ["print(int(input()) + 1)"] * 2, [{"input": "1", "output": "2"}])
                    )
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
    with pytest.raises(InvalidInput, match="readable path 'relative' of the sandbox has to be absolute"):
        async with RewardRunner([section(readable=["relative"])]):
            pass


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"sandbox": "docker"}, "code_tests.sandbox"),
        ({"sandbox": "remote"}, "needs its url"),
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
