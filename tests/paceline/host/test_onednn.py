"""The product must be the plain one, contiguous or not, and it must be chosen for float32 on a CPU alone."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from paceline.host.onednn import is_faster, product

CPU = torch.device("cpu")

NEW_SHAPES = """
import psutil, torch
from paceline.host.onednn import bound_caches, product
bound_caches()
torch.set_num_threads(1)
weight = torch.ones(64, 64)
for rows in range(1, 351):
    product(torch.ones(rows, 64), weight)
    if rows == 200:
        before = psutil.Process().memory_info().rss
print(psutil.Process().memory_info().rss - before)
"""
"""Prints how many bytes 150 further shapes have cost."""


@pytest.mark.parametrize("rows", [1, 32, 300])
@pytest.mark.parametrize("transposed", [False, True])
def test_product_is_x_times_w_transposed(rows: int, transposed: bool) -> None:
    if not is_faster(CPU, torch.float32):
        pytest.skip("oneDNN is not used on this machine")
    random = np.random.default_rng(0)
    x, weight = random.standard_normal((rows, 24)), random.standard_normal((40, 24))
    tensor = torch.from_numpy(x.T.astype(np.float32).copy()).T if transposed else torch.from_numpy(x).float()
    out = product(tensor, torch.from_numpy(weight).float())
    np.testing.assert_allclose(out.numpy(), x @ weight.T, atol=2e-5)


def test_other_types_and_devices_keep_their_own_kernels() -> None:
    assert not is_faster(CPU, torch.bfloat16)
    assert not is_faster(torch.device("cuda"), torch.float32)


def test_new_shapes_stop_costing_memory() -> None:
    if not is_faster(CPU, torch.float32):
        pytest.skip("oneDNN is not used on this machine")
    grown = subprocess.run([sys.executable, "-c", NEW_SHAPES], capture_output=True, text=True, check=True)
    assert int(grown.stdout) < 40e6  # 90 MB without the bound
