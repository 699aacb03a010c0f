"""The runner with real processes: every way a function can fail, and that the runner goes on after each."""

from __future__ import annotations

import asyncio
import math
import os
import re
import select
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import ALIKE, Conflict, InvalidInput
from paceline.reward.results import RewardFailure, RewardResult
from paceline.reward.runner import RewardRunner
from paceline.spec import RewardFunctionSection

DEADLINE_S = 60.0

MakeRunner = Callable[..., Awaitable[RewardRunner]]
ScoreTwo = Callable[..., Awaitable[RewardResult]]


def failure_of(result: RewardResult) -> RewardFailure:
    assert result.rewards_CF is None
    assert result.failure is not None
    return result.failure


def rewards_of(result: RewardResult) -> list[list[float]]:
    assert result.failure is None
    assert result.rewards_CF is not None
    assert result.rewards_CF.dtype == np.float32
    return result.rewards_CF.tolist()  # type: ignore[no-any-return]


async def gone(pid: int) -> bool:
    """Waits, up to the deadline, for process `pid` to end; one that nobody has reaped has ended too."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        readable, _, _ = await asyncio.to_thread(select.select, [descriptor], [], [], DEADLINE_S)
        return bool(readable)
    finally:
        os.close(descriptor)


async def test_functions_score_in_order_with_ids_columns_and_kwargs(
    make_runner: MakeRunner, score_two: ScoreTwo, functions_file: Path
) -> None:
    scaled = {"function": f"{functions_file}:scaled", "kwargs": {"factor": 4}}
    runner = await make_runner("by_length", "takes_one_column", scaled, {"function": "math_accuracy"})
    result = await score_two(runner, answer=["2", "2"], source=["x", None])
    assert rewards_of(result) == [[1, 1, 6, 0], [3, 0, 6, 0]]
    assert len(result.durations_s_F) == 4
    assert all(duration_s > 0 for duration_s in result.durations_s_F)


async def test_async_none_and_numpy_results(make_runner: MakeRunner, score_two: ScoreTwo) -> None:
    runner = await make_runner("waits", "none_first", "numpy_values", "numpy_array", "same_loop")
    first, second = rewards_of(await score_two(runner))
    assert first[0] == 2
    assert math.isnan(first[1])
    assert [*first[2:], *second] == [0.5, 0, 1, 2, 1, 3, 0.5, 1]
    assert rewards_of(await score_two(runner))[0][4] == 1  # one event loop for all calls: sessions stay open


async def test_the_process_is_light_and_arguments_are_each_functions_own(
    make_runner: MakeRunner, score_two: ScoreTwo
) -> None:
    runner = await make_runner("edits", "takes_one_column", "heavy_modules")
    assert rewards_of(await score_two(runner, answer=["2", "3"])) == [[0, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        ("raises", "raised", "raised ValueError: no such unit: furlong (my_rewards.py:"),
        ("unreachable", "unavailable", "could not reach a service: RuntimeError: the judge is away"),
        ("exits", "raised", "raised SystemExit: 3 (my_rewards.py:"),
        ("leaves", "died", "ended its process with exit code 7"),
        ("leaves_a_fork", "died", "ended its process with exit code 7"),
        ("kills_itself", "killed", "died with signal SIGKILL"),
        ("too_short", "invalid", "returned 1 values for 2 completions"),
        ("nan_at_one", "invalid", "returned NaN at index 1"),
        ("infinite", "invalid", "returned float inf at index 0"),
        ("beyond_float32", "invalid", "returned float 1e+39 at index 1"),
        ("enormous_int", "invalid", "at index 0, which is not a finite float32"),
        ("text_values", "invalid", "returned str '1' at index 0"),
        ("no_list", "invalid", "returned float 1.0; it must return a list"),
        ("needs_missing", "invalid", "needs solution, which is neither a column"),
    ],
)
async def test_a_failure_names_the_function_and_the_runner_goes_on(
    make_runner: MakeRunner, score_two: ScoreTwo, function: str, kind: str, message: str
) -> None:
    runner = await make_runner("by_length", function)
    for _ in range(2):
        result = await score_two(runner)
        failure = failure_of(result)
        assert (failure.function, failure.kind) == (function, kind)
        assert message in failure.message
        assert failure.message.startswith(f"reward function {function!r} ")
        assert failure.message.endswith(ALIKE) == (function == "needs_missing")
        assert len(result.durations_s_F) == 2  # by_length ran before it: the process is there again


@pytest.mark.parametrize("function", ["hangs", "hangs_async"])
async def test_a_hanging_function_is_killed_and_replaced(
    make_runner: MakeRunner, score_two: ScoreTwo, functions_file: Path, function: str
) -> None:
    runner = await make_runner("pids", {"function": f"{functions_file}:{function}", "timeout_s": 0.2})
    pid = runner._processes[0].pid
    assert pid is not None
    failure = failure_of(await score_two(runner))
    assert failure == RewardFailure(
        function, "timeout", f"reward function {function!r} timed out after 0.2 s, its timeout_s"
    )
    assert await gone(pid)
    kinds = [failure_of(await score_two(runner)).kind]
    while kinds[-1] == "unavailable" and len(kinds) < 10:  # the new process got no processor in time
        kinds.append(failure_of(await score_two(runner)).kind)
    assert kinds[-1] == "timeout"


async def test_a_process_that_somebody_else_kills_says_nothing_about_the_group(
    score_two: ScoreTwo, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pid")
    source = (
        "import os, time\ndef f(completions, **_):\n    open(FIFO, 'w').write(str(os.getpid()))\n    time.sleep(600)\n"
    )
    (tmp_path / "slow.py").write_text(source.replace("FIFO", repr(str(tmp_path / "pid"))))
    async with RewardRunner([RewardFunctionSection(function=f"{tmp_path}/slow.py:f")]) as runner:
        scoring = asyncio.create_task(score_two(runner))
        pid = int(await asyncio.to_thread((tmp_path / "pid").read_text))
        os.kill(pid, signal.SIGKILL)
        assert failure_of(await scoring).kind == "killed"


async def test_a_process_that_gets_no_processor_says_nothing_about_the_group(
    make_runner: MakeRunner, score_two: ScoreTwo, functions_file: Path
) -> None:
    runner = await make_runner({"function": f"{functions_file}:hangs", "timeout_s": 0.5})
    pid = runner._processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    failure = failure_of(await score_two(runner))
    assert failure.kind == "unavailable"
    assert "of processor time in the second half" in failure.message
    kinds = []
    while len(kinds) < 10 and kinds[-1:] != ["timeout"]:  # a busy machine may starve it again
        kinds.append(failure_of(await score_two(runner)).kind)
    assert kinds[-1] == "timeout", "it sleeps by its own will"


async def test_a_function_that_computes_for_too_long_has_failed(
    make_runner: MakeRunner, score_two: ScoreTwo, tmp_path: Path
) -> None:
    (tmp_path / "busy.py").write_text("def f(completions, **_):\n    while True:\n        pass\n")
    runner = RewardRunner([RewardFunctionSection(function=f"{tmp_path}/busy.py:f", timeout_s=3.0)])
    async with runner:
        assert failure_of(await score_two(runner)).kind == "timeout"


async def test_memory_beyond_the_limit_fails_the_call_only(
    make_runner: MakeRunner, score_two: ScoreTwo, functions_file: Path
) -> None:
    def allocating(megabytes: int, name: str) -> dict[str, Any]:
        function = f"{functions_file}:allocates"
        return {"function": function, "name": name, "memory_mb": 200, "kwargs": {"megabytes": megabytes}}

    fits = await make_runner(allocating(100, "fits"))
    assert rewards_of(await score_two(fits)) == [[1], [1]]
    runner = await make_runner("pids", allocating(400, "too_much"))
    failure = failure_of(await score_two(runner))
    assert failure.kind == "raised"
    assert "'too_much' ran out of memory, memory_mb is 200: MemoryError (my_rewards.py:" in failure.message
    assert "by_length" not in failure.message
    assert len((await score_two(runner)).durations_s_F) == 2


async def test_a_leak_ends_in_a_fresh_process(
    make_runner: MakeRunner, score_two: ScoreTwo, functions_file: Path
) -> None:
    runner = await make_runner({"function": f"{functions_file}:leaks", "memory_mb": 250})
    assert rewards_of(await score_two(runner)) == [[1], [1]]
    assert rewards_of(await score_two(runner)) == [[2], [2]]
    assert "ran out of memory" in failure_of(await score_two(runner)).message
    assert rewards_of(await score_two(runner)) == [[1], [1]]


async def test_prints_go_to_stderr_and_not_into_the_protocol(
    make_runner: MakeRunner, score_two: ScoreTwo, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = await make_runner("prints", "by_length")
    assert rewards_of(await score_two(runner)) == [[1, 1], [1, 3]]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == ["from python", "from below", "from a child"]


async def test_several_processes_score_at_once(make_runner: MakeRunner, score_two: ScoreTwo) -> None:
    runner = await make_runner("pids", num_processes=2)
    async with asyncio.timeout(DEADLINE_S):
        results = await asyncio.gather(*(score_two(runner) for _ in range(6)))
    assert {rewards_of(result)[0][0] for result in results} == {
        np.float32(process.pid or 0) for process in runner._processes
    }


async def test_a_cancelled_call_ends_all_it_started_and_frees_its_place(
    make_runner: MakeRunner, score_two: ScoreTwo, functions_file: Path, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    os.mkfifo(pid_file)  # opening it for reading waits until the function is in its call
    runner = await make_runner(
        {"function": f"{functions_file}:sleeps_with_child", "kwargs": {"pid_file": str(pid_file)}}
    )
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        call = tasks.create_task(score_two(runner))
        sleeper = int(await asyncio.to_thread(pid_file.read_text))
        call.cancel()
    assert call.cancelled()
    assert await gone(sleeper)
    assert runner._free.qsize() == 1
    os.unlink(pid_file)


async def test_the_example_on_the_rewards_page(make_runner: MakeRunner, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/use/rewards.md").read_text()
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    path = tmp_path / "page.py"
    path.write_text(example)
    runner = await make_runner({"function": f"{path}:brevity", "kwargs": {"limit_tokens": 2}, "memory_mb": 10**12})
    result = await runner.score(["p", "p"], ["a", "b"], [[1, 2], [1, 2, 3]], {"answer": ["x", "y"]})
    assert rewards_of(result) == [[1], [0]]


async def test_bad_input_is_refused_before_anything_runs(make_runner: MakeRunner) -> None:
    runner = await make_runner({"function": "exact_match"})
    with pytest.raises(InvalidInput, match="answer has 1 values for 2 completions"):
        await runner.score(["", ""], ["a", "b"], [[1], [2]], {"answer": ["a"]})
    with pytest.raises(InvalidInput, match="without completions"):
        await runner.score([], [], [], {})
    with pytest.raises(InvalidInput, match=r"object .* has no JSON form"):
        await runner.score([""], ["a"], [[1]], {"answer": [object()]})
    result = await runner.score([""], ["a"], [np.array([1, 2])], {"answer": ["a"]})  # type: ignore[list-item]
    assert rewards_of(result) == [[1]]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"function": "lenght"}, "did you mean 'length'"),
        ({"function": "FILE:nothing_there"}, "has no function 'nothing_there'"),
        ({"function": "FILE_THAT_LEAVES:f"}, "ended its process with exit code 9 while it loaded them"),
    ],
)
async def test_a_function_that_cannot_be_loaded_stops_the_start(
    functions_file: Path, section: dict[str, str], message: str
) -> None:
    leaves = functions_file.with_name("leaves.py")
    leaves.write_text("import os\nos._exit(9)\n")
    function = section["function"].replace("FILE_THAT_LEAVES", str(leaves)).replace("FILE", str(functions_file))
    runner = RewardRunner([RewardFunctionSection(function=function)], num_processes=2)
    with pytest.raises(InvalidInput, match=message):
        await runner.start()
    with pytest.raises(Conflict, match="closed"):
        await runner.score([""], ["a"], [[1]], {})
    assert not any(process.usable for process in runner._processes)


async def test_a_file_that_goes_missing_fails_groups_and_heals(
    make_runner: MakeRunner, score_two: ScoreTwo, functions_file: Path
) -> None:
    runner = await make_runner("by_length")
    kept = functions_file.with_suffix(".kept")
    os.rename(functions_file, kept)
    for process in runner._processes:
        process.kill()
    failure = failure_of(await score_two(runner))
    assert failure.kind == "unavailable"
    assert "could not be started again" in failure.message
    assert f"there is no file '{functions_file}'" in failure.message
    os.rename(kept, functions_file)
    assert rewards_of(await score_two(runner)) == [[1], [3]]


async def test_close_ends_every_process_and_refuses_calls(make_runner: MakeRunner, score_two: ScoreTwo) -> None:
    runner = await make_runner("by_length", num_processes=2)
    pids = [process.pid for process in runner._processes]
    await runner.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)
    with pytest.raises(Conflict, match="closed"):
        await score_two(runner)
    with pytest.raises(Conflict, match="create a new one"):
        await runner.start()


async def test_processes_die_with_the_runner(functions_file: Path, tmp_path: Path) -> None:
    """The runner's own process is killed while its child is busy: nothing is left, although nobody cleaned up."""
    script = (
        "import asyncio, sys\n"
        "from paceline.spec import RewardFunctionSection\n"
        "from paceline.reward.runner import RewardRunner\n"
        "section = RewardFunctionSection(function=sys.argv[1], kwargs={'pid_file': sys.argv[2]})\n"
        "async def main():\n"
        "    async with RewardRunner([section]) as runner:\n"
        "        await runner.score(['p'], ['c'], [[1]], {})\n"
        "asyncio.run(main())\n"
    )
    pid_file = tmp_path / "pid"
    os.mkfifo(pid_file)
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, f"{functions_file}:hangs_and_says_so", str(pid_file))
    )
    async with asyncio.timeout(DEADLINE_S):
        child = int(await asyncio.to_thread(pid_file.read_text))
        parent.send_signal(signal.SIGKILL)
        await parent.wait()
    assert await gone(child)
