"""A further rollout worker of a local cluster, with options of its own, and the pools that held a run's leases."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from service_processes import PACELINE, environment, wait_for

from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster


@contextlib.contextmanager
def another_worker(cluster: LocalCluster, folder: Path, *options: str) -> Iterator[None]:
    """A rollout worker named `other`, which listens."""
    ready, log = folder / "ready", folder / "worker.log"
    command = [*PACELINE, "serve", "rollout", "--coordinator", cluster.address, "--name", "other", *options]
    variables = environment() | {"PACELINE_TOKEN_FILE": str(cluster.token_file)}
    with log.open("ab") as out:
        process = subprocess.Popen([*command, "--ready-file", str(ready)], stdout=out, stderr=out, env=variables)
    try:
        wait_for(ready, process)
        yield
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


def pools_of(cluster: LocalCluster, run_id: str) -> set[str]:
    """Return the names of the workers that held leases of a run, without the random end of their ids."""
    with contextlib.closing(Ledger(cluster.directory / "ledger.sqlite", read_only=True)) as ledger:
        rows = ledger.db.execute("SELECT DISTINCT holders FROM groups WHERE run_id = ?", (run_id,)).fetchall()
    ids = {member_id for row in rows for member_id in row["holders"].splitlines() if member_id}
    return {member_id.rpartition("-")[0] for member_id in ids}
