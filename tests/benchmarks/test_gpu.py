"""`benchmarks/gpu.py` measures each case once, goes on where it was cut short, and prints tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_run_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    first = run("--device", "cpu", "--only", "checkpoint", "--results", str(results))
    assert first.returncode == 0, first.stderr
    measured = json.loads(results.read_text())["checkpoint tiny"]
    assert measured["loss"] == measured["resumed_loss"]
    assert measured["bytes"] > 1_000_000
    known = json.loads(results.read_text()) | {"publish tiny": {"error": "cut short"}}
    results.write_text(json.dumps(known))
    second = run("--device", "cpu", "--only", "checkpoint", "--only", "publish", "--results", str(results))
    assert second.returncode == 0, second.stderr
    assert "checkpoint tiny …" not in second.stdout
    assert "publish tiny …" in second.stdout
    after = json.loads(results.read_text())
    assert after["checkpoint tiny"] == measured
    assert after["publish tiny"]["gather_s"] > 0


def test_the_pause_of_a_swap_is_compared_with_a_copy(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = run("--device", "cpu", "--only", "swap", "--results", str(results))
    assert done.returncode == 0, done.stderr
    swap = json.loads(results.read_text())["swap native tiny"]
    assert swap["bytes"] > 100_000
    assert swap["pause_s"] > 0
    assert swap["limit_s"] > 0.05
    assert swap["bus_gigabytes_per_s"] > 0


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
        "train 1.7B 4096": row,
        "publish 1.7B": {"bytes": 1},
    }
    results.write_text(json.dumps(known))
    lines = run("--table", "--results", str(results)).stdout.splitlines()
    assert "| 8B | 4096 | too large | | | | | | | |" in lines
    assert (
        "| 1.7B | 4096 | activation_checkpointing full | 0.500 s | 16,384 | 300.0 | 0.30 | 50.0 GB | 48.0 GB | 1.04 |"
        in lines
    )
    assert 'publish 1.7B: `{"bytes": 1}`' in lines


def test_a_case_that_fails_is_said_and_measured_again(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    known = {"checkpoint tiny": {"error": "exit status 1"}, "machine": {}}
    results.write_text(json.dumps(known))
    assert run("--device", "cpu", "--only", "checkpoint", "--results", str(results)).returncode == 0
    assert "error" not in json.loads(results.read_text())["checkpoint tiny"]


def test_a_case_ends_without_the_interpreters_finalisation() -> None:
    """Threads of weight links take the interpreter's lock when they drop tensors; one that meets the finalisation aborts the
    process ("terminate called without an active exception"), on a busy machine only."""
    program = """
import atexit, sys
from benchmarks import gpu
gpu.run_case = lambda *arguments: {"ran": True}
atexit.register(print, "finalised")
sys.argv = ["gpu.py", "--case", '["publish", {}, "cpu", "."]']
gpu.main()
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, '{"ran": true}\n'), ended.stderr
