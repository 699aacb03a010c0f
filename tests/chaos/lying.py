"""The campaign's side of a rollout worker that lies (liar.py): starts it, orders a lie, and finds out what was believed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from lies import LIES

from paceline.services.coordinator.ledger.ledger import Ledger

HERE = Path(__file__).parent
END_S = 10.0


class LyingWorker:
    """One more rollout worker of a cluster, in `directory`, which holds the ledger."""

    def __init__(self, directory: Path, coordinator: str):
        self._directory, self._coordinator = directory, coordinator
        self._orders, self._report = directory / "lie.orders", directory / "lies.jsonl"
        self._process: subprocess.Popen[bytes] | None = None
        self._num_before: int | None = None
        """Lies that it had told when the one was ordered that it has not told yet."""

    def tell(self, index: int, lasts_s: float) -> bool:
        """Orders the lie of that number, unless it is ordered; True once it has been told: the run may end before."""
        if self._process is None or self._process.poll() is not None:
            self._start()
            return False
        if not self._directory.joinpath("liar.ready").exists():
            return False
        number = len(self.told())
        if self._num_before is not None:
            if number > self._num_before:
                self._num_before = None
                return True
            return False
        ledger = str(self._directory / "ledger.sqlite")
        orders = {"lie": LIES[index], "report": str(self._report), "ledger": ledger, "lasts_s": lasts_s}
        self._orders.write_text(json.dumps(orders))
        self._process.send_signal(signal.SIGUSR1)
        self._num_before = number
        return False

    def told(self) -> list[dict[str, Any]]:
        """Return its messages so far, with the exchange's answers."""
        if not self._report.exists():
            return []
        return [json.loads(line) for line in self._report.read_text().splitlines()]

    def believed(self, run_id: str) -> list[str]:
        """The lies that the exchange took, or that were trained, in words."""
        with contextlib.closing(Ledger(self._directory / "ledger.sqlite", read_only=True)) as ledger:
            rows = ledger.db.execute(
                "SELECT group_id, digest FROM groups WHERE run_id = ? AND step IS NOT NULL", (run_id,)
            )
            trained = {(row["group_id"], row["digest"]) for row in rows}
        problems = []
        for said in self.told():
            status = said.get("status", "")
            if status.startswith("COMMITTED") or status.endswith("with something"):
                problems.append(f"a lie about {said['lie']} was answered {status}")
            if (said["group_id"], said.get("digest")) in trained:
                problems.append(f"a lie about {said['lie']} was trained: group {said['group_id']}")
        return problems

    def end(self) -> None:
        """Kills it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_S)

    def _start(self) -> None:
        self._num_before = None
        ready = self._directory / "liar.ready"
        ready.unlink(missing_ok=True)
        paths = [str(HERE), *sys.path[:1], os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PACELINE_STARTER": str(os.getpid()),
            "PACELINE_LIES": str(self._orders),
        }
        options = [
            "--coordinator",
            self._coordinator,
            "--port",
            "0",
            "--name",
            "liar",
            "--ready-file",
            str(ready),
        ]
        with (self._directory / "logs" / "liar.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "liar.py"), *options], env=environment, stdout=log, stderr=log
            )
