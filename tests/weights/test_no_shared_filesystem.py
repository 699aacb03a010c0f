"""A worker without a relay that joins a run whose store it cannot read, as on another host without `weights.store`: it
is named with the remedy, and the run continues without it. The other host is a mount namespace in which the runs'
directory is empty."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from elastic_run import ElasticRun, until

from paceline.weights.hosts.local_socket import FOLDER_VARIABLE

NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


def elsewhere(directory: Path) -> tuple[str, ...]:
    """Return the command for a program that sees `directory` empty. Skips the test if the kernel does not permit it."""
    prefix = (*NAMESPACE, "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(directory))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "seen").touch()
    try:
        seen = subprocess.run([*prefix, "ls", str(directory)], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount namespace: {getattr(error, 'stderr', error)!r}")
    assert seen == b""
    return prefix


@pytest.mark.slow
def test_a_joiner_with_neither_relay_nor_store_is_named_with_what_helps(tmp_path: Path) -> None:
    prefix = ("env", f"{FOLDER_VARIABLE}=/proc/nowhere", *elsewhere(tmp_path / "runs"))
    with ElasticRun(tmp_path, ranks=1, steps=1_000_000) as run:
        first = run.start_worker()
        until("the first steps", lambda: run.step() > 2 and run.version(first))
        joiner = run.start_worker(prefix=prefix)
        store = run.cluster.directory / run.run_id / "weights"

        def refusals() -> list[str]:
            log = run.cluster.log_path("coordinator").read_text()
            return [line for line in log.splitlines() if f"weights are at {store}" in line]

        until("the joiner is refused by the store", refusals)
        assert list(store.glob("*/anchor.json"))
        assert f"{joiner.name}-" in refusals()[0]
        assert "a worker without access to it cannot read them; set weights.store" in refusals()[0]
        step = run.step()
        until("the run goes on", lambda: run.step() > step + 2)  # the others are not delayed
        assert not run.version(joiner)
