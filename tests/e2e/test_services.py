"""The services as any gRPC client sees them, found by reflection alone; and what bad input does to a live system."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import zmq
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from paceline.calls.token import metadata, open_channel, read_token, token_path
from paceline.client import Client
from paceline.errors import InvalidInput, PacelineError
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec
from paceline.tls.folder import tls_folder

MakeSpec = Callable[..., RunSpec]


class Reflected:
    """Calls methods by name with JSON, knowing nothing but an address: what grpcurl does."""

    def __init__(self, address: str):
        self._channel = open_channel(address, known=lambda: metadata(read_token(token_path())))
        self._pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(self._channel))

    def __enter__(self) -> Reflected:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, service: str, method: str, request: dict[str, Any]) -> dict[str, Any]:
        """A unary call."""
        path, message, reply = self._resolve(service, method, request)
        answer = self._channel.unary_unary(path, lambda m: m.SerializeToString(), reply.FromString)(message, timeout=30)
        return json_format.MessageToDict(answer)

    def stream(self, service: str, method: str, request: dict[str, Any]) -> list[dict[str, Any]]:
        """A call that answers with a stream, to its end."""
        path, message, reply = self._resolve(service, method, request)
        call = self._channel.unary_stream(path, lambda m: m.SerializeToString(), reply.FromString)(message, timeout=120)
        return [json_format.MessageToDict(answer) for answer in call]

    def _resolve(self, service: str, method: str, request: dict[str, Any]) -> tuple[str, Any, Any]:
        described = self._pool.FindServiceByName(f"paceline.v1.{service}").FindMethodByName(method)
        message = message_factory.GetMessageClass(described.input_type)()
        json_format.ParseDict(request, message)
        return (
            f"/paceline.v1.{service}/{method}",
            message,
            message_factory.GetMessageClass(described.output_type),
        )


def address_of(client: Client, role: str) -> str:
    """Return the address of a worker of that role; of several rollout workers, one that has weights."""
    from paceline.v1.common_pb2 import Role

    return next(
        member.address
        for member in client.members()
        if member.role == Role.Value(f"ROLE_{role}")
        and member.address
        and (role != "ROLLOUT" or member.HasField("version"))
    )


def test_every_service_answers_by_reflection(client: Client, cluster: LocalCluster, make_spec: MakeSpec) -> None:
    run = client.submit(make_spec(grpo={"max_num_steps": 1_000_000}))
    client_events = client.watch(run.run_id)
    while next(client_events).kind != "step":
        pass

    with Reflected(address_of(client, "ROLLOUT")) as rollout:
        answer = rollout.call("RolloutService", "Generate", {"prompt": "07+45=", "n": 2, "seed": 7})
        again = rollout.call("RolloutService", "Status", {})
    assert len(answer["completions"]) == 2
    assert all(len(c["tokenIds"]) == len(c["logprobs"]) for c in answer["completions"])
    assert again["runId"] == run.run_id
    with Reflected(address_of(client, "REWARD")) as reward:
        scores = reward.call(
            "RewardService",
            "Score",
            {
                "functions": ["exact_match"],
                "completions": ["4", "5"],
                "columnsJson": json.dumps({"answer": ["4", "4"]}),
            },
        )
        functions = reward.call("RewardService", "ListFunctions", {})
    assert [score.get("value") for score in scores["scores"][0]["scores"]] == [1.0, 0.0]
    assert {"math_accuracy", "digits"} <= {function["name"] for function in functions["functions"]}
    with Reflected(address_of(client, "LEARNER")) as learner:
        assert learner.call("LearnerService", "Status", {})["runId"] == run.run_id
        checkpoint = learner.call("LearnerService", "Checkpoint", {})
        exports = [learner.call("LearnerService", "Export", {"name": "midway"}) for _ in range(2)]
        for name in ("../checkpoints", ".x", "x" * 65):
            with pytest.raises(grpc.RpcError) as refused:
                learner.call("LearnerService", "Export", {"name": name})
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        (Path(run.directory) / "exports" / "mine").mkdir()
        (Path(run.directory) / "exports" / "mine" / "notes").write_text("of a person")
        with pytest.raises(grpc.RpcError) as refused:
            learner.call("LearnerService", "Export", {"name": "mine"})
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        after = learner.call("LearnerService", "Export", {"name": "checkpoints"})
    assert (Path(checkpoint["path"]) / "manifest.json").is_file()
    for export, name in ((exports[1], "midway"), (after, "checkpoints")):
        assert Path(export["path"]) == Path(run.directory) / "exports" / name
        assert (Path(export["path"]) / "model.safetensors").is_file()
    with Reflected(cluster.address) as coordinator:
        assert run.run_id in {r["runId"] for r in coordinator.call("RunService", "List", {})["runs"]}
        client.cancel(run.run_id)
        events = coordinator.stream("RunService", "Watch", {"runId": run.run_id})
    assert json.loads(events[-1]["json"])["state"] == "cancelled"
    assert [int(event["sequence"]) for event in events] == list(range(1, len(events) + 1))


REWARDS = {
    "raises": "def f(completions, **columns):\n    raise ValueError('no such thing')\n",
    "hangs": "import time\ndef f(completions, **columns):\n    time.sleep(3600)\n",
    "wrong_length": "def f(completions, **columns):\n    return [1.0]\n",
    "nan": "def f(completions, **columns):\n    return [float('nan')] * len(completions)\n",
}


@pytest.mark.parametrize(("fault", "words"), [
    ("raises", "no such thing"), pytest.param("hangs", "0.5 s", marks=[pytest.mark.merge, pytest.mark.slow]), ("wrong_length", "1"), ("nan", "nan"),
])  # fmt: skip
def test_a_bad_reward_pauses_its_run_with_the_reason_and_nothing_else(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec, tmp_path: Path, fault: str, words: str
) -> None:
    file = tmp_path / "bad.py"
    file.write_text(REWARDS[fault])
    reward = {"function": f"{file}:f", "timeout_s": 0.5}
    run = client.submit(make_spec(rewards=[reward], grpo={"num_prompts_per_step": 2, "max_generation_batches": 1}))
    warnings = []
    for event in client.watch(run.run_id):
        if event.kind == "warning":
            warnings.append(event.content["message"])
        if event.content.get("state") == "paused":
            break
    paused = client.get(run.run_id)
    assert "reward_failed" in paused.message
    ended = client.cancel(run.run_id)
    assert any(words in warning.lower() for warning in warnings), warnings
    assert ended.groups["dropped:reward_failed"] >= 2
    assert ended.tokens["trained"] == 0
    assert ended.tokens["generated"] == ended.tokens["dropped"] + ended.tokens["live"]


def test_prompts_that_are_too_long_are_dropped_and_named(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec, tmp_path: Path
) -> None:
    rows = [{"prompt": "1" * (200 if i % 2 else 4) + "+1="} for i in range(40)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = make_spec(data={"train": str(tmp_path / "mixed.jsonl"), "validation": None}, grpo={"max_num_steps": 3})
    ended = client.wait(client.submit(spec).run_id, timeout_s=120)
    warnings = [event.content["message"] for event in client.watch(ended.run_id) if event.kind == "warning"]

    assert ended.step == 3, ended.message
    assert any("203 tokens" in warning for warning in warnings), warnings
    assert sum(n for name, n in ended.groups.items() if name.startswith("dropped:") and "run_ended" not in name) > 0


def test_bad_specs_and_data_are_refused_at_submit(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec, tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "torn.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": \n')
    for data, words in (
        ({"train": str(tmp_path / "none.jsonl")}, "none.jsonl"),
        ({"train": str(tmp_path / "empty.jsonl")}, "no rows"),
        ({"train": str(tmp_path / "torn.jsonl")}, "line 2"),
        ({"prompt_key": "promt"}, "promt"),
    ):
        with pytest.raises(InvalidInput, match=words):
            client.submit(make_spec(data=data))
    assert client.runs() is not None


def test_a_missing_model_and_a_missing_reward_file_pause_their_runs_with_the_path(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec, tmp_path: Path
) -> None:
    for change, words in (
        ({"policy": {"model_name": str(tmp_path / "nowhere")}}, "nowhere"),
        ({"rewards": [{"function": f"{tmp_path / 'gone.py'}:f"}]}, "gone.py"),
    ):
        run_id = client.submit(make_spec(**change)).run_id
        for event in client.watch(run_id):  # the file may only be late: the run waits for it
            if event.kind == "state" and event.content["state"] == "paused":
                break
        assert words in client.get(run_id).message
        client.cancel(run_id)


def test_junk_on_every_port_disturbs_nobody(client: Client, cluster: LocalCluster, make_spec: MakeSpec) -> None:
    run = client.submit(make_spec(grpo={"max_num_steps": 10}))
    exchange = next(
        line.split("exchange on tcp://")[1].split(",")[0]
        for line in reversed(cluster.log_path("coordinator").read_text().splitlines())
        if "exchange on tcp://" in line
    )
    for address in (cluster.address, exchange):
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=60) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(range(256)) * 64)
    context = zmq.Context()
    with context.socket(zmq.DEALER) as foreign:
        foreign.linger = 0
        refusals = foreign.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED)
        foreign.connect(f"tcp://{exchange}")
        foreign.send_multipart([b"\xff" * 100])
        if tls_folder() is None:
            assert foreign.poll(60_000), "a foreign message is answered, not ignored"
        else:
            assert refusals.poll(60_000), "a peer without a key gets no connection"
            assert not foreign.poll(0)
        foreign.disable_monitor()
        refusals.close(linger=0)
    context.term()

    assert client.wait(run.run_id, timeout_s=120).step == 10


def test_a_client_of_the_wrong_port_is_told_so() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # taken, and not listening
        port = nobody.getsockname()[1]
        with (
            Client(f"127.0.0.1:{port}", timeout_s=5) as client,
            pytest.raises(PacelineError, match=str(port)),
        ):
            client.runs()
