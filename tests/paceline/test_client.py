"""The client against a real coordinator process: submit, look, watch over a broken stream, steer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.client import Client, state_name
from paceline.errors import Busy, Conflict, InvalidInput, NotFound, SpecError, Unavailable
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection
from paceline.spec.reading import load_spec

DEADLINE_S = 60.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A coordinator without workers: runs start and wait."""
    cluster = LocalCluster(tmp_path / "runs", ClusterSection(), say=lambda line: None)
    try:
        cluster.start_coordinator()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.address, timeout_s=DEADLINE_S) as client:
        yield client


@pytest.fixture
def spec_path(tmp_path: Path) -> Path:
    """A spec that a coordinator accepts; its model need not exist for that."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    path = tmp_path / "spec.yaml"
    path.write_text(
        "name: sums\n"
        "policy: {model_name: ./model, max_total_sequence_length: 64, generation: {max_new_tokens: 8}}\n"
        "data: {train: ./train.jsonl}\n"
        "rewards: [{function: length}]\n"
        "grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 2, max_num_steps: 3}\n"
    )
    return path


def test_data_are_prepared_where_a_run_is_submitted(client: Client, spec_path: Path) -> None:
    (spec_path.parent / "own.py").write_text(
        "def double(row):\n    return [row, {'prompt': 'x' * 50, 'answer': '1'}]\n"
    )
    keys = ("function=./own.py:double", "max_prompt_characters=9")
    overrides = [f"data.preparation.{key}" for key in keys]
    run = client.submit(spec_path, [*overrides, "grpo.max_num_epochs=4"])
    assert run.max_num_steps == 2, "an epoch has the one row that stayed"
    assert run.bundle
    hard = ["data.preparation.pass_rate=[0.1,0.9]", "data.preparation.pass_rate_of=[sums-1]"]
    assert client.submit(spec_path, hard).run_id == "sums-2", "prompts that no run has tried stay"
    with pytest.raises(NotFound, match="no-run"):
        client.submit(spec_path, [hard[0], "data.preparation.pass_rate_of=[no-run]"])


def test_a_submitted_run_is_listed_and_starts(client: Client, spec_path: Path) -> None:
    run = client.submit(spec_path, ["grpo.max_num_steps=5"])
    assert (run.run_id, run.max_num_steps, run.step) == ("sums-1", 5, 0)
    assert [r.run_id for r in client.runs()] == ["sums-1"]
    events = client.watch("sums-1")
    assert [(e.sequence, e.kind, e.content["state"]) for e in (next(events), next(events))] == [
        (1, "state", "queued"),
        (2, "state", "running"),
    ]
    assert state_name(client.get("sums-1")) == "running"


def test_runs_of_many_pages_are_one_list(tmp_path: Path) -> None:
    """More than two of the coordinator's pages of 100."""
    (tmp_path / "runs").mkdir()
    ledger = Ledger(tmp_path / "runs" / "ledger.sqlite")
    names = [f"sums-{number}" for number in range(250)]
    with ledger.transaction():
        for name in names:
            ledger.add_run(name, "{}", str(tmp_path / "runs" / name), 3)
            ledger.update_run(name, state="cancelled")
    ledger.close()
    cluster = LocalCluster(tmp_path / "runs", ClusterSection(), say=lambda line: None)
    try:
        cluster.start_coordinator()
        with Client(cluster.address, timeout_s=DEADLINE_S) as client:
            assert [run.run_id for run in client.runs()] == names
    finally:
        cluster.stop()


def test_a_second_run_waits_for_the_first(client: Client, spec_path: Path) -> None:
    first, second = client.submit(spec_path), client.submit(load_spec(spec_path))
    events = client.watch(first.run_id)
    assert [next(events).content["state"] for _ in range(2)] == ["queued", "running"]
    assert state_name(client.get(second.run_id)) == "queued"
    client.cancel(first.run_id)
    later = client.watch(second.run_id, after=1)
    assert next(later).content["state"] == "running"
    assert state_name(client.wait(first.run_id, DEADLINE_S)) == "cancelled"


def test_a_bad_spec_is_refused_before_it_is_sent(client: Client, spec_path: Path) -> None:
    with pytest.raises(SpecError, match="did you mean 'max_num_steps'"):
        client.submit(spec_path, ["grpo.max_num_step=5"])
    with pytest.raises(InvalidInput, match="overrides go with a spec's file"):
        client.submit(load_spec(spec_path), ["grpo.max_num_steps=5"])
    assert client.runs() == []


def test_bad_data_is_refused_by_the_coordinator(client: Client, spec_path: Path) -> None:
    (spec_path.parent / "train.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": 7}\n')
    with pytest.raises(InvalidInput, match=r"train\.jsonl, line 2: column 'prompt' has to be text"):
        client.submit(spec_path)
    assert client.runs() == []


