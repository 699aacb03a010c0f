"""The end of a process: its status, its output, and nothing that waits for a library's threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

HANGING = "import threading, time; threading.Thread(target=time.sleep, args=(3600,)).start()\n"
"""A thread that Python waits for at its end."""
HANDLER = "import atexit; atexit.register(print, 'handled')\n"


@pytest.mark.parametrize(
    ("command", "status", "printed"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('refused')", 1, "refused\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_a_command_ends_with_its_status_whatever_threads_are_left(command: str, status: int, printed: str) -> None:
    code = (
        f"{HANGING}{HANDLER}import sys\nfrom paceline.host.process import end_with\n"
        f"def command():\n    print('done')\n    {command}\nend_with(command)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == status
    assert ended.stdout == "done\nhandled\n"
    assert ended.stderr.endswith(printed)


@pytest.mark.parametrize("closing", ["sys.stderr.close()", "os.close(2)", "sys.stderr = None"])
@pytest.mark.parametrize(("command", "status"), [("sys.exit(3)", 3), ("sys.exit('refused')", 1), ("1 / 0", 1)])
def test_a_closed_standard_error_changes_neither_status_nor_handlers(closing: str, command: str, status: int) -> None:
    code = (
        f"{HANGING}{HANDLER}import os, sys\nfrom paceline.host.process import end_with\n"
        f"def command():\n    {closing}\n    {command}\nend_with(command)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (status, "")
    assert ended.stdout.endswith("handled\n")


def test_the_console_script_ends_beside_a_thread_that_does_not() -> None:
    code = (
        f"{HANGING}import sys\nfrom paceline.services.cli.main import console\nsys.argv[1:] = ['--version']\nconsole()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("paceline, version ")
