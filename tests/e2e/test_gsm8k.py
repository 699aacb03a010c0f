"""Word problems in GSM8K's form through the whole pipeline: chat template, system prompt, `#### n`, math reward."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.client import Client
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec

RECORDED = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"


def hand_made(path: Path) -> Path:
    """Problems in the same form, for machines without the recorded ones."""
    rows = [
        {
            "question": f"Ann has {a} pens and buys {b} more. How many has she?",
            "answer": f"{a}+{b}={a + b}\n#### {a + b}",
        }
        for a in range(2, 12)
        for b in range(3, 9)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("data", ["recorded", "hand-made"])
def test_word_problems_go_through_the_whole_pipeline(
    client: Client,
    cluster: LocalCluster,
    make_spec: Callable[..., RunSpec],
    chat_model: Path,
    tmp_path: Path,
    data: str,
) -> None:
    if data == "recorded" and not RECORDED.is_file():
        pytest.skip("the recorded problems are not on this machine")
    train = RECORDED if data == "recorded" else hand_made(tmp_path / "train.jsonl")
    spec = make_spec(
        policy={
            "model_name": str(chat_model),
            "max_total_sequence_length": 1600,
            "generation": {"max_new_tokens": 24},
        },
        data={
            "train": str(train),
            "validation": None,
            "prompt_key": "question",
            "system_prompt": "Think, then answer.",
        },
        rewards=[
            {"function": "math_accuracy", "name": "accuracy"},
            {"function": "think_answer_format", "name": "format", "weight": 0.2},
            {"function": "length", "weight": 0.1, "kwargs": {"tolerance_tokens": 24}},
        ],
        grpo={"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 3},
    )
    run = client.wait(client.submit(spec).run_id, timeout_s=180)
    assert run.step == 3, run.message

    ledger = Ledger(cluster.directory / "ledger.sqlite", read_only=True)
    assert verify(ledger, run.run_id).problems == []
    rows = ledger.db.execute(
        "SELECT prompt_json, columns_json, functions FROM groups JOIN prompts USING (run_id, group_id) WHERE run_id = ? AND state = 'trained'",
        (run.run_id,),
    ).fetchall()
    ledger.close()
    assert len(rows) == 3 * 4
    for row in rows:
        assert [message["role"] for message in json.loads(row["prompt_json"])] == ["system", "user"]
        assert "####" in json.loads(row["columns_json"])["answer"]
        assert json.loads(row["functions"]) == ["accuracy", "format", "length"]
