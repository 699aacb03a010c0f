"""`paceline doctor SPEC` with a fake list of GPUs and a fake size of the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_shapes import HALF_BILLION, spec_of

from paceline.services.cli.doctor import examine_spec

GB = 10**9


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(HALF_BILLION))
    return str(tmp_path)


def found(model: str, gpus: list[int], free: int = 100 * GB, **sections: Any) -> dict[str, tuple[str, str, str]]:
    findings = examine_spec(spec_of(model, **sections), gpus, free)
    return {finding.name: (finding.status, finding.value, finding.remedy) for finding in findings}


def test_gpus_that_torch_does_not_see_are_a_fault(model: str) -> None:
    cluster = {"learner_gpus": [0], "rollout_gpus": [1], "rollout_workers": 1}
    status, value, _ = found(model, [], cluster=cluster)["its GPUs"]
    assert status == "fault"
    assert value.startswith(
        "the spec asks for GPU 0 (counted from 0; cluster.learner_gpus), but this host shows 0 GPUs"
    )
    status, value, _ = found(model, [80 * GB], cluster=cluster)["its GPUs"]
    assert (status, value[:62]) == ("fault", "the spec asks for GPU 1 (counted from 0; cluster.rollout_gpus)")
    assert found(model, [80 * GB] * 2, cluster=cluster)["its GPUs"][0] == "ok"


def test_a_host_that_is_too_small_is_named_with_both_figures(model: str) -> None:
    status, value, _ = found(model, [], 8 * GB)["its memory"]
    assert status == "absent"
    assert "8.0 GB are free here" in value
    assert "policy.activation_checkpointing=full" in value
    assert found(model, [])["its memory"][0] == "ok"


def test_a_gpu_that_is_too_small_is_named(model: str) -> None:
    cluster = {"learner_gpus": [0], "rollout_gpus": [0], "rollout_workers": 1}
    assert found(model, [80 * GB], cluster=cluster)["its memory"][0] == "ok"
    status, _, remedy = found(model, [8 * GB], cluster=cluster)["its memory"]
    assert status == "absent"
    assert remedy.startswith("GPU 0 has 8.0 GB, but its roles need ")


def test_a_model_that_is_not_here_is_not_estimated(tmp_path: Path) -> None:
    status, value, _ = found(str(tmp_path / "none"), [])["its memory"]
    assert status == "absent"
    assert "no config.json" in value
