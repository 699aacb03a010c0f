"""The device of a learner's rank."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import Unavailable
from paceline.services.learner.rank_group import set_up_device


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU here")
def test_a_gpu_that_cannot_be_used_is_said_and_none_that_idles_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Unavailable, match=r"--device is cuda, but torch .* finds no GPU that it can use"):
        set_up_device("cuda", "127.0.0.1")
    monkeypatch.setattr("paceline.services.common.gpus.visible_gpus", lambda: ("0", "1"))
    assert set_up_device("cpu", "127.0.0.1").type == "cpu"
    assert not caplog.records, "that was asked for"
    assert set_up_device("auto", "127.0.0.1").type == "cpu"
    assert "this learner computes on CPUs although the host shows 2 GPUs" in caplog.text


def test_a_rank_beyond_the_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(
        Unavailable, match=r"rank 2 \(counted from 0\) of the learner needs a GPU for itself, but torch finds only 2"
    ):
        set_up_device("cuda", "127.0.0.1")
