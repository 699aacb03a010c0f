"""Runs of a small program in a sandbox: how many in a second, and how long each takes.

    python benchmarks/sandbox.py [--backend auto|bwrap|landlock|none] [--runs 400] [--parallel 2] [--json]

The program is one line of Python; a run makes its folder, starts it, reads its output and removes the folder. The first runs
warm up. `processor_ms` are a run's seconds of a processor, ours and the program's, which other work on the machine hardly
changes. Besides, the bounds that a hostile program meets: bytes of output that are kept of a print loop, bytes on disk of a
program that writes what it can, and seconds of an endless loop with a limit of one second.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.short_form import parse  # noqa: E402
from paceline.reward.sandbox import Limits, Sandbox, make_sandbox  # noqa: E402
from paceline.reward.sandbox.choosing import NAMES  # noqa: E402
from paceline.reward.sandbox.workspace import Workspace  # noqa: E402

WARM_UP = 8
PROGRAM = {"main.py": b"print(int(input()) + 1)"}
COMMAND = ["python", "main.py"]


def measure(sandbox: Sandbox, runs: int, parallel: int) -> dict[str, Any]:
    """Return the throughput and the times of single runs."""

    def run(number: int) -> float:
        started_s = time.perf_counter()
        outcome = sandbox.run(COMMAND, PROGRAM, Limits(), f"{number}\n".encode())
        assert outcome.stdout == f"{number + 1}\n".encode(), outcome
        return time.perf_counter() - started_s

    with ThreadPoolExecutor(parallel) as threads:
        list(threads.map(run, range(WARM_UP)))
        started_s, used_s = time.perf_counter(), _processor_seconds()
        took_s = sorted(threads.map(run, range(runs)))
        whole_s, used_s = time.perf_counter() - started_s, _processor_seconds() - used_s
    return {
        "runs_per_s": round(runs / whole_s, 1),
        "p50_ms": round(1000 * took_s[runs // 2], 1),
        "p99_ms": round(1000 * took_s[min(runs - 1, int(0.99 * runs))], 1),
        "processor_ms": round(1000 * used_s / runs, 1),
        "load_average": os.getloadavg()[0],
    }


def _processor_seconds() -> float:
    """Return the processor seconds of this process and its ended children."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def bounds(sandbox: Sandbox) -> dict[str, Any]:
    """Return what hostile programs could use."""
    loop = sandbox.run(COMMAND, {"main.py": b"while True: pass"}, Limits(time_s=1.0))
    printing = sandbox.run(COMMAND, {"main.py": b"while True: print('x' * 1000)"}, Limits())
    used = _most_on_disk(sandbox)
    return {
        "loop_s_of_1": round(loop.duration_s, 3),
        "kept_output_bytes": len(printing.stdout),
        **({"most_disk_mb": used} if used is not None else {}),
    }


def _most_on_disk(sandbox: Sandbox) -> float | None:
    """Return the most MB that were in the folder of a program that fills it; None where it is not on this file system."""
    folders: list[Workspace] = []
    original, most_bytes = Workspace.__init__, 0

    def noted(self: Workspace, files: Any) -> None:
        original(self, files)
        folders.append(self)

    fill = b"n = 0\nwhile True:\n  open(f'f{n}', 'wb').write(b'x' * (1 << 20)); n += 1\n"
    Workspace.__init__ = noted  # type: ignore[method-assign]
    try:
        thread = threading.Thread(target=lambda: sandbox.run(COMMAND, {"main.py": fill}, Limits(time_s=5)))
        thread.start()
        while thread.is_alive():
            for folder in folders:
                most_bytes = max(most_bytes, folder.used_bytes(1 << 40, []))
            time.sleep(0.002)
        thread.join()
    finally:
        Workspace.__init__ = original  # type: ignore[method-assign]
    return round(most_bytes / 2**20, 1) if folders else None


def main() -> None:
    """Print the figures of one backend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto", choices=[name for name in NAMES if name != "remote"])
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--parallel", type=int, default=2, help="programs at a time")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parse(parser, runs=10)
    sandbox = make_sandbox(options.backend)
    result = {"backend": sandbox.name, **measure(sandbox, options.runs, options.parallel), **bounds(sandbox)}
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:>18} {value}")


if __name__ == "__main__":
    main()
