"""The client against a real coordinator process: submit, list, watch over a broken stream, control."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from paceline.calls.backoff import to_metadata
from paceline.client import ENDED_STATES, Client, state_name
from paceline.errors import Busy, Conflict, InvalidInput, NotFound, SpecError, Unavailable
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection
from paceline.spec.reading import load_spec
from paceline.v1.reward_pb2 import ScoreRequest, ScoreResponse
from paceline.v1.reward_pb2_grpc import RewardServiceServicer, RewardServiceStub, add_RewardServiceServicer_to_server
from paceline.v1.run_pb2 import GetRequest, GetResponse, Run
from paceline.v1.run_pb2_grpc import RunServiceServicer, add_RunServiceServicer_to_server

DEADLINE_S = 60.0


MANY = [f"many-{number}" for number in range(250)]
"""Runs that ended before the coordinator started: more than two of its pages of 100."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A coordinator without workers: runs start and wait."""
    directory = tmp_path_factory.mktemp("runs")
    ledger = Ledger(directory / "ledger.sqlite")
    with ledger.transaction():
        for name in MANY:
            ledger.add_run(name, "{}", str(directory / name), 3)
            ledger.update_run(name, state="cancelled")
    ledger.close()
    cluster = LocalCluster(directory, ClusterSection(), say=lambda line: None)
    try:
        cluster.start_coordinator()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    """A client of a coordinator without open runs."""
    with Client(cluster.address, timeout_s=DEADLINE_S) as client:
        yield client
    with Client(cluster.address, wait_s=DEADLINE_S) as other:
        for run in other.runs():
            if state_name(run) not in ENDED_STATES:
                other.cancel(run.run_id)


