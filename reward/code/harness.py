"""Runs the tests of one program inside its sandbox: `python harness.py`, with the request as JSON on standard input.
`python harness.py FILE` runs a program with its standard input and the imports that LiveCodeBench expects.

Request: `word` (begins each line of the harness), `kind`, `tests` (texts, arguments, or files by name), `first` (index
of the first test to run), `entry_point`, `setup`, `time_s` (limit of one test), `stop` (end at the first test that
fails), `programs` (the first one that loads is tested). The first program is stored beside the harness as
`solution.py`. After loading, the harness writes `WORD loaded COUNT` to standard output, COUNT being the number of
tests, then for each test `WORD INDEX STATE SECONDS TEXT`. STATE is `passed`, `wrong`, `error`, `time`, or for calls
`returned` with the value as JSON. If the tests cannot run, it writes `WORD cannot TEXT`. The program's own output goes
to standard error.

A signal ends a test that hangs; if that does not help, a C thread ends the process, and the caller continues with the
next test. The program shares this process: it cannot know the word in advance, but can find it in memory.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import functools
import importlib
import json
import os
import runpy
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import Any

MODULE = "solution"
HARD_S = 0.3
"""Seconds after a test's time limit at which the process ends."""
MAX_TEXT = 300
PRESUMED = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
"""Modules whose names are predefined for programs that are tested by calls and for programs of LiveCodeBench, as in
LiveCodeBench's `testing_util.py`."""
MAX_RECURSION = 50_000
"""Recursion limit for programs with predefined names."""


class TimeUp(BaseException):
    """The test has exceeded its time limit. Not an `Exception`, so that handlers of the program do not catch it."""


class Report:
    def __init__(self, word: str) -> None:
        self._word, self._write = word, os.write
        self._out = os.dup(1)
        self.errors = os.dup(2)
        """Descriptor of standard error, also if pytest captures it."""
        os.dup2(2, 1)

    def line(self, *parts: object) -> None:
        self.value(" ".join(map(str, parts))[: 2 * MAX_TEXT].replace("\n", "\\n"))

    def value(self, text: str) -> None:
        """Write `text` as one line of any length."""
        data = f"{self._word} {text}\n".encode(errors="replace")
        while data:
            data = data[self._write(self._out, data) :]


def main() -> None:
    if len(sys.argv) > 1:
        _run_program(sys.argv[1])
        return
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
    os._exit(0)  # without the program's exit handlers and threads


def _time_is_up(number: int, frame: object) -> None:
    raise TimeUp


def _run_checks(request: dict[str, Any], report: Report) -> None:
    tests, first = request["tests"], request["first"]
    clock = Clock(request["time_s"], report.errors)
    state, seconds, text = _load(request, clock)
    report.line("loaded", len(tests))
    if state != "passed":
        state = "time" if state == "time" else "error"  # an assertion of the program itself is not a test's
        for index in range(first, len(tests)):
            report.line(index, state, seconds, text)
        return
    module = sys.modules[MODULE]
    for index in range(first, len(tests)):
        if request["kind"] == "calls":
            returned: list[str] = []
            call = _call(tests[index], request["entry_point"], module, returned)
            state, seconds, text = clock.timed(call)
            if state == "passed" and returned:
                report.value(f"{index} returned {seconds} {returned[0]}")
                continue
        else:
            state, seconds, text = clock.timed(_check(request, tests[index], module))
        report.line(index, state, seconds, text)
        if state != "passed" and request["stop"]:
            return


def _load(request: dict[str, Any], clock: Clock) -> tuple[str, str, str]:
    """Execute the programs until one loads as the module; return its outcome, or the first failure if none loads."""
    outcomes = []
    for source in request["programs"]:
        module = types.ModuleType(MODULE)
        sys.modules[MODULE] = module
        # An entry point with brackets is a method: LeetCode's starter.
        if request["kind"] == "calls" or "(" in request.get("entry_point", ""):
            # In the namespace of built-ins, so that no presumed name counts as the program's own.
            module.__dict__["__builtins__"] = _presume()
        outcomes.append(clock.timed(functools.partial(_execute, source, module)))
        if outcomes[-1][0] in ("passed", "time"):
            return outcomes[-1]
    return outcomes[0]


