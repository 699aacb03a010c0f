"""The delta channel's comparison on a GPU: it finds what the CPU finds, and what it costs the learner's thread."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mixed_model import Mixed, train

from paceline.learner.weights.device_snapshot import DeviceSnapshot
from paceline.weights.store.version_source import FoundChanges

pytestmark = pytest.mark.gpu
CHUNK_ELEMENTS = 20_000


def test_a_gpu_finds_the_same_changes(device: torch.device) -> None:
    on_cpu, on_gpu = Mixed(), Mixed().to(device)
    both = [DeviceSnapshot(model, torch.bfloat16, CHUNK_ELEMENTS) for model in (on_cpu, on_gpu)]
    assert both[1].fits() == (device.type == "cuda")
    for snapshot in both:
        snapshot.take()
    for step in range(2):
        train(on_cpu, step)
        on_gpu.load_state_dict(on_cpu.state_dict())
        expected, found = (snapshot.take() for snapshot in both)
        assert isinstance(expected, FoundChanges)
        assert isinstance(found, FoundChanges)
        assert expected.chunks.keys() == found.chunks.keys()
        for chunk, changed in expected.chunks.items():
            np.testing.assert_array_equal(found.chunks[chunk].positions_K, changed.positions_K)
            np.testing.assert_array_equal(found.chunks[chunk].changes.new_K, changed.changes.new_K)
            for one, other in zip(found.chunks[chunk].changes.ranks, changed.changes.ranks, strict=True):
                np.testing.assert_array_equal(one, other)
