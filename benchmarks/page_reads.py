"""What an open page costs the coordinator: the page's calls beside the load of benchmarks/exchange.py.

    python benchmarks/page_reads.py [--seconds 4] [--rounds 8] [--workers 64] [--keep FOLDER] [--json]

*Throughput*: one coordinator under the load of groups of 100 kB that live their whole life, `paceline serve dashboard` beside it.
Windows with and without the page's calls take turns (the order changes each round) in one run. The calls are those of the views
runs, run, flow and members, as often as the page makes them, all four at the same time; they are made by a process of its own,
because a browser would usually be another machine's. `exchange_ratio_with_page` is the median over rounds of groups per second
with the calls divided by those without.

*Memory*: a coordinator opens a ledger of 10,000 steps and 1,000,000 groups (that of benchmarks/page.py; `--keep` keeps it), and
the calls of these views are made for `--seconds` × 5. `coordinator_memory_mb` is its largest resident memory meanwhile minus that
before. The bars: a ratio of at least 0.95, and at most 50 MB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import zmq
from short_form import parse

from paceline.services.common.access.page_keys import Access, Role

VIEWS = {
    "runs": (3.0, [("RunService/List", {})]),
    "run": (
        3.0,
        [
            ("RunService/Get", {"runId": "RUN"}),
            ("RecordsService/GetMetrics", {"runId": "RUN", "names": ["*"], "maxPoints": 500}),
            ("RecordsService/GetMetrics", {"runId": "RUN", "names": ["reward"], "kind": "evaluation"}),
            ("RecordsService/ListEvents", {"runId": "RUN", "kinds": ["session", "checkpoint", "member", "warning"],
                                           "newest": True, "pageSize": 200}),
        ],
    ),
    "flow": (
        2.0,
        [
            ("RunService/Get", {"runId": "RUN"}),
            ("RecordsService/ListGauges", {}),
            ("RecordsService/GetBooks", {"runId": "RUN"}),
            ("RecordsService/GetMetrics", {"runId": "RUN", "names": ["*"], "maxPoints": 300}),
        ],
    ),
    "members": (2.0, [("RecordsService/ListGauges", {}), ("RecordsService/ListEvents", {"runId": "RUN", "newest": True})]),
}  # fmt: skip
"""Seconds between two refreshes of a view, and its calls."""
READY_S, SETTLE_S = 60.0, 5.0
SECONDS, ROUNDS, WORKERS = 4.0, 8, 64
"""Of more workers on two cores some are starved now and then, and leave."""


def read(link: str, key: str, run_id: str) -> None:
    """Make the calls of all views from a line `on` of stdin to a line `off`; at the end of stdin print how many."""
    is_on, ended, counts = threading.Event(), threading.Event(), [0, 0]

    def view(every_s: float, calls: list[tuple[str, dict[str, Any]]]) -> None:
        while not ended.is_set():
            if not is_on.wait(0.2):
                continue
            for path, body in calls:
                counts[0] += 1
                filled = {name: run_id if value == "RUN" else value for name, value in body.items()}
                request = urllib.request.Request(
                    f"{link}/paceline.v1.{path}",
                    json.dumps(filled).encode(),
                    {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
                )
                try:
                    with urllib.request.urlopen(request, timeout=30) as answer:
                        answer.read()
                except OSError as error:
                    counts[1] += 1
                    print(f"{path}: {error}", file=sys.stderr)
            ended.wait(every_s)

    threads = [threading.Thread(target=view, args=each) for each in VIEWS.values()]
    for thread in threads:
        thread.start()
    for line in sys.stdin:
        if line.strip() == "on":
            is_on.set()
        else:
            is_on.clear()
    is_on.set()
    ended.set()
    for thread in threads:
        thread.join()
    print(json.dumps({"calls": counts[0], "failed": counts[1]}))


class Reader:
    """The process that makes the page's calls."""

    def __init__(self, link: str, token: Path, run_id: str):
        key = Access(token).key(Role.READER)
        command = [sys.executable, __file__, "--read", link, key, run_id]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @contextmanager
    def on(self, wanted: bool) -> Iterator[None]:
        """Make the calls meanwhile, if `wanted`."""
        self._say("on" if wanted else "off")
        try:
            yield
        finally:
            self._say("off")

    def end(self) -> dict[str, int]:
        """Return how many calls it made, and how many failed."""
        output, _ = self._process.communicate(timeout=READY_S)
        counts: dict[str, int] = json.loads(output.splitlines()[-1])
        return counts

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()


