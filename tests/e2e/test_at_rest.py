"""A deployment with a storage key: it trains, loses its learner and goes on, is read and replayed with the key, and no file that it leaves
has a text or the tokens of one in the clear. Without the key each command and service says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result
from service_processes import environment
from transformers import AutoTokenizer
from watched_runs import RUN_TIMEOUT_S, finish, wait_for_step

from paceline.client import Client, state_name
from paceline.encryption.storage_key import FILE_VARIABLE, KEY_VARIABLE, StorageKey, storage_key
from paceline.services.cli.main import main
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec
from paceline.spec.reading import parse_spec
from paceline.v1 import common_pb2

pytestmark = pytest.mark.slow

PROMPT, SYSTEM = "planted é question", "planted \u00fc system prompt"
ANSWER, COLUMN = "planted answer", "planted column"
EXTRA = COLUMN.upper()
REWARD = """
import pathlib, itertools, time
scored = itertools.count(1)
GATE = pathlib.Path({gate!r})
def digits(completions, log_extra, note, **columns):
    while next(scored) > 12 and not GATE.exists():
        time.sleep(0.02)
    log_extra("why", [text.upper() for text in note])
    texts = [messages[-1]["content"] for messages in completions]
    return [sum(c.isdigit() for c in text) + len(text) / 100 for text in texts]
