"""Three ranks gather the weights of one, whatever the rows, the type and the bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gather_rank import Uneven
from ranks import run_ranks
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gathered")
    run_ranks("gather_rank.py", 3, out)
    return out


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
@pytest.mark.parametrize(("name", "dtype"), [("same", None), ("bf16", torch.bfloat16)])
def test_rank_0_has_every_tensor_whole(
    three_ranks: Path, name: str, dtype: torch.dtype | None, bucket_bytes: int
) -> None:
    gathered = load_file(three_ranks / f"{name}.{bucket_bytes}.safetensors")
    expected = Uneven().state_dict()
    assert gathered.keys() == expected.keys()
    for key, tensor in expected.items():
        wanted = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        assert gathered[key].dtype == wanted.dtype
        assert torch.equal(gathered[key], wanted), key
