"""Promises of every tracker to its follower. Each test runs once for each tracker."""

from __future__ import annotations

import json

import pytest
from tracker_backends import BACKENDS, Backend, FileBackend, Mlflow, WandB
from tracker_servers import RUN_ID

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trackers and what they import
every_backend = pytest.mark.parametrize("backend", sorted(BACKENDS), indirect=True)
FILES = [name for name, kind in BACKENDS.items() if issubclass(kind, FileBackend)]


def steps(number: int) -> list[tuple[int, float]]:
    return [(step, step / 8) for step in range(number)]


@every_backend
def test_metrics_samples_and_warnings_arrive(backend: Backend) -> None:
    backend.run.add_steps(3)
    backend.run.add("warning", message="look")
    backend.run.add("state", state="succeeded")
    backend.follower().run()
    assert backend.rewards() == steps(3)
    assert backend.warnings() == ["look"]
    texts = backend.sample_texts()
    assert {"2", "three"} <= set(texts)
    assert r"<script>alert(1)</script>\x1b[31m" in texts


@every_backend
def test_each_entry_is_there_once_after_a_crash_before_the_cursor(backend: Backend) -> None:
    backend.run.add_steps(3)
    backend.run.add("warning", message="look")
    backend.follower(only_now=True).run()
    backend.rewind(1)
    backend.run.add_steps(2)
    backend.run.add("state", state="succeeded")
    backend.follower().run()
    assert backend.rewards() == steps(5)
    assert backend.warnings() == ["look"]


@pytest.mark.parametrize("backend", FILES, indirect=True)
def test_files_that_lost_their_end_get_it_again(backend: FileBackend) -> None:
    backend.run.add_steps(6)
    backend.follower(only_now=True).run()
    before = backend.position()
    backend.truncate()
    assert backend.position() < before
    backend.run.add("state", state="succeeded")
    backend.follower().run()
    assert backend.rewards() == steps(6)


@pytest.mark.parametrize("backend", ["wandb"], indirect=True)
def test_wandb_has_the_names_the_spec_and_the_links(backend: WandB) -> None:
    backend.setting = backend.setting.model_copy(update={"names": "trl"})
    backend.run.add_steps(2)
    backend.follower(only_now=True).run()
    backend.follower(only_now=True).run()
    assert backend.records("history")[1]["item"]["train/rewards/exact_match/mean"] == 0.25
    runs = backend.records("run")
    assert {each["run_id"] for each in runs} == {json.loads(backend.cursor.read_text())["identity"]}
    assert runs[0]["display_name"] == RUN_ID
    assert runs[0]["notes"] == "page: http://127.0.0.1:7080"
    assert runs[0]["config"]["update"]["grpo"]["num_generations_per_prompt"] == 2


@pytest.mark.parametrize("backend", ["mlflow"], indirect=True)
def test_mlflow_has_the_state_the_spec_and_the_links(backend: Mlflow) -> None:
    backend.run.add_steps(1)
    backend.run.add("state", state="succeeded")
    backend.follower().run()
    _, found = backend.only_run()
    assert found.info.status == "FINISHED"
    assert found.info.run_name == RUN_ID
    assert found.data.params["grpo.num_generations_per_prompt"] == "2"
    assert found.data.tags["paceline.page"] == "http://127.0.0.1:7080"
    assert json.loads(backend.cursor.read_text())["url"].endswith(found.info.run_id)
