"""A forward pass of many rows takes another kernel than one of few; both must give the logits of the plain model."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from tiny_models import tiny_qwen3

from paceline.rollout.native.kv_cache import SlotCache
from paceline.rollout.native.model import ONEDNN_ROWS, NativeModel


@pytest.mark.parametrize("rows", [2, ONEDNN_ROWS, 3 * ONEDNN_ROWS])
def test_logits_are_those_of_the_plain_model(rows: int) -> None:
    plain = tiny_qwen3(vocab_size=12, num_attention_heads=2, num_key_value_heads=1, head_dim=16).eval()
    model = NativeModel(deepcopy(plain), (0,), 16)
    ids_RT = torch.randint(12, (rows, 6))
    cache = SlotCache(rows)
    with torch.inference_mode():
        expected_RTV = plain(input_ids=ids_RT).logits
        cache.begin_prefill(slice(rows), 5)
        prefilled_RV = model.prefill(ids_RT[:, :5], torch.full((rows,), 5), cache)
        positions_R = torch.full((rows,), 5)
        cache.begin_decode(torch.arange(rows), positions_R, 6)
        decoded_RV = model.decode(ids_RT[:, 5], positions_R, cache)
    torch.testing.assert_close(prefilled_RV, expected_RTV[:, 4], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(decoded_RV, expected_RTV[:, 5], atol=1e-5, rtol=1e-5)


def test_a_cache_has_rows_for_the_sequences_that_came_and_keeps_them_as_it_grows() -> None:
    plain = tiny_qwen3(vocab_size=12, num_attention_heads=2, num_key_value_heads=1, head_dim=16).eval()
    model = NativeModel(deepcopy(plain), (0,), 100)
    ids_RT = torch.randint(12, (20, 80))
    cache = SlotCache(256)
    rows = []
    with torch.inference_mode():
        expected_RV = plain(input_ids=ids_RT).logits[:, -1]
        for first, end in ((0, 3), (3, 10), (10, 20)):
            cache.begin_prefill(slice(first, end), 79)
            model.prefill(ids_RT[first:end, :79], torch.full((end - first,), 79), cache)
            rows.append(cache.rows)
        cache.begin_decode(torch.arange(20), torch.full((20,), 79), 80)
        decoded_RV = model.decode(ids_RT[:, 79], torch.full((20,), 79), cache)
    assert rows == [8, 16, 32]
    torch.testing.assert_close(decoded_RV, expected_RV, atol=1e-5, rtol=1e-5)
