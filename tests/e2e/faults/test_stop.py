"""A service that is stopped has to end, also when its peers are gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.client import Client
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec


@pytest.mark.slow
def test_a_learner_that_is_told_to_stop_does_not_wait_for_a_coordinator_that_is_gone(
    make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    cluster = LocalCluster(tmp_path, ClusterSection())
    learner = None
    try:
        address = cluster.start_coordinator()
        with Client(address) as client:
            run = client.submit(make_spec())
            options = ["--coordinator", address, "--ranks", "2", "--grace", "1"]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            learner = subprocess.Popen(
                [sys.executable, "-m", "paceline.services.learner.main", *options], env=environment
            )
            for event in client.watch(run.run_id):
                if event.kind == "session":
                    break  # from here on it waits for a batch that nobody will ever generate
        cluster.stop()
        learner.terminate()
        learner.wait(timeout=60)
    finally:
        cluster.stop()
        if learner is not None and learner.poll() is None:
            learner.kill()