def _execute(source: str, module: types.ModuleType) -> None:
    # Without `dont_inherit` the program would inherit this file's `from __future__ import annotations`.
    exec(compile(source, f"{MODULE}.py", "exec", dont_inherit=True), module.__dict__)


def _presume() -> dict[str, Any]:
    """Return Python's built-in names and the predefined modules by name, and raise the limits of recursion and digits."""
    sys.setrecursionlimit(MAX_RECURSION)
    sys.set_int_max_str_digits(0)
    libraries = {name: importlib.import_module(name) for name in PRESUMED}
    names: dict[str, Any] = {}
    for library in libraries.values():
        public = getattr(library, "__all__", None) or [name for name in vars(library) if name[:1] != "_"]
        names.update({name: getattr(library, name) for name in public})
    return names | libraries | vars(builtins)


def _run_program(path: str) -> None:
    vars(builtins).update(_presume())
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")


def _check(request: dict[str, Any], test: str, module: types.ModuleType) -> Callable[[], object]:
    """Return a function that runs one test. Each test has its own names."""

    def check() -> None:
        names: dict[str, Any] = dict(module.__dict__)
        exec(compile(request["setup"], "setup", "exec", dont_inherit=True), names)
        exec(compile(test, "test", "exec", dont_inherit=True), names)
        if request["kind"] == "humaneval":
            names["check"](_function(request["entry_point"], names))

    return check


def _call(arguments: list[Any], function: str, module: types.ModuleType, returned: list[str]) -> Callable[[], object]:
    def call() -> None:
        value = _function(function, module.__dict__)(*map(_with_int_keys, arguments))
        try:
            returned.append(json.dumps(value, default=lambda each: each.item()))  # scalars of NumPy
        except (TypeError, ValueError, AttributeError):
            raise AssertionError(f"returned {type(value).__name__}, which JSON does not have") from None

    return call


def _function(name: str, names: dict[str, Any]) -> Any:
    """Return the function that the program defines, a method of `Solution`, or the one at a path like
    `Solution().add`."""
    owner = names.get("Solution")
    if "." not in name and owner is not None and hasattr(owner, name):
        return getattr(owner(), name)
    if name.split(".")[0].removesuffix("()") not in names:
        raise NameError(f"the program does not define {name}")
    return eval(name, names)


def _with_int_keys(value: Any) -> Any:
    if isinstance(value, dict) and value and all(key.lstrip("-").isdecimal() for key in value):
        return {int(key): each for key, each in value.items()}
    return value


class Clock:
    def __init__(self, time_s: float, errors: int) -> None:
        self.time_s, self._errors = time_s, errors

    def start(self) -> None:
        faulthandler.dump_traceback_later(self.time_s + HARD_S, exit=True, file=self._errors)
        # Repeatedly, because a bare `except` may catch one TimeUp.
        signal.setitimer(signal.ITIMER_REAL, self.time_s, 0.05)

    def stop(self) -> None:
        """Disarm the limit; its signal may still arrive once."""
        while True:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
                faulthandler.cancel_dump_traceback_later()
                return
            except TimeUp:
                continue

    def timed(self, run: Callable[[], object]) -> tuple[str, str, str]:
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
    except BaseException:  # an error in `__str__`
        return "an error without a text"


def _run_pytest(request: dict[str, Any], report: Report) -> None:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # pytest options of the worker's environment
    try:
        import pytest
    except ImportError as error:
        report.line("cannot", f"pytest is not installed beside the program: {error}")
        return
    clock, index = Clock(request["time_s"], report.errors), request["first"]
    failures: list[tuple[str, str]] = []

    class Plugin:
        """Plugin for pytest that applies the time limit to each test, and reports the test's result."""

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
                raise RuntimeError("the test exceeded its time limit") from None
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
