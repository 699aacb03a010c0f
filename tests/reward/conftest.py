"""A file with reward functions of every bad habit, and a runner on them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.reward.results import RewardResult
from paceline.reward.runner import RewardRunner
from paceline.spec import RewardFunctionSection

FUNCTIONS = """
import asyncio, os, signal, subprocess, sys, time
from neighbour import BONUS

def by_length(prompts, completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]

def takes_one_column(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

def needs_missing(completions, solution):
    return [0.0] * len(completions)

def scaled(completions, factor=1, **columns):
    return [factor * BONUS] * len(completions)

def unreachable(completions, **columns):
    try:
        raise ConnectionRefusedError("port 9")
    except OSError as error:
        raise RuntimeError("the judge is away") from error

async def waits(completions, **columns):
    await asyncio.sleep(0)
    return [2.0] * len(completions)

LOOPS = []

async def same_loop(completions, **columns):
    LOOPS.append(asyncio.get_running_loop())
    return [float(LOOPS[0] is LOOPS[-1])] * len(completions)

def none_first(completions, **columns):
    return [None] + [1.0] * (len(completions) - 1)

def numpy_values(completions, **columns):
    import numpy as np
    return [np.float32(0.5), np.int64(3), np.bool_(True), True][: len(completions)]

def numpy_array(completions, **columns):
    import numpy as np
    return np.arange(len(completions)) / 2

def pids(completions, **columns):
    return [float(os.getpid())] * len(completions)

def edits(completions, **columns):
    completions[0] = "edited"
    return [0.0] * len(completions)

def heavy_modules(completions, **columns):
    return [float(any(m in sys.modules for m in ("torch", "transformers", "sympy", "pydantic")))] * len(completions)

def prints(completions, **columns):
    print("from python")
    os.write(1, b"from below\\n")
    subprocess.run(["echo", "from a child"], check=True)
    return [1.0] * len(completions)

def raises(completions, **columns):
    raise ValueError("no such unit: furlong")

def exits(completions, **columns):
    sys.exit(3)

def leaves(completions, **columns):
    os._exit(7)

def kills_itself(completions, **columns):
    os.kill(os.getpid(), signal.SIGKILL)

def hangs(completions, **columns):
    while True:
        pass

def hangs_and_says_so(completions, pid_file, **columns):
    with open(pid_file, "w") as file:
        file.write(str(os.getpid()))
    while True:
        pass

async def hangs_async(completions, **columns):
    await asyncio.Event().wait()

def sleeps_with_child(completions, pid_file, **columns):
    child = subprocess.Popen(["sleep", "600"])
    with open(pid_file, "w") as file:
        file.write(str(child.pid))
    child.wait()

def leaves_a_fork(completions, **columns):
    if os.fork() == 0:
        time.sleep(600)
    os._exit(7)

def allocates(completions, megabytes=0, **columns):
    return [float(len(bytearray(megabytes << 20)) > 0)] * len(completions)

KEPT = []

def leaks(completions, **columns):
    KEPT.append(bytearray(100 << 20))
    return [float(len(KEPT))] * len(completions)

def too_short(completions, **columns):
    return [1.0] * (len(completions) - 1)

def nan_at_one(completions, **columns):
    return [1.0, float("nan")]

def infinite(completions, **columns):
    return [float("inf"), 1.0]

def beyond_float32(completions, **columns):
    return [1.0, 1e39]

def enormous_int(completions, **columns):
    return [10**400, 1]

def text_values(completions, **columns):
    return ["1", "0"]

def no_list(completions, **columns):
    return 1.0

NOT_CALLABLE = 3
"""


@pytest.fixture
def functions_file(tmp_path: Path) -> Path:
    """The file above, with a neighbour that it imports."""
    (tmp_path / "neighbour.py").write_text("BONUS = 1.5\n")
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
async def make_runner(functions_file: Path) -> AsyncIterator[Callable[..., Awaitable[RewardRunner]]]:
    """`await make_runner("raises", {"function": "length", …})`: a started runner, closed at the end of the test."""
    runners: list[RewardRunner] = []

    async def make(*functions: str | dict[str, Any], num_processes: int = 1) -> RewardRunner:
        sections = [
            RewardFunctionSection(**({"function": f"{functions_file}:{f}"} if isinstance(f, str) else f))
            for f in functions
        ]
        runner = RewardRunner(sections, num_processes=num_processes)
        runners.append(runner)
        await runner.start()
        return runner

    yield make
    for runner in runners:
        await runner.close()


@pytest.fixture
def score_two() -> Callable[..., Awaitable[RewardResult]]:
    """`await score_two(runner, answer=[…])`: scores two completions, of one and of three tokens."""

    async def score(runner: RewardRunner, **columns: list[Any]) -> RewardResult:
        return await runner.score(["1+1=", "1+1="], ["2", "3"], [[7], [7, 8, 9]], columns)

    return score
