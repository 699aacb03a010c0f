"""A worker that joins a run whose store it cannot read, as on another host without `weights.store`: it gets full weights over
its link. The other host is a mount namespace in which the runs' directory is empty."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from elastic_run import ElasticRun, until

NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


def elsewhere(directory: Path) -> tuple[str, ...]:
    """Return the command that makes a program see `directory` empty. Skips the test where the kernel does not let us."""
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
def test_a_joiner_that_cannot_read_the_store_gets_full_weights_over_its_link(tmp_path: Path) -> None:
    prefix = elsewhere(tmp_path / "runs")
    with ElasticRun(tmp_path, ranks=1, steps=1_000_000) as run:
        first = run.start_worker()
        until("the first steps", lambda: run.step() > 2 and run.version(first))
        joiner = run.start_worker(prefix=prefix)
        until("the joiner serves", lambda: (run.version(joiner) or (0, 0)) > (1, 2))
        store = run.cluster.directory / run.run_id / "weights"
        assert list(store.glob("*/anchor.json")), "it was offered the store first"
        log = run.cluster.log_path("learner").read_text()
        refused = [line for line in log.splitlines() if "cannot catch up from the store" in line]
        assert len(refused) == 1
        assert f"{joiner.name}-" in refused[0]
        assert f"weights are at {store}: a worker that does not share it cannot read them" in refused[0]
        assert "set weights.store" in refused[0]
        # From here on it is a member like the others.
        before = run.version(joiner)
        assert before is not None
        until("it follows", lambda: (run.version(joiner) or before).step > before.step + 5)
        version = run.hold()
        until("it has the last version", lambda: run.version(joiner) == version)
        weights = run.exported()
        assert run.wrong_weights(joiner, weights, version) == ""
        assert run.wrong_weights(first, weights, version) == ""
        assert run.cluster.log_path("learner").read_text().count("cannot catch up") == 1
        reports = [line for line in run.metrics("weights") if line["step"] > version.step - 5]
        assert {line["members"] for line in reports} == {2.0}