"""
LEAST_TOKENS = 6
"""Completions of fewer tokens may be anywhere by chance."""


class Trained(NamedTuple):
    """A run that has ended."""

    place: Path
    """Folder of the whole deployment."""
    run_id: str
    model: Path


def spec_of(mine: Path, model: Path, steps: int) -> RunSpec:
    """Return the spec of a run on the submitter's files, with as many planted texts as it has places for."""
    mine.mkdir(exist_ok=True)
    (mine / "reward.py").write_text(REWARD.format(gate=str(mine / "gate")))
    rows = [{"prompt": f"{PROMPT} {index}", "answer": ANSWER, "note": COLUMN} for index in range(40)]
    for name in ("train.jsonl", "validation.jsonl"):
        (mine / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return parse_spec(
        {
            "name": "sealed",
            "policy": {
                "model_name": str(model),
                "max_total_sequence_length": 120,
                "generation": {"max_new_tokens": 12},
            },
            "data": {"train": "train.jsonl", "validation": "validation.jsonl", "system_prompt": SYSTEM},
            "grpo": {
                "num_prompts_per_step": 4,
                "num_generations_per_prompt": 2,
                "max_num_steps": steps,
                "val_at_end": True,
            },
            "rewards": [{"function": "reward.py:digits"}],
            "checkpointing": {"save_period": 2, "keep_top_k": 10},
        },
        base=mine,
    )


def cluster_in(place: Path) -> LocalCluster:
    return LocalCluster(
        place / "runs",
        ClusterSection(rollout_workers=1, reward_workers=1, learner_ranks=1),
        options={"coordinator": ["--store", str(place / "store")]},
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder that everything of a deployment is in: directory, store, caches, spool, files for a moment."""
    place = tmp_path / "deployment"
    for variable in ("BUNDLE_CACHE", "DATA_CACHE", "MODEL_CACHE", "ANSWER_CACHE", "SPOOL"):
        monkeypatch.setenv(f"PACELINE_{variable}", str(place / "caches" / variable.lower()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "caches"))
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(place / "runs" / "token"))
    return place


def trained(place: Path, chat_model: Path) -> Trained:
    """Return a run whose learner was killed in the middle."""
    mine = place.parent / "mine"
    with cluster_in(place) as cluster, Client(cluster.address) as client:
        run = client.submit(spec_of(mine, chat_model, steps=6))
        wait_for_step(client, cluster, run.run_id, 3)
        assert cluster.kill("learner")
        (mine / "gate").touch()
        summary = finish(client, cluster, run.run_id)
    assert (summary["steps"], summary["learner_sessions"]) == (6, 2)
    return Trained(place, run.run_id, chat_model)


def command(run: Trained, *words: str) -> Result:
    """Run a command on the stopped deployment."""
    at_directory = ["--directory", str(run.place / "runs")]
    return CliRunner().invoke(main, [*words, *at_directory])


def samples(run: Trained) -> list[dict[str, Any]]:
    result = command(run, "samples", "show", run.run_id, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def wanted(run: Trained, groups: list[dict[str, Any]]) -> dict[str, list[bytes]]:
    """Return everything that may be nowhere, by what it is, in each form that a file could have it in."""
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    texts = {"prompt": PROMPT, "system prompt": SYSTEM, "answer": ANSWER, "column": COLUMN, "extra": EXTRA}
    found = {what: list(forms_of_text(text)) for what, text in texts.items()}
    found["prompt's tokens"] = list(forms_of_tokens(tokenizer(PROMPT)["input_ids"]))
    completions = [completion for group in groups for completion in group["completions"]]
    long = [c["token_ids"] for c in completions if len(c["token_ids"]) >= LEAST_TOKENS]
    assert long
    found["completions' tokens"] = [form for ids in long for form in forms_of_tokens(ids)]
    return found


def forms_of_text(text: str) -> Iterator[bytes]:
    yield from (text.encode(), text.encode("utf-16-le"), json.dumps(text)[1:-1].encode())
    yield yaml.safe_dump(text, width=1000).strip().strip('"').encode()


def forms_of_tokens(token_ids: list[int]) -> Iterator[bytes]:
    yield from (np.asarray(token_ids, kind).tobytes() for kind in ("<i4", "<i8"))


def leaks(place: Path, forms: dict[str, list[bytes]]) -> dict[str, set[str]]:
    """Return the files below a folder that have one of the forms, by what they have."""
    found: dict[str, set[str]] = {}
    number = 0
    for path in place.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content, number = path.read_bytes(), number + 1
            for what, each in forms.items():
                if any(form in content for form in each):
                    found.setdefault(what, set()).add(str(path.relative_to(place)))
    assert number > 20
    return found


def test_nothing_is_in_the_clear_and_everything_works_with_the_key(
    place: Path, chat_model: Path, given_key: StorageKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(place, chat_model)
    groups = samples(run)
    assert any(PROMPT in json.dumps(group, ensure_ascii=False) for group in groups)
    assert groups[0]["completions"][0]["extra"] == {"why": EXTRA}
    checked = command(run, "ledger", "verify", run.run_id, "--deep")
    assert checked.exit_code == 0, checked.output
    again = command(
        run,
        "replay",
        run.run_id,
        "--from",
        "4",
        "--output",
        str(place.parent / "replayed"),
        "--device",
        "cpu",
        "--json",
    )
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["identical"] is True
    assert leaks(place, wanted(run, groups)) == {}

    refused(run, given_key, monkeypatch)


def refused(run: Trained, key: StorageKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command and service with another key, or none, ends with the key's name and the remedy."""
    right = os.environ[KEY_VARIABLE]
    for wrong in (os.urandom(32).hex(), ""):
        monkeypatch.setenv(KEY_VARIABLE, wrong)
        for words in (("samples", "show", run.run_id), ("ledger", "verify", run.run_id), ("runs",)):
            result = command(run, *words)
            assert result.exit_code != 0, words
            assert key.name.hex() in result.output, result.output
            assert FILE_VARIABLE in result.output, result.output
        coordinator = subprocess.run(
            [
                sys.executable,
                "-m",
                "paceline.services.coordinator.main",
                "--directory",
                str(run.place / "runs"),
                "--port",
                "0",
            ],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment(),
        )
        assert coordinator.returncode == 1, coordinator.stderr
        assert key.name.hex() in coordinator.stderr.splitlines()[-1]
    monkeypatch.setenv(KEY_VARIABLE, right)


def test_a_learner_with_another_key_pauses_the_run(
    place: Path, chat_model: Path, given_key: StorageKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = place.parent / "mine"
    cluster = cluster_in(place)
    try:
        cluster.start_coordinator()
        monkeypatch.setenv(KEY_VARIABLE, os.urandom(32).hex())
        other = storage_key()
        assert other is not None
        cluster.start_workers()
        with Client(cluster.address) as client:
            run = client.submit(spec_of(mine, chat_model, steps=2))
            for event in client.watch(run.run_id, timeout_s=RUN_TIMEOUT_S):
                if event.kind == "state" and event.content["state"] == "paused":
                    break
            ended = client.get(run.run_id)
    finally:
        cluster.stop()
    assert state_name(ended) == "paused"
    names = f"the learner has the storage key {other.name.hex()}, but the coordinator has the storage key {given_key.name.hex()}"
    assert names in ended.message


def test_workers_need_no_library_of_the_ledger(
    place: Path, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images of workers have no `sqlcipher3`: all their roles start with the key, and a run trains to its end."""
    key_file = tmp_path / "storage.key"
    key_file.write_text(os.urandom(32).hex())
    monkeypatch.setenv(FILE_VARIABLE, str(key_file))
    without = tmp_path / "without"
    without.mkdir()
    (without / "sqlcipher3.py").write_text("raise ImportError('it is not in this image')\n")
    sizes = ClusterSection(rollout_workers=1, reward_workers=1, environment_workers=1, learner_ranks=1)
    cluster = LocalCluster(place / "runs", sizes)
    try:
        cluster.start_coordinator()
        path = os.environ.get("PYTHONPATH")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(without), *([path] if path else [])]))
        missing = subprocess.run([sys.executable, "-c", "import sqlcipher3"], capture_output=True, text=True)
        assert "it is not in this image" in missing.stderr
        cluster.start_workers()
        mine = place.parent / "mine"
        with Client(cluster.address) as client:
            run = client.submit(spec_of(mine, chat_model, steps=2))
            (mine / "gate").touch()
            assert finish(client, cluster, run.run_id)["steps"] == 2
            assert {each.role for each in client.members()} >= {
                common_pb2.ROLE_ROLLOUT,
                common_pb2.ROLE_REWARD,
                common_pb2.ROLE_ENVIRONMENT,
                common_pb2.ROLE_LEARNER,
            }
    finally:
        cluster.stop()


def test_without_a_key_the_search_finds_what_is_planted(place: Path, chat_model: Path) -> None:
    run = trained(place, chat_model)
    forms = wanted(run, samples(run))
    found = leaks(place, forms)
    assert found.keys() == forms.keys()
    assert any(path.endswith("spec.yaml") for path in found["system prompt"])
    assert any("bundle" in path for path in found["prompt"])
    assert any("tfevents" in path for path in found["prompt"])
    assert any(path.endswith("extra.jsonl") for path in found["extra"])
