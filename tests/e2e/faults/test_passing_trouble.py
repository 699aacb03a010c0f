"""A file that cannot be read for a moment, as a service starts, pauses the run with the reason; the run goes on by itself."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.client import ENDED_STATES, Client, state_name
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec

DEADLINE_S = 150.0
MakeSpec = Callable[..., RunSpec]


def next_state(client: Client, run_id: str, after: int, state: str) -> tuple[int, str]:
    """Sequence and message of the first event after `after` that puts the run into `state`."""
    deadline_s = time.monotonic() + DEADLINE_S
    for event in client.watch(run_id, after):
        if event.kind == "state" and event.content["state"] == state:
            return event.sequence, str(event.content.get("message", ""))
        assert time.monotonic() < deadline_s, f"not {state} in time; last was {event}"
    raise AssertionError(f"the run ended before it was {state}: {client.get(run_id).message}")


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    """A client that waits for a coordinator that is being started again."""
    with Client(cluster.address, wait_s=DEADLINE_S) as connected:
        yield connected
        for run in connected.runs():
            if state_name(run) not in ENDED_STATES:
                connected.cancel(run.run_id)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "missing"),
    [("reward", "values.json"), ("learner", "model"), ("coordinator", "train.jsonl")],
)
def test_a_file_that_is_away_when_a_service_starts_ends_no_run(
    client: Client,
    cluster: LocalCluster,
    files: Path,
    make_spec: MakeSpec,
    tmp_path: Path,
    role: str,
    missing: str,
) -> None:
    for name in ("model", "train.jsonl"):
        copy = shutil.copytree if (files / name).is_dir() else shutil.copy
        copy(files / name, tmp_path / name)
    gate, values = tmp_path / "open", tmp_path / "values.json"
    values.write_text("[0.25]")
    # Each process of the reward workers waits after the same step, so the run cannot end while the file is away.
    (tmp_path / "rewards.py").write_text(
        "import json, pathlib, time\n"
        f"(VALUE,) = json.loads(pathlib.Path({str(values)!r}).read_text())\n"
        "def digits(completions, trainer_state, **columns):\n"
        f"    while trainer_state.global_step > 1 and not pathlib.Path({str(gate)!r}).exists():\n"
        "        time.sleep(0.02)\n"
        "    return [VALUE * sum(c.isdigit() for c in text) for text in completions]\n"
    )
    spec = make_spec(
        policy={"model_name": str(tmp_path / "model")},
        data={"train": (tmp_path / "train.jsonl").as_uri(), "validation": None},  # a URL is in no bundle
        rewards=[{"function": f"{tmp_path / 'rewards.py'}:digits", "timeout_s": 2 * DEADLINE_S}],
        grpo={"max_num_steps": 6},
        checkpointing={"save_period": 2},
    )
    run_id = client.submit(spec).run_id
    (tmp_path / "rewards.py").unlink()  # the run's bundle has it
    for event in client.watch(run_id):
        if event.kind == "step" and event.content["step"] == 1:
            break
    (tmp_path / missing).rename(tmp_path / "elsewhere")
    assert cluster.kill(role)
    paused, message = next_state(client, run_id, event.sequence, "paused")
    assert missing in message
    assert "retried automatically" in message
    assert state_name(client.get(run_id)) == "paused"
    gate.touch()
    (tmp_path / "elsewhere").rename(tmp_path / missing)
    next_state(client, run_id, paused, "running")
    ended = client.wait(run_id, DEADLINE_S)
    assert (state_name(ended), ended.step) == ("succeeded", 6)
    ledger = Ledger(Path(ended.directory).parent / "ledger.sqlite", read_only=True)
    try:
        assert verify(ledger, run_id).problems == []
    finally:
        ledger.close()
