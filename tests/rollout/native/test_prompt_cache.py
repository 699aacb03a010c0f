"""Computed prompts: the least recently used are dropped first, and no entry exceeds the cache."""

from __future__ import annotations

import torch

from paceline.rollout.native.batch import PromptCache, PromptState
from paceline.rollout.native.kv_cache import StoreKey


def state(num_tokens: int) -> PromptState:
    """An entry of 8 bytes for each token and 4 for its logit."""
    keys, values = torch.zeros(1, num_tokens, 1), torch.zeros(1, num_tokens, 1)
    return PromptState({StoreKey("keys", 0): keys, StoreKey("values", 0): values}, torch.zeros(1))


def test_the_size_counts_keys_values_and_logits() -> None:
    assert state(10).num_bytes == 84


def test_the_least_recently_used_goes_first() -> None:
    cache = PromptCache(3 * state(10).num_bytes)
    for name in (b"a", b"b", b"c"):
        cache.put(name, state(10))
    assert cache.get(b"a") is not None
    cache.put(b"d", state(10))
    assert [name for name in (b"a", b"b", b"c", b"d") if cache.get(name) is None] == [b"b"]


def test_an_entry_without_room_is_not_kept_and_drives_none_out() -> None:
    cache = PromptCache(state(10).num_bytes)
    cache.put(b"a", state(10))
    cache.put(b"large", state(11))
    assert cache.get(b"large") is None
    assert cache.get(b"a") is not None


def test_room_is_given_back() -> None:
    cache = PromptCache(state(10).num_bytes)
    cache.put(b"a", state(10))
    cache.clear()
    assert cache.get(b"a") is None
    cache.put(b"b", state(10))
    assert cache.get(b"b") is not None
