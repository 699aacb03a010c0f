"""`benchmarks/gpu.py` measures the most valuable first, ends in time, goes on where it was cut short, and prints tables."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
CARD = {"gpu": "H100", "torch": "2.11.0", "python": "3.12"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.gpu")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.merge
def test_a_rehearsal_measures_every_kind_and_goes_on_where_it_was(tmp_path: Path, gpu: ModuleType) -> None:
    results = tmp_path / "results.json"
    ours, other = f"CPU, torch {torch.__version__}", "H100, torch 2.11.0"
    known = {"checkpoint tiny": {"error": "cut short"}, "swap native tiny": {"pause_s": 7.0}}
    before = {ours: {"machine": {}, "cases": known}, other: {"machine": CARD, "cases": {"head": {}}}}
    results.write_text(json.dumps(before))
    done = run("--device", "cpu", "--minutes", "5", "--results", str(results))
    assert done.returncode == 0, done.stdout + done.stderr
    after = json.loads(results.read_text())
    found = after[ours]["cases"]
    assert after[other] == before[other]
    assert found["swap native tiny"] == {"pause_s": 7.0}
    assert "swap native tiny …" not in done.stdout
    assert {case.name for case in gpu.cases("cpu")} == found.keys()
    assert done.stdout.index("profile tiny …") < done.stdout.index("checkpoint tiny …")
    assert found["tests"] == {"passed": 1, "skipped": 0, "failed": {}}
    assert found["checkpoint tiny"]["loss"] == found["checkpoint tiny"]["resumed_loss"]
    assert found["mismatch native"]["head as weights, learner bfloat16"]["max_abs"] < 1e-3
    assert f"{ours}:\n" in done.stdout


def test_a_case_that_fails_or_takes_too_long_ends_with_its_processes(
    tmp_path: Path, gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "PRELOADED", [])
    children = gpu.Children(tmp_path)
    assert children.call(60.0, dict, [("a", 1)]) == {"a": 1}
    failed = children.call(60.0, int, "x")
    assert failed is not None
    assert "ValueError" in failed["error"]
    # Its own process would write the file, if it lived on.
    late = tmp_path / "late"
    program = ["sh", "-c", f"echo begun; sleep 0.2; echo >{late}; sleep 60"]
    assert children.call(3.0, subprocess.run, program) is None
    assert late.exists()


class Fake:
    """Children that take `case_s` seconds for each case, by the clock that it replaces."""

    def __init__(self, gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, case_s: float) -> None:
        self.now_s, self.case_s = 1000.0, case_s
        self.asked: list[tuple[str, float]] = []
        monkeypatch.setattr(gpu, "Children", lambda *arguments: self)
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        self._machine = gpu.machine

    def call(self, limit_s: float, function: Any, *arguments: Any) -> dict[str, Any] | None:
        if function is self._machine:
            return CARD
        self.asked.append((arguments[0].name, limit_s))
        self.now_s += min(self.case_s, limit_s)
        return {"ran": True} if self.case_s <= limit_s else None


@pytest.mark.parametrize(
    ("seconds", "case_s", "recorded", "status"),
    [
        (600.0, 10.0, {"a": {"ran": True}, "b": {"ran": True}, "c": {"ran": True}}, True),
        (600.0, 90.0, {name: {"error": "not done after 50 s"} for name in "abc"}, False),
        (70.0, 30.0, {"a": {"ran": True}, "b": {"ran": True}}, False),  # no time to begin the third
        (80.0, 45.0, {"a": {"ran": True}}, False),  # the second is cut short, and measured anew next time
        (15.0, 1.0, {}, False),
    ],
)
def test_it_ends_within_its_time(
    seconds: float,
    case_s: float,
    recorded: dict[str, Any],
    status: bool,
    tmp_path: Path,
    gpu: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = Fake(gpu, monkeypatch, case_s)
    chosen = [gpu.Case(name, "tests", limit_s=50.0) for name in "abc"]
    results = gpu.Results(tmp_path / "results.json")
    assert gpu.measure(chosen, results, "cuda", False, fake.now_s + seconds) is status
    assert fake.now_s <= 1000.0 + seconds
    assert results.by_card["H100, torch 2.11.0"]["cases"] == recorded


def test_cases_are_chosen_by_name_or_by_their_first_words() -> None:
    listed = run("--list").stdout
    assert listed.startswith("tests ")
    for name in (
        "train 1.7B 8192 packed",
        "attention",
        "head",
        "profile 1.7B",
        "mismatch native",
        "swap native 8B",
    ):
        assert f"\n{name} " in listed
    refused = run("--device", "cpu", "--only", "trai")
    assert refused.returncode == 2
    assert "no case is named trai" in refused.stderr


def test_8b_is_offloaded_only_where_the_host_has_the_memory(
    tmp_path: Path, gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3Config

    from benchmarks.gpu_cases import training
    from benchmarks.gpu_cases.models import SHAPES

    def room(gib: int) -> Any:
        monkeypatch.setattr(training, "available_bytes", lambda: gib << 30)
        return replace(training.room_of(torch.device("cpu")), gpu_bytes=85_000_000_000)

    Qwen3Config(**SHAPES["8B"], dtype="bfloat16", architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(training.DoesNotFit, match=r"the host has 123\.7 GB for an estimated 131"):
        training.fitting(tmp_path, 4096, {}, room(128))
    spec, _ = training.fitting(tmp_path, 4096, {}, room(256))
    assert spec.policy.cpu_offload


@pytest.mark.parametrize(("tokens", "seed"), [(tokens, seed) for tokens in (64, 128, 8192) for seed in range(4)])
def test_mixed_lengths_fill_a_row(tokens: int, seed: int, gpu: ModuleType) -> None:
    from benchmarks.gpu_cases.training import mixed_lengths

    lengths = mixed_lengths(tokens, seed)
    assert sum(lengths) == tokens
    assert min(lengths) >= 4
    assert lengths != mixed_lengths(tokens, seed + 1)


def test_results_become_tables(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    row = {
        "settings": {"activation_checkpointing": "full", "state_dtype": "float32", "cpu_offload": False},
        "step_s": 0.5,
        "tokens_per_s": 16384,
        "teraflops": 300.0,
        "mfu": 0.303,
        "predicted_bytes": 50e9,
        "measured_bytes": 48e9,
        "ratio": 50 / 48,
    }
    known = {
        "train 8B 4096": {"does_not_fit": "too large"},
        "train 1.7B 8192 packed": row,
        "save 1.7B": {"save_s": 0.123456},
    }
    results.write_text(json.dumps({"H100, torch 2.11.0": {"machine": CARD, "cases": known}}))
    lines = run("--table", "--results", str(results)).stdout.splitlines()
    assert "H100, torch 2.11.0:" in lines
    assert "| 8B | 4096 |  | too large | | | | | | |" in lines
    assert (
        "| 1.7B | 8192 | packed, activation_checkpointing full | 0.500 s | 16,384 | 300.0 | 0.30 | 50.0 GB | 48.0 GB | 1.04 |"
        in lines
    )
    assert 'save 1.7B: `{"save_s": 0.1235}`' in lines