def test_a_run_that_is_not_there_is_not_found(client: Client) -> None:
    with pytest.raises(NotFound, match="no run 'sums-9'"):
        client.get("sums-9")
    with pytest.raises(NotFound, match="no run 'sums-9'"):
        next(client.watch("sums-9"))


def test_pause_and_resume_follow_the_state(client: Client, spec_path: Path) -> None:
    run_id = client.submit(spec_path).run_id
    with pytest.raises(Conflict, match="neither paused nor failed"):
        client.resume(run_id)
    events = client.watch(run_id)
    while next(events).content["state"] != "running":
        pass
    assert state_name(client.pause(run_id)) == "paused"
    assert state_name(client.resume(run_id)) == "running"
    assert state_name(client.cancel(run_id)) == "cancelled"
    with pytest.raises(Conflict, match="already cancelled"):
        client.cancel(run_id)
    assert [e.content["state"] for e in events] == ["paused", "running", "cancelled"]


def test_watch_goes_on_after_the_coordinator_was_killed(cluster: LocalCluster, client: Client, spec_path: Path) -> None:
    """Each event comes once, in order, and the stream ends with the run."""
    run_id = client.submit(spec_path).run_id
    events = client.watch(run_id)
    seen = [next(events), next(events)]
    assert cluster.kill("coordinator")
    rest: list[tuple[int, str]] = []
    reader = threading.Thread(target=lambda: rest.extend((e.sequence, e.content["state"]) for e in events))
    reader.start()
    cancel_once_back(cluster, run_id)
    reader.join(DEADLINE_S)
    assert not reader.is_alive()
    assert [e.sequence for e in seen] == [1, 2]
    assert rest == [(3, "cancelled")]


def test_a_patient_client_watches_from_before_the_coordinator_is_back(
    cluster: LocalCluster, client: Client, spec_path: Path
) -> None:
    run_id = client.submit(spec_path).run_id
    client.cancel(run_id)
    assert cluster.kill("coordinator")
    with Client(cluster.address, wait_s=DEADLINE_S) as patient:
        assert [event.content["state"] for event in patient.watch(run_id)][-1] == "cancelled"
        assert state_name(patient.get(run_id)) == "cancelled"


def cancel_once_back(cluster: LocalCluster, run_id: str) -> None:
    """Cancels a run as soon as the coordinator answers again."""
    with Client(cluster.address) as other:
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            try:
                other.cancel(run_id)
                return
            except Unavailable:
                if cluster.wait(0.1):
                    cluster.check()
    raise AssertionError("the coordinator did not come back")


def test_closing_the_client_ends_a_watch_in_another_thread(client: Client, spec_path: Path) -> None:
    run_id = client.submit(spec_path).run_id
    started, raised = threading.Event(), []

    def watch() -> None:
        try:
            for event in client.watch(run_id):
                if event.content.get("state") == "running":
                    started.set()
        except Unavailable as error:
            raised.append(str(error))

    reader = threading.Thread(target=watch)
    reader.start()
    assert started.wait(DEADLINE_S)
    client.close()
    reader.join(DEADLINE_S)
    assert raised == [f"the client of {client.address} is closed"]
    with pytest.raises(Unavailable, match="is closed"):
        client.runs()


def test_nobody_there_is_said_with_the_remedy() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        expected = f"no coordinator answers at {address}; start one with `paceline serve coordinator`"
        with Client(address) as client:
            with pytest.raises(Unavailable, match=expected):
                client.runs()
            with pytest.raises(Unavailable, match=expected):
                next(client.watch("sums-1"))


def test_without_workers_there_is_nobody_to_ask(client: Client) -> None:
    assert client.members() == []
    with pytest.raises(Unavailable, match="no rollout worker with an address"):
        client.generate("1+1=")
    with pytest.raises(Unavailable, match="no reward worker with an address"):
        client.score(["1+1="], ["2"])


def test_a_call_that_there_is_no_room_for_is_made_again_when_the_answer_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = [Busy("full", 0.01), Busy("full", 0.02)]

    def call_once(*_: object) -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    with Client("127.0.0.1:1") as client:
        monkeypatch.setattr(client, "_call_once", call_once)
        assert client._call(lambda: "never") == "done"
        assert not errors
        errors += [Busy("full", 60.0)]
        with pytest.raises(Busy) as later:
            client._call(lambda: "never")
        assert later.value.retry_after_s == 60.0, "longer than the client waits: it is raised at once"
        errors += [Busy("full", 0.01)]
        with pytest.raises(Busy):
            client._call(lambda: "never", "a worker")


def test_wait_has_a_deadline(client: Client, spec_path: Path) -> None:
    run_id = client.submit(spec_path).run_id
    with pytest.raises(Unavailable, match=r"has not ended after 0\.2 s"):
        client.wait(run_id, 0.2)


def test_the_spec_arrives_as_it_was_resolved(client: Client, spec_path: Path) -> None:
    run = client.submit(spec_path)
    assert str(spec_path.parent / "train.jsonl") in run.spec_yaml
    assert run.tokens["generated"] == run.groups["admitted"] == 0
