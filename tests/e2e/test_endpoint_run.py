"""The OpenAI client against a worker that trains: it is served, the books do not know it, and SIGTERM waits for it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_services import ForkedCluster
from openai import BadRequestError, OpenAI

from paceline.client import Client
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.spec import ClusterSection, RunSpec


@pytest.mark.merge
@pytest.mark.slow
def test_a_worker_serves_people_while_it_trains_and_finishes_their_answers_when_told_to_stop(
    make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    policy = {"max_total_sequence_length": 256, "generation": {"max_new_tokens": 6, "max_batch_size": 32}}
    spec = make_spec(grpo={"max_num_steps": 1_000_000}, policy={**make_spec().policy.model_dump(), **policy})
    with (
        ForkedCluster(tmp_path, ClusterSection(rollout_workers=1)) as cluster,
        Client(cluster.address) as paceline,
    ):
        run = paceline.submit(spec)
        events = paceline.watch(run.run_id)
        while next(events).kind != "step":
            pass
        address = next(member.http_address for member in paceline.members() if member.http_address)
        with OpenAI(base_url=f"http://{address}/v1", api_key="none", timeout=120) as client:
            names = [model.id for model in client.models.list()]
            said: Any = client.completions.create(
                model=run.run_id, prompt="07+45=", n=4, seed=1, max_tokens=6, logprobs=0
            )
            with pytest.raises(BadRequestError, match="no chat template"):
                client.chat.completions.create(model=run.run_id, messages=[{"role": "user", "content": "1+1="}])
            stream = client.completions.create(
                model=run.run_id, prompt="1+1=", max_tokens=250, stream=True, extra_body={"min_tokens": 250}
            )
            chunks = [next(stream)]
            os.kill(cluster.pids("rollout")[0], signal.SIGTERM)
            chunks += stream
        while next(events).kind != "step":
            pass  # another life of the worker trains on
        pause = threading.Event()
        while not any(
            member.HasField("version") and member.http_address not in ("", address) for member in paceline.members()
        ):
            pause.wait(0.05)
        paceline.cancel(run.run_id)
        ended = paceline.wait(run.run_id, timeout_s=120)
        after = paceline.generate("1+1=", n=2)
        address = next(member.http_address for member in paceline.members() if member.http_address)
        with OpenAI(base_url=f"http://{address}/v1", api_key="none", timeout=120) as client:
            names_after = [model.id for model in client.models.list()]

    assert [len(completion.token_ids) > 0 for completion in after] == [True, True]
    assert names_after[0] == run.run_id
    assert names[0] == run.run_id
    assert names[1].startswith(f"{run.run_id}@1.")
    assert said.model.startswith(f"{run.run_id}@1.")
    assert len(said.choices) == 4
    for choice in said.choices:
        assert choice.versions[0][2] == 0
        assert choice.versions[-1][3] == len(choice.logprobs.tokens)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert sum(len(chunk.choices[0].text) for chunk in chunks) > 100
    assert ended.tokens["generated"] == ended.tokens["trained"] + ended.tokens["dropped"] + ended.tokens["live"]
    ledger = Ledger(tmp_path / "ledger.sqlite", read_only=True)
    try:
        assert verify(ledger, run.run_id).problems == []
    finally:
        ledger.close()
