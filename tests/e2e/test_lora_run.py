"""A LoRA run through real services: it learns, the adapter alone travels, joiners come in, and what comes out is peft's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from paceline.calls.token import metadata, open_channel, read_token, token_path
from paceline.client import Client
from paceline.services.cli.main import main
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec
from paceline.v1 import common_pb2, learner_pb2, learner_pb2_grpc

# PeftModel, the oracle here, asks transformers by an old name.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

STEPS = 24
DIM = 4
AUTO: Any = AutoModelForCausalLM


def export_now(client: Client, name: str) -> Path:
    """Orders the adapter alone from the learner while it trains."""
    address = next(m.address for m in client.members() if m.role == common_pb2.ROLE_LEARNER and m.address)
    with open_channel(address, known=lambda: metadata(read_token(token_path()))) as channel:
        request = learner_pb2.ExportRequest(name=name, adapter_only=True)
        return Path(learner_pb2_grpc.LearnerServiceStub(channel).Export(request, timeout=120).path)


def test_a_lora_run_learns_and_only_the_adapter_travels(
    client: Client, cluster: LocalCluster, make_spec: Callable[..., RunSpec], files: Path, tmp_path: Path
) -> None:
    policy = make_spec().policy.model_dump() | {
        "lora_cfg": {"enabled": True, "dim": DIM},
        "optimizer": {"lr": 1e-2},
    }
    grpo = {"max_num_steps": STEPS, "val_at_start": True, "val_at_end": True}
    spec = make_spec(
        policy=policy,
        grpo=grpo,
        loss_fn={"reference_policy_kl_penalty": 0.001},
        async_grpo={"max_trajectory_age_steps": 0},
        checkpointing={"export_dtype": "float32"},
    )
    run = client.submit(spec)
    events = client.watch(run.run_id)
    while next(events).kind != "step":
        pass
    midway = export_now(client, "midway")
    cluster.kill("rollout", 1)  # its successor gets base from the model's path and adapter from the channel
    ended = client.wait(run.run_id, timeout_s=240)
    summary = json.loads((Path(ended.directory) / "summary.json").read_text())
    assert summary["state"] == "succeeded", summary["message"]
    ledger = Ledger(cluster.directory / "ledger.sqlite", read_only=True)
    try:
        assert verify(ledger, run.run_id).problems == []
    finally:
        ledger.close()

    lines = [json.loads(line) for line in (Path(ended.directory) / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    assert summary["reward_after"] > summary["reward_before"] + 0.1
    assert trained[-1]["kl_reference"] > 0
    # The sampler's merged weights and the learner's two paths are one distribution: without age the ratio is 1.
    assert max(abs(line["ratio_behaviour"] - 1) for line in trained) < 1e-4

    # One layer, hidden size 32, feed-forward 128, two heads of 16 for queries, keys and values alike.
    payload = 4 * DIM * (4 * (32 + 32) + 2 * (32 + 128) + (128 + 32))
    alone = load_file(midway / "adapter_model.safetensors")
    assert sum(tensor.nbytes for tensor in alone.values()) == payload
    sizes = {line["size_bytes"] for line in lines if line["kind"] == "weights" and "size_bytes" in line}
    assert len(sizes) == 1
    # Tensors start at multiples of 64 bytes, and the base's fingerprint goes along.
    assert payload <= sizes.pop() <= payload + 64 * (len(alone) + 1)

    exported = tmp_path / "adapter"
    result = CliRunner().invoke(
        main, ["export", run.run_id, str(exported), "--adapter", "--directory", str(cluster.directory)]
    )
    assert result.exit_code == 0, result.output
    tokens = torch.arange(3, 11)[None]
    base = AUTO.from_pretrained(files / "model", dtype=torch.float32)
    with torch.no_grad():
        before = base(tokens).logits
        merged = AUTO.from_pretrained(summary["export_path"], dtype=torch.float32)(tokens).logits
        adapted: Any = PeftModel.from_pretrained(base, str(exported))
        torch.testing.assert_close(adapted(tokens).logits, merged, rtol=0, atol=1e-4)
    assert (merged - before).abs().max() > 1e-2
    assert math.isfinite(float(merged.sum()))