@pytest.fixture
def spec_path(tmp_path: Path) -> Path:
    """A spec that a coordinator accepts; its model need not exist for that."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    path = tmp_path / "spec.yaml"
    path.write_text(
        "name: sums\n"
        "policy: {model_name: ./model, max_total_sequence_length: 64, generation: {max_new_tokens: 8}}\n"
        "data: {train: ./train.jsonl}\n"
        "rewards: [{function: exact_match}]\n"
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
    hard = ["data.preparation.pass_rate=[0.1,0.9]", f"data.preparation.pass_rate_of=[{run.run_id}]"]
    assert client.submit(spec_path, hard).max_num_steps == 3, "prompts that no run has tried stay"
    with pytest.raises(NotFound, match="no-run"):
        client.submit(spec_path, [hard[0], "data.preparation.pass_rate_of=[no-run]"])


def test_a_submitted_run_is_listed_and_starts(client: Client, spec_path: Path) -> None:
    before = len(client.runs())
    run = client.submit(spec_path, ["grpo.max_num_steps=5"])
    assert (run.run_id, run.max_num_steps, run.step) == (f"sums-{before + 1}", 5, 0)
    assert [r.run_id for r in client.runs()][before:] == [run.run_id]
    events = client.watch(run.run_id)
    assert [(e.sequence, e.kind, e.content["state"]) for e in (next(events), next(events))] == [
        (1, "state", "queued"),
        (2, "state", "running"),
    ]
    assert state_name(client.get(run.run_id)) == "running"


def test_runs_of_many_pages_are_one_list(client: Client) -> None:
    assert [run.run_id for run in client.runs()][: len(MANY)] == MANY


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
    before = len(client.runs())
    with pytest.raises(SpecError, match="did you mean 'max_num_steps'"):
        client.submit(spec_path, ["grpo.max_num_step=5"])
    with pytest.raises(InvalidInput, match="overrides are only for the file of a spec"):
        client.submit(load_spec(spec_path), ["grpo.max_num_steps=5"])
    assert len(client.runs()) == before


def test_bad_data_is_refused_by_the_coordinator(client: Client, spec_path: Path) -> None:
    before = len(client.runs())
    (spec_path.parent / "train.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": 7}\n')
    with pytest.raises(InvalidInput, match=r"train\.jsonl, line 2: column 'prompt' must be text"):
        client.submit(spec_path)
    assert len(client.runs()) == before


def test_a_run_that_is_not_there_is_not_found(client: Client) -> None:
    with pytest.raises(NotFound, match="no run 'sums-999'"):
        client.get("sums-999")
    with pytest.raises(NotFound, match="no run 'sums-999'"):
        next(client.watch("sums-999"))


def test_pause_and_resume_follow_the_state(client: Client, spec_path: Path) -> None:
    run_id = client.submit(spec_path).run_id
    with pytest.raises(Conflict, match="only a paused or failed run can be resumed"):
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


def test_watches_go_on_after_the_coordinator_was_killed(cluster: LocalCluster, client: Client, spec_path: Path) -> None:
    """Each event comes once, in order, and the stream ends with the run. A patient client may begin before it is back."""
    ended_id = client.submit(spec_path).run_id
    client.cancel(ended_id)
    run_id = client.submit(spec_path).run_id
    events = client.watch(run_id)
    seen = [next(events), next(events)]
    assert cluster.kill("coordinator")
    rest: list[tuple[int, str]] = []
    reader = threading.Thread(target=lambda: rest.extend((e.sequence, e.content["state"]) for e in events))
    reader.start()
    with Client(cluster.address, wait_s=DEADLINE_S) as patient:
        assert [event.content["state"] for event in patient.watch(ended_id)][-1] == "cancelled"
        assert state_name(patient.get(ended_id)) == "cancelled"
    cancel_once_back(cluster, run_id)
    reader.join(DEADLINE_S)
    assert not reader.is_alive()
    assert [e.sequence for e in seen] == [1, 2]
    assert rest == [(3, "cancelled")]


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


def test_a_missing_coordinator_is_an_error_with_the_remedy() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        expected = f"no coordinator answers at {address}; start one with `paceline serve coordinator`"
        with Client(address) as client:
            with pytest.raises(Unavailable, match=expected):
                client.runs()
            with pytest.raises(Unavailable, match=expected):
                next(client.watch("sums-1"))


def test_without_workers_calls_to_them_are_unavailable(client: Client) -> None:
    assert client.members() == []
    with pytest.raises(Unavailable, match="no rollout worker with an address"):
        client.generate("1+1=")
    with pytest.raises(Unavailable, match="no reward worker with an address"):
        client.score(["1+1="], ["2"])


class FullServer(RunServiceServicer, RewardServiceServicer):  # type: ignore[misc]
    """Refuses calls for want of room, once for each of its retry hints."""

    def __init__(self) -> None:
        self.hints_s: list[float] = []

    def _refuse_while_full(self, context: grpc.ServicerContext) -> None:
        if self.hints_s:
            context.set_trailing_metadata(to_metadata(self.hints_s.pop(0)))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    def Get(self, request: GetRequest, context: grpc.ServicerContext) -> GetResponse:
        self._refuse_while_full(context)
        return GetResponse(run=Run(run_id=request.run_id))

    def Score(self, request: ScoreRequest, context: grpc.ServicerContext) -> ScoreResponse:
        self._refuse_while_full(context)
        return ScoreResponse()


@pytest.fixture
def full_server() -> Iterator[tuple[FullServer, str]]:
    servicer, server = FullServer(), grpc.server(ThreadPoolExecutor(2))
    add_RunServiceServicer_to_server(servicer, server)
    add_RewardServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait(DEADLINE_S)


def test_a_call_that_there_is_no_room_for_is_made_again_when_the_answer_says(
    full_server: tuple[FullServer, str], tmp_path: Path
) -> None:
    server, address = full_server
    with Client(address, token_file=tmp_path / "none") as client, grpc.insecure_channel(address) as channel:
        server.hints_s += [0.01, 0.02]
        assert client.get("sums-1").run_id == "sums-1"
        assert not server.hints_s
        server.hints_s += [60.0]
        with pytest.raises(Busy) as later:
            client.get("sums-1")
        assert later.value.retry_after_s == 60.0, "longer than the client waits: it is raised at once"
        server.hints_s += [0.01]
        with pytest.raises(Busy):
            client._call(lambda: RewardServiceStub(channel).Score(ScoreRequest()), "reward worker")


def test_wait_has_a_deadline(client: Client, spec_path: Path) -> None:
    run_id = client.submit(spec_path).run_id
    with pytest.raises(Unavailable, match=r"has not ended after 0\.2 s"):
        client.wait(run_id, 0.2)


def test_the_spec_arrives_as_it_was_resolved(client: Client, spec_path: Path) -> None:
    run = client.submit(spec_path)
    assert str(spec_path.parent / "train.jsonl") in run.spec_yaml
    assert run.tokens["generated"] == run.groups["admitted"] == 0
