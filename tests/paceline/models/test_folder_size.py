"""The size of a model's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.models.loading import named_size, weights_bytes


@pytest.mark.parametrize(("size_bytes", "text"), [(990_000_000, "0.99 GB"), (1_200_000, "1.2 MB")])
def test_a_folder_has_the_size_of_its_weights(tmp_path: Path, size_bytes: int, text: str) -> None:
    for part in ("1", "2"):
        with (tmp_path / f"model-{part}.safetensors").open("wb") as file:
            file.truncate(size_bytes // 2)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert weights_bytes(str(tmp_path)) == size_bytes
    assert named_size(str(tmp_path)) == f"{tmp_path} ({text})"


@pytest.mark.parametrize("name", ["org/name", "s3://bucket/model", "/no/such/folder", "\0"])
def test_a_model_that_is_not_here_has_its_name_alone(name: str) -> None:
    assert named_size(name) == name
