"""The key-value cache of a batch whose sequences have different lengths.

A transformers `Cache` over slots: new keys and values are written in place at each slot's position, so a decode
step copies no earlier keys or values, and attention reads a view. Promise: slots [0, n) are the running ones, and each
attends to its first `length` positions only. Axis suffixes: S slots, R slots in use, H key-value heads, C capacity, T
new tokens, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from paceline.models.memory_estimate import cache_rows

BLOCK_TOKENS = 64


class SlotCache(Cache):
    """Keys and values of up to `num_slots` sequences, per layer [S, H, C, D]; right-padded, allocated as they are used.
    Call one of two methods before each forward pass: `begin_prefill` (sequences from their first token on, causal,
    no mask needed) or `begin_decode` (one token for each of the first slots, with `decode_mask`)."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.rows = 0
        self.capacity = 0
        self._keys_SHCD: dict[int, Tensor] = {}
        self._values_SHCD: dict[int, Tensor] = {}
        self._first_row = 0
        self._num_rows = 0
        self._source_R: Tensor | None = None
        self._rows_R: Tensor | None = None
        self._positions_R: Tensor | None = None
        self._kv_length = 0

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Make room for `num_rows` sequences of `num_tokens`. Sequences grow by half, so that each token is copied about
        once; the number of rows is `cache_rows`."""
        if num_rows <= self.rows and num_tokens <= self.capacity:
            return
        if num_rows > self.rows:
            self.rows = cache_rows(num_rows, self.num_slots)
        if num_tokens > self.capacity:
            num_positions = max(num_tokens, self.capacity * 3 // 2)
            self.capacity = -(-num_positions // BLOCK_TOKENS) * BLOCK_TOKENS
        for store_SHCD in (self._keys_SHCD, self._values_SHCD):
            for layer, old_SHCD in store_SHCD.items():
                new_SHCD = self._allocate(old_SHCD)
                new_SHCD[: old_SHCD.shape[0], :, : old_SHCD.shape[2]] = old_SHCD
                store_SHCD[layer] = new_SHCD

    def begin_prefill(self, first_row: int, num_rows: int, num_tokens: int, source_R: Tensor | None) -> None:
        """Prepare a pass over the first `num_tokens` positions of rows [first_row, first_row + num_rows). If rows share
        a prompt, `source_R` gives the row of the pass for each row of the cache; None: the same row."""
        self.reserve(first_row + num_rows, num_tokens)
        self._first_row, self._num_rows, self._source_R = first_row, num_rows, source_R
        self._positions_R = None

    def begin_decode(self, rows_R: Tensor, positions_R: Tensor, kv_length: int) -> None:
        """Prepare a pass that adds one token to each of `rows_R` = 0 … R-1, at `positions_R`, all below `kv_length`."""
        self.reserve(len(rows_R), kv_length)
        self._num_rows = len(rows_R)
        self._rows_R, self._positions_R, self._kv_length = rows_R, positions_R, kv_length

    def decode_mask(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """Return [R, 1, 1, kv_length], to add to attention scores: 0 at the last `window` positions up to the row's
        position (None: at all positions up to it), else the type's lowest number."""
        if self._positions_R is None:
            raise RuntimeError("decode_mask() was called outside a decode pass")
        positions_R = self._positions_R
        index_C = torch.arange(self._kv_length, device=positions_R.device)
        beyond_RC = index_C > positions_R[:, None]
        if window is not None:
            beyond_RC |= index_C <= positions_R[:, None] - window
        mask_RC = torch.zeros(beyond_RC.shape, dtype=dtype, device=positions_R.device)
        return mask_RC.masked_fill_(beyond_RC, torch.finfo(dtype).min)[:, None, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [R, H, T, D] keys and values of one layer, and return the keys and values to attend to."""
        if layer_idx not in self._keys_SHCD:
            self._keys_SHCD[layer_idx] = self._allocate(key_states)
            self._values_SHCD[layer_idx] = self._allocate(value_states)
        keys_SHCD, values_SHCD = self._keys_SHCD[layer_idx], self._values_SHCD[layer_idx]
        if self._positions_R is None:
            rows = slice(self._first_row, self._first_row + self._num_rows)
            num_tokens = key_states.shape[2]
            keys_SHCD[rows, :, :num_tokens] = self._spread(key_states)
            values_SHCD[rows, :, :num_tokens] = self._spread(value_states)
            return key_states, value_states
        keys_SHCD[self._rows_R, :, self._positions_R] = key_states[:, :, 0]
        values_SHCD[self._rows_R, :, self._positions_R] = value_states[:, :, 0]
        used = slice(self._num_rows), slice(None), slice(self._kv_length)
        return keys_SHCD[used], values_SHCD[used]

    def read_row(self, row: int, num_tokens: int) -> tuple[tuple[int, Tensor, Tensor], ...]:
        """Return each layer's index, and copies [H, T, D] of the keys and values of a row's first `num_tokens` positions."""
        at = row, slice(None), slice(num_tokens)
        return tuple(
            (layer, keys_SHCD[at].clone(), self._values_SHCD[layer][at].clone())
            for layer, keys_SHCD in self._keys_SHCD.items()
        )

    def write_rows(self, first_row: int, end_row: int, layers_HTD: tuple[tuple[int, Tensor, Tensor], ...]) -> None:
        """Write the result of `read_row` to each of the rows [first_row, end_row)."""
        for layer, keys_HTD, values_HTD in layers_HTD:
            num_tokens = keys_HTD.shape[1]
            self.reserve(end_row, num_tokens)
            self._keys_SHCD[layer][first_row:end_row, :, :num_tokens] = keys_HTD
            self._values_SHCD[layer][first_row:end_row, :, :num_tokens] = values_HTD

    def move_rows(self, source_R: Tensor, target_R: Tensor, num_tokens: int) -> None:
        """Copy the first `num_tokens` positions of rows `source_R` over rows `target_R`."""
        for store_SHCD in (self._keys_SHCD, self._values_SHCD):
            for layer_SHCD in store_SHCD.values():
                view_SHCD = layer_SHCD[:, :, :num_tokens]
                view_SHCD[target_R] = view_SHCD[source_R]

    def wipe(self, first_row: int) -> None:
        """Zero the rows from `first_row` on, because masked values take part in sums, and would spread a NaN."""
        for store_SHCD in (self._keys_SHCD, self._values_SHCD):
            for layer_SHCD in store_SHCD.values():
                layer_SHCD[first_row:] = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: a prefill starts from an empty cache, and a decode pass has its mask and positions."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (keys, offset) for transformers' mask code; only a prefill calls it."""
        return query_length, 0

    def _spread(self, states_RHTD: Tensor) -> Tensor:
        return states_RHTD if self._source_R is None else states_RHTD[self._source_R]

    def _allocate(self, like_RHTD: Tensor) -> Tensor:
        # Zeros, not empty memory: attention multiplies masked values by 0, and 0 times a NaN is a NaN.
        _, num_heads, _, head_size = like_RHTD.shape
        return like_RHTD.new_zeros(self.rows, num_heads, self.capacity, head_size)
