"""Runs the tests of one program inside its sandbox: `python harness.py`, the request as JSON on standard input.

Request: `word` (begins each line of ours), `kind`, `tests` (texts, or files by name), `first` (index of the first test to
run), `entry_point`, `time_s` (limit of one test), `stop` (end at the first test that fails). The program lies beside as
`solution.py`. When it is loaded, `WORD loaded COUNT` goes to standard output, COUNT the number of tests, and then for each of
them `WORD INDEX STATE SECONDS TEXT`, STATE one of `passed`, `wrong`, `error`, `time`; or `WORD cannot TEXT`. What the program
prints goes to standard error.

A test that hangs is ended by a signal, and where that does not help by a thread of C, which ends the process; the caller then
goes on with the next one. The program shares this process: it cannot know the word before it is run, but what searches the
interpreter's memory for it finds it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import Any

MODULE = "solution"
HARD_S = 0.3
"""Seconds behind a test's limit after which the process ends."""
MAX_TEXT = 300


class TimeUp(BaseException):
    """The test has passed its limit. No `Exception`, so that a program's own handlers let it through."""


class Report:
    """The lines of ours."""

    def __init__(self, word: str) -> None:
        self._word, self._write = word, os.write
        self._out = os.dup(1)
        self.errors = os.dup(2)
        """Standard error, also where pytest captures it."""
        os.dup2(2, 1)

    def line(self, *parts: object) -> None:
        """Write one line."""
        text = " ".join(map(str, parts))[: 2 * MAX_TEXT].replace("\n", "\\n")
        self._write(self._out, f"{self._word} {text}\n".encode(errors="replace"))


def main() -> None:
    """Read the request, run the tests, and end."""
    request = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    report = Report(request.pop("word"))
    sys.path.insert(0, os.getcwd())
    sys.argv = [f"{MODULE}.py"]
    signal.signal(signal.SIGALRM, _time_is_up)
    if request["kind"] == "pytest":
        _run_pytest(request, report)
    else:
        _run_checks(request, report)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    os._exit(0)  # no handler of the program's, and no thread of it


def _time_is_up(number: int, frame: object) -> None:
    raise TimeUp


def _run_checks(request: dict[str, Any], report: Report) -> None:
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    with open(f"{MODULE}.py", encoding="utf-8", errors="replace") as file:
        source = file.read()
    tests, first = request["tests"], request["first"]
    clock = Clock(request["time_s"], report.errors)
    state, seconds, text = clock.timed(lambda: exec(compile(source, f"{MODULE}.py", "exec"), module.__dict__))
    report.line("loaded", len(tests))
    if state != "passed":
        state = "time" if state == "time" else "error"  # what the program asserts of itself is not a test's
        for index in range(first, len(tests)):
            report.line(index, state, seconds, text)
        return
    for index in range(first, len(tests)):
        state, seconds, text = clock.timed(
            _check(request["kind"], tests[index], request["entry_point"], module)
        )
        report.line(index, state, seconds, text)
        if state != "passed" and request["stop"]:
            return


def _check(kind: str, test: str, entry_point: str, module: types.ModuleType) -> Callable[[], object]:
    """Return what runs one test. The test's names are its own, so that none sees those of another one."""
    if kind == "asserts":
        return lambda: exec(compile(test, "test", "exec"), dict(module.__dict__))

    def check() -> None:
        names: dict[str, Any] = dict(module.__dict__)
        exec(compile(test, "test", "exec"), names)
        names["check"](names[entry_point])

    return check


class Clock:
    """The limit of one test."""

    def __init__(self, time_s: float, errors: int) -> None:
        self.time_s, self._errors = time_s, errors

    def start(self) -> None:
        """Begin: a signal at the limit, and a thread behind it."""
        faulthandler.dump_traceback_later(self.time_s + HARD_S, exit=True, file=self._errors)
        signal.setitimer(
            signal.ITIMER_REAL, self.time_s, 0.05
        )  # again and again: a bare `except` may catch one

    def stop(self) -> None:
        """End; the signal may come in here once."""
        while True:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
                faulthandler.cancel_dump_traceback_later()
                return
            except TimeUp:
                continue

    def timed(self, run: Callable[[], object]) -> tuple[str, str, str]:
        """Return the state, the seconds and the error's text of a call."""
        started_s = time.perf_counter()
        try:
            try:
                self.start()
                run()
                state, text = "passed", ""
            except AssertionError as error:
                state, text = "wrong", _text(error)
            except TimeUp:
                raise
            except BaseException as error:  # SystemExit is a failure too
                state, text = "error", _text(error)
            finally:
                self.stop()
        except TimeUp:
            self.stop()
            state, text = "time", f"more than {self.time_s:g} s"
        return state, f"{time.perf_counter() - started_s:.3f}", text


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:MAX_TEXT]
    except BaseException:  # its own `__str__`
        return "an error without a text"


def _run_pytest(request: dict[str, Any], report: Report) -> None:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # those of the worker's environment
    try:
        import pytest
    except ImportError as error:
        report.line("cannot", f"pytest is not installed beside the program: {error}")
        return
    clock, index = Clock(request["time_s"], report.errors), request["first"]
    failures: list[tuple[str, str]] = []

    class Plugin:
        """Gives each test its limit and reports it."""

        def pytest_collection_finish(self, session: Any) -> None:
            report.line("loaded", len(session.items))
            del session.items[: request["first"]]

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Any:
            nonlocal index
            failures.clear()
            started_s = time.perf_counter()
            result = yield
            state, text = failures[0] if failures else ("passed", "")
            report.line(index, state, f"{time.perf_counter() - started_s:.3f}", text)
            index += 1
            return result

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_call(self, item: Any) -> Any:
            try:
                clock.start()
                return (yield)
            except TimeUp:
                failures.append(("time", f"more than {clock.time_s:g} s"))
                raise RuntimeError("the test has passed its time limit") from None
            except AssertionError as error:
                failures.append(("wrong", _text(error)))
                raise
            finally:
                clock.stop()

        def pytest_runtest_logreport(self, report: Any) -> None:
            if not report.passed:  # a skipped test has not passed either
                failures.append(("error", str(report.longrepr)[-MAX_TEXT:]))

    options = ["-x"] if request["stop"] else []
    with open("pytest.ini", "a", encoding="utf-8") as file:
        file.write("[pytest]\n")
    common = ["-q", "-p", "no:cacheprovider", "-c", "pytest.ini", "--confcutdir=.", *request["tests"]]
    pytest.main([*options, *common], plugins=[Plugin()])


if __name__ == "__main__":
    main()
