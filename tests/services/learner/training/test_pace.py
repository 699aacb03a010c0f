"""The pace of a step, on CPUs and on a known GPU."""

from __future__ import annotations

import pytest
import torch

from paceline.services.learner.training.run_reports import pace

STEP = {"tokens": 3000.0, "step_s": 2.0, "teraflop": 1600.0}


def test_a_cpu_has_no_utilisation() -> None:
    assert pace(STEP, 4, torch.device("cpu")) == {"learner/tokens_per_s": 1500.0, "learner/teraflops": 200.0}


def test_a_model_whose_sizes_are_not_known_has_tokens_only() -> None:
    step = {"tokens": 3000.0, "step_s": 2.0}
    assert pace(step, 4, torch.device("cpu")) == {"learner/tokens_per_s": 1500.0}


@pytest.mark.parametrize(("name", "mfu"), [("NVIDIA H100 80GB HBM3", 200 / 989), ("unknown", None)])
def test_the_utilisation_is_that_of_one_gpu(name: str, mfu: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * 10**9)
    reached = pace(STEP, 4, torch.device("cuda", 0))
    assert reached["learner/peak_gpu_memory_gb"] == 5.0
    assert reached.get("learner/mfu") == (None if mfu is None else pytest.approx(mfu))
