"""The line of a log with the reason of its service's death, in the forms of services, Python and vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.services.common.processes.supervisor import (
    LOG_TAIL_BYTES,
    MAX_REASON_CHARS,
    last_lines,
    reason_in,
)

TRACKER = """\
/usr/lib/python3.11/multiprocessing/resource_tracker.py:224: UserWarning: resource_tracker: There appear to be 2 leaked objects
  warnings.warn('resource_tracker: There appear to be %d '
/usr/lib/python3.11/multiprocessing/resource_tracker.py:237: UserWarning: resource_tracker: '/psm_1': [Errno 2] No such file
  warnings.warn('resource_tracker: %r: %s' % (name, e))
"""
ENGINE_STARTS = """\
(EngineCore pid=7) INFO 11-25 22:03:20 [core.py:133] Initializing a V1 LLM engine
(Worker pid=8) ERROR 11-25 22:03:21 [multiproc_executor.py:870] WorkerProc failed to start.
(Worker pid=8) ERROR 11-25 22:03:21 [multiproc_executor.py:870] Traceback (most recent call last):
(Worker pid=8) ERROR 11-25 22:03:21 [multiproc_executor.py:870]   File "worker.py", line 76, in __init__
(Worker pid=8) ERROR 11-25 22:03:21 [multiproc_executor.py:870]     raise ValueError("no memory")
(Worker pid=8) ERROR 11-25 22:03:21 [multiproc_executor.py:870] ValueError: Available memory (0.1 GiB) is less than desired
(EngineCore pid=7) ERROR 11-25 22:03:22 [core.py:1400] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-25 22:03:22 [core.py:1400] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-25 22:03:22 [core.py:1400]   File "core.py", line 1371, in run_engine_core
(EngineCore pid=7) ERROR 11-25 22:03:22 [core.py:1400] Exception: WorkerProc initialization failed due to an exception in a \
background process. See stack trace for root cause.
2026-11-25 22:03:23,396 ERROR paceline.rollout.vllm.engine_thread: the engine died
Traceback (most recent call last):
  File "engine_thread.py", line 84, in _run
    raise RuntimeError
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
2026-11-25 22:03:23,463 ERROR paceline.services.rollout.worker: leaving the pool: the engine died: RuntimeError('Engine core \
initialization failed. See root cause above. Failed core proc(s): {}')
Error: the engine died: RuntimeError('Engine core initialization failed. See root cause above. Failed core proc(s): {}')
"""
ENGINE_DIES = """\
(EngineCore pid=7) ERROR 11-25 22:03:44 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: -9)
(EngineCore pid=7) ERROR 11-25 22:03:44 [dump_input.py:79] Dumping scheduler output for model execution: SchedulerOutput()
(EngineCore pid=7) ERROR 11-25 22:03:44 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=7) ERROR 11-25 22:03:44 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-25 22:03:44 [core.py:1512]   File "core.py", line 1496, in run_engine_core
(EngineCore pid=7) ERROR 11-25 22:03:44 [core.py:1512] RuntimeError: cancelled
(MainProcess pid=5) ERROR 11-25 22:03:44 [async_llm.py:906] AsyncLLM output_handler failed.
(MainProcess pid=5) ERROR 11-25 22:03:44 [async_llm.py:906] Traceback (most recent call last):
(MainProcess pid=5) ERROR 11-25 22:03:44 [async_llm.py:906]   File "async_llm.py", line 849, in output_handler
(MainProcess pid=5) ERROR 11-25 22:03:44 [async_llm.py:906]     raise self._format_exception(outputs) from None
(MainProcess pid=5) ERROR 11-25 22:03:44 [async_llm.py:906] EngineDeadError: See stack trace (above) for the root cause.
Error: the engine died: EngineDeadError('EngineCore encountered an issue. See stack trace (above) for the root cause.')
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "child-0.log"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ""),
        ("loading\nno model at /nowhere\n", "no model at /nowhere"),
        ("loading\n" + TRACKER, "loading"),
        ("Error: no model\n" + TRACKER, "Error: no model"),
        (
            "2026-11-25 22:03:44,463 CRITICAL paceline.services.rollout.run: the engine hangs\nbye\n",
            "2026-11-25 22:03:44,463 CRITICAL paceline.services.rollout.run: the engine hangs",
        ),
        ("ERRORS are not levels, neither is an ERROR inside\nlast\n", "last"),
        (
            ENGINE_STARTS + TRACKER,
            "(Worker pid=8) ERROR 11-25 22:03:21 [multiproc_executor.py:870] ValueError: Available memory (0.1 GiB) is less than "
            "desired",
        ),
        (
            ENGINE_DIES + TRACKER,
            "(EngineCore pid=7) ERROR 11-25 22:03:44 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly "
            "(exit code: -9)",
        ),
        ("Error: See root cause above\nbye\n", "Error: See root cause above"),
        (f"Error: {'x' * 1000}\n", "Error: " + "x" * (MAX_REASON_CHARS - 10) + "..."),
    ],
)
def test_the_reason_is_the_last_error_that_follows_from_no_other(log: Path, text: str, reason: str) -> None:
    log.write_text(text)
    assert reason_in(last_lines(log)) == reason


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        (
            "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('a') from None",
            "KeyError: 'a'",
        ),
        (
            "import asyncio\n"
            "async def fail():\n    raise OSError('no room')\n"
            "async def main():\n"
            "    async with asyncio.TaskGroup() as tasks:\n        tasks.create_task(fail())\n"
            "asyncio.run(main())",
            "OSError: no room",
        ),
        (
            "import logging\nlogging.basicConfig(format='%(asctime)s %(levelname)s %(name)s: %(message)s')\n"
            "try:\n    1 / 0\nexcept ZeroDivisionError:\n    logging.exception('it failed')",
            "ZeroDivisionError: division by zero",
        ),
        ("import warnings\nprint('the end', flush=True)\nwarnings.warn('old')", "the end"),
    ],
)
def test_the_reason_in_what_python_writes(log: Path, code: str, reason: str) -> None:
    script = log.with_suffix(".py")
    script.write_text(code)
    with log.open("wb") as file:
        subprocess.run([sys.executable, str(script)], stdout=file, stderr=file, check=False)
    assert reason_in(last_lines(log)) == reason


def test_only_the_end_of_a_life_is_read(log: Path) -> None:
    log.write_text("Error: of the life before\n" + "x" * LOG_TAIL_BYTES + "\nlast\n\n")
    assert last_lines(log) == ["x" * (LOG_TAIL_BYTES - 7), "last"]
    assert last_lines(log, start=log.stat().st_size - 7) == ["last"]
    assert last_lines(log, count=1) == ["last"]
    assert last_lines(log.with_suffix(".none")) == []