def measure_throughput(folder: Path, workers: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Return groups per second with and without the page, by round."""
    from exchange import GROUPS_PER_STEP, MAX_AGE, WARM_UP_S, make_spec, run_for
    from exchange_load import REWARD_WORKERS, Load, Members

    from paceline.client import Client
    from paceline.services.local.cluster import LocalCluster
    from paceline.spec import ClusterSection
    from paceline.v1 import common_pb2

    folder.mkdir(parents=True, exist_ok=True)
    cluster = LocalCluster(folder / "runs", ClusterSection())
    rates: dict[bool, list[float]] = {True: [], False: []}
    try:
        address = cluster.start_coordinator()
        with Client(address) as client:
            run_id = client.submit(make_spec(folder, MAX_AGE)).run_id
        roles = {f"rollout-{index}": common_pb2.ROLE_ROLLOUT for index in range(workers)}
        roles |= {f"reward-{index}": common_pb2.ROLE_REWARD for index in range(REWARD_WORKERS)}
        members = Members(address, roles | {"learner-0": common_pb2.ROLE_LEARNER})
        members.ready.wait()
        context = zmq.Context()
        load = Load(members, workers, 100_000, context, whole_life=True)
        link = page_of(cluster.start_dashboard(0))
        reader = Reader(link, cluster.token_file, run_id)
        run_for(load, WARM_UP_S)
        for number in range(rounds):
            for with_page in ((False, True), (True, False))[number % 2]:
                with reader.on(with_page):
                    run_for(load, 0.5)  # the first calls are on their way
                    before, started_s = load.committed, time.perf_counter()
                    run_for(load, seconds)
                    rates[with_page].append((load.committed - before) / (time.perf_counter() - started_s))
        counts, steps = reader.end(), load.step
        load.close()
        context.term()
        members.stop()
    finally:
        cluster.stop()
    if not all(rates[True] + rates[False]):
        raise SystemExit(
            "no group was committed in one of the windows: the load was starved; run it on a quiet machine"
        )
    ratios = [with_page / without for with_page, without in zip(rates[True], rates[False], strict=True)]
    return {
        "exchange_ratio_with_page": statistics.median(ratios),
        "ratios": ratios,
        "groups_per_s_with_page": statistics.fmean(rates[True]),
        "groups_per_s_without": statistics.fmean(rates[False]),
        "trained_groups": steps * GROUPS_PER_STEP,
    } | counts


def measure_memory(folder: Path, seconds: float, steps: int = 10_000, groups: int = 1_000_000) -> dict[str, Any]:
    """Return what the page's calls add to the memory of a coordinator with a long run."""
    from page import RUN, make_ledger

    from paceline.services.local.cluster import LocalCluster
    from paceline.spec import ClusterSection

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "ledger.sqlite").exists():
        make_ledger(folder, steps, groups)
    cluster = LocalCluster(folder, ClusterSection())
    try:
        cluster.start_coordinator()
        reader = Reader(page_of(cluster.start_dashboard(0)), cluster.token_file, RUN)
        coordinator = psutil.Process(cluster.pids("coordinator")[0])
        time.sleep(SETTLE_S)
        before = most = coordinator.memory_info().rss
        with reader.on(True):
            end_s = time.perf_counter() + seconds
            while time.perf_counter() < end_s:
                most = max(most, coordinator.memory_info().rss)
                time.sleep(0.1)
        counts = reader.end()
    finally:
        cluster.stop()
    return {"coordinator_memory_mb": (most - before) / 1e6, "coordinator_mb_before": before / 1e6} | counts


def page_of(ready_file: Path) -> str:
    """Return the address of the page once it listens."""
    deadline_s = time.monotonic() + READY_S
    while not ready_file.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the page does not listen after {READY_S:g} s")
        time.sleep(0.1)
    return f"http://{ready_file.read_text().strip()}"


def main() -> None:
    """Measure both, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--keep", type=Path, help="folder for the long ledger; one that is there is used again")
    parser.add_argument("--steps", type=int, default=10_000, help="of the long ledger")
    parser.add_argument("--groups", type=int, default=1_000_000, help="of the long ledger")
    parser.add_argument("--only", choices=["throughput", "memory"])
    parser.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parse(parser, seconds=1.0, rounds=1, workers=4, steps=20, groups=200)
    if options.read:
        read(*options.read)
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.only != "memory":
            found |= measure_throughput(folder, options.workers, options.seconds, options.rounds)
            print(
                f"{found['groups_per_s_without']:.0f} groups/s without the page, {found['groups_per_s_with_page']:.0f} with "
                f"it: {found['exchange_ratio_with_page']:.3f} ({found['calls']} calls, {found['failed']} failed)"
            )
        if options.only != "throughput":
            memory = measure_memory(options.keep or folder / "long", 5 * options.seconds, options.steps, options.groups)
            print(
                f"the coordinator has {memory['coordinator_mb_before']:.0f} MB, with the page's calls "
                f"{memory['coordinator_memory_mb']:+.1f} MB ({memory['calls']} calls, {memory['failed']} failed)"
            )
            found |= {name: value for name, value in memory.items() if name.startswith("coordinator")}
            found["failed"] = found.get("failed", 0) + memory["failed"]
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
