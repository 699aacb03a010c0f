"""Weights by host across the death of a coordinator: the next one has no plan and no version, and every host still gets
its weights."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
from elastic_run import ElasticRun, Worker, until

from paceline.errors import PacelineError


class Restarts:
    """A run with a worker on the learner's host and one on a separate host."""

    def __init__(self, run: ElasticRun) -> None:
        self.run = run
        self.near, self.far = (
            run.start_worker(faulty=True, beside_learner=True),
            run.start_worker(faulty=True),
        )
        for worker in self.workers:
            until(f"{worker.name} serves", lambda worker=worker: run.version(worker))
        until("the first step", lambda: run.step() > 0)

    @property
    def workers(self) -> tuple[Worker, Worker]:
        return self.near, self.far

    def kill_coordinator(self) -> None:
        until("the coordinator can be killed", lambda: self.run.cluster.kill("coordinator"))

    def stop_coordinator_in_a_step(self) -> None:
        """Stop the coordinator while the learner trains a step, and wait until the step is over."""
        with self.run.learner_status() as status:
            while True:
                until("the learner trains", lambda: status().phase == "training", pause_s=0.002)
                self.run.cluster.kill("coordinator", 0, signal.SIGSTOP)
                now = status()
                if now.phase == "training":
                    step = now.version.step
                    break
                self.run.cluster.kill("coordinator", 0, signal.SIGCONT)
            until("the step is over", lambda: status().version.step == step + 1)

    def check(self) -> None:
        """Wait until the run continues, and all workers sample with the learner's weights."""
        until("the coordinator is back", self._is_back)
        step = self.run.step()
        until("two more steps", lambda: self.run.step() >= step + 2)
        version = self.run.hold()
        reference = self.run.exported()
        for worker in self.workers:
            until(f"{worker.name} has {version}", lambda worker=worker: self.run.version(worker) == version)
            assert self.run.wrong_weights(worker, reference, version) == ""
        self.run.client.resume(self.run.run_id)

    def _is_back(self) -> bool:
        with contextlib.suppress(PacelineError):
            self.run.step()
            return True
        return False


@pytest.fixture(scope="module")
def restarts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarts]:
    with ElasticRun(tmp_path_factory.mktemp("restarts"), ranks=1, steps=1_000_000) as run:
        yield Restarts(run)


@pytest.mark.merge
@pytest.mark.slow
def test_killed_before_it_could_plan_a_version_that_the_learner_stages(restarts: Restarts) -> None:
    restarts.stop_coordinator_in_a_step()
    restarts.kill_coordinator()
    restarts.check()


@pytest.mark.merge
@pytest.mark.slow
def test_killed_while_a_version_is_on_its_way_to_a_host(restarts: Restarts) -> None:
    restarts.far.arm_relay("transfer", "SIGSTOP", "agent")
    until("the relay is stopped", restarts.far.struck_at_s)
    restarts.kill_coordinator()
    with contextlib.suppress(ProcessLookupError):  # its worker may have replaced it
        os.kill(restarts.far.relay_pid(), signal.SIGCONT)
    restarts.check()


@pytest.mark.merge
@pytest.mark.slow
def test_killed_when_workers_use_a_version_and_have_not_acknowledged_it(restarts: Restarts) -> None:
    struck_s = [worker.struck_at_s() for worker in restarts.workers]
    for worker in restarts.workers:
        worker.arm("answer", "wait")
    for worker, before_s in zip(restarts.workers, struck_s, strict=True):
        until("it has not answered", lambda worker=worker, before_s=before_s: worker.struck_at_s() > before_s)
    restarts.kill_coordinator()
    for worker in restarts.workers:
        worker.send(signal.SIGUSR2)
    restarts.check()
