"""The choice of the flash attention's kernels. test_policy.py tests attention's results, tests/gpu those on GPUs."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import attention as torch_attention
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.learner.batch.samples import SequenceLayout, SharedPrompt
from paceline.learner.model.attention import packed_attention, prefer_flash_attention_3, requires_packed

GPU = torch.device("cuda", 0)


def test_a_cpu_and_another_gpu_than_a_hopper_choose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert not prefer_flash_attention_3(torch.device("cpu"))
    assert not prefer_flash_attention_3(GPU)


def test_a_hopper_without_the_package_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with caplog.at_level("INFO"):
        assert not prefer_flash_attention_3(GPU)
    assert "attention runs with FlashAttention-2: " in caplog.text


def test_a_hopper_with_the_package_takes_it_once_and_leaves_it_for_deterministic_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[str | None] = [None]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", chosen.append)
    monkeypatch.setattr(torch_attention, "restore_flash_attention_impl", lambda: chosen.append(None))
    monkeypatch.setattr(torch_attention, "current_flash_attention_impl", lambda: chosen[-1])
    found = [prefer_flash_attention_3(GPU, deterministic=each) for each in (True, False, False, True, True, False)]
    assert found == [False, True, True, False, False, True]
    assert chosen == [None, "FA3", None, "FA3"]


def test_attention_that_would_cross_borders_is_refused() -> None:
    """Without the layout, with a mask of the model's own, and by a model that never calls it."""
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match="does not pass the layout"):
        packed_attention(torch.nn.Identity(), q, q, q, None)
    with pytest.raises(NotImplementedError, match="needs a mask that its model builds"):
        packed_attention(torch.nn.Identity(), q, q, q, q, layout=SequenceLayout.of([3], torch.device("cpu")))
    with (
        pytest.raises(NotImplementedError, match="attention of a LlamaForCausalLM cannot be replaced"),
        torch.device("meta"),
        requires_packed(LlamaForCausalLM(LlamaConfig(num_hidden_layers=0))),
    ):
        pass


def test_chunks_begin_with_a_shared_prompt() -> None:
    """A completion's first chunk goes on with the prompt's last one."""
    layout = SequenceLayout.of([4, 3, 2], torch.device("cpu"), [SharedPrompt(0, 4, (3, 2))])
    layer: Any = SimpleNamespace(
        config=SimpleNamespace(layer_types=["chunked_attention"], attention_chunk_size=3), layer_idx=0
    )
    q, k, v = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    out, _ = packed_attention(layer, q, k, v, None, layout=layout)
    for begin, length in ((4, 3), (7, 2)):
        row = [*range(4), *range(begin, begin + length)]
        position = torch.arange(len(row))
        seen = (position[:, None] >= position) & (position[:, None] // 3 == position // 3)
        scores = (q[:, :, row] @ k[:, :, row].transpose(2, 3) / 8**0.5).masked_fill(~seen, -torch.inf)
        expected = (scores.softmax(-1) @ v[:, :, row]).transpose(1, 2)
        torch.testing.assert_close(out[:, row], expected)
