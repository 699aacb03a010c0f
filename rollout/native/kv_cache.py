"""The cache of a batch whose sequences have different lengths: keys and values, and the states of other layers.

A transformers `Cache` over slots: new keys and values are written in place at each slot's position, so a decode step
copies no earlier keys or values, and attention reads a view. Layers with a convolution or a recurrence keep states of a
fixed size for each slot, which a decode step also updates in place. Promise: slots [0, n) are in use, and each of them
attends only to its first `length` positions. Axis suffixes: S slots, R slots in use, H key-value heads, C capacity, T
new tokens, D head size, W width of a convolution.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from paceline.models.memory_estimate import cache_rows

BLOCK_TOKENS = 64


class AttentionLimit(NamedTuple):
    """The tokens that a token attends to: the last `num_tokens` tokens including itself or, with `in_chunks`, the
    tokens up to itself in its chunk of `num_tokens`."""

    num_tokens: int
    in_chunks: bool = False


class StoreKey(NamedTuple):
    """The purpose of a tensor of the cache."""

    kind: str
    """`keys`, `values`, or the kind of a state: `conv`, `recurrent`."""
    layer: int
    state: int = 0
    """Index among the layer's states of this kind."""


class SlotCache(Cache):
    """Keys and values of up to `num_slots` sequences, per layer [S, H, C, D], right-padded, allocated as they are used;
    and states, per layer [S, ...]. Call one of two methods before each forward pass: `begin_prefill` (sequences from
    their first token on, causal, no mask needed; of equal lengths if there are states) or `begin_decode` (one token for
    each of the first slots, with `decode_mask`)."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.rows = 0
        self.capacity = 0
        self._tokens_SHCD: dict[StoreKey, Tensor] = {}
        self._states: dict[StoreKey, Tensor] = {}
        self._rows: slice | Tensor = slice(0)
        self._source_R: Tensor | None = None
        self._rows_R: Tensor | None = None
        self._positions_R: Tensor | None = None
        self._kv_length = 0

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Make room for `num_rows` sequences of `num_tokens`. The room of all sequences grows by half, so that each
        token is copied about once; the number of rows is `cache_rows`."""
        if num_rows <= self.rows and num_tokens <= self.capacity:
            return
        if num_rows > self.rows:
            self.rows = cache_rows(num_rows, self.num_slots)
        if num_tokens > self.capacity:
            num_positions = max(num_tokens, self.capacity * 3 // 2)
            self.capacity = -(-num_positions // BLOCK_TOKENS) * BLOCK_TOKENS
        for key, old_SHCD in self._tokens_SHCD.items():
            new_SHCD = self._allocate(old_SHCD)
            new_SHCD[: old_SHCD.shape[0], :, : old_SHCD.shape[2]] = old_SHCD
            self._tokens_SHCD[key] = new_SHCD
        for key, old in self._states.items():
            self._states[key] = old.new_zeros(self.rows, *old.shape[1:])
            self._states[key][: old.shape[0]] = old

    def begin_prefill(self, rows: slice | Tensor, num_tokens: int, source_R: Tensor | None = None) -> None:
        """Prepare a pass over the first `num_tokens` positions of `rows`: a range of slots, or indices of slots that
        the cache already has. If rows share a prompt, `source_R` gives the row of the pass for each row of the cache;
        None: the same row."""
        self.reserve(rows.stop if isinstance(rows, slice) else 0, num_tokens)
        self._rows, self._source_R = rows, source_R
        self._positions_R = None

    def begin_decode(self, rows_R: Tensor, positions_R: Tensor, kv_length: int) -> None:
        """Prepare a pass that adds one token to each of `rows_R` = 0 … R-1, at `positions_R`, all below `kv_length`."""
        self.reserve(len(rows_R), kv_length)
        self._rows, self._source_R = slice(len(rows_R)), None
        self._rows_R, self._positions_R, self._kv_length = rows_R, positions_R, kv_length

    def decode_mask(self, dtype: torch.dtype, limit: AttentionLimit | None = None) -> Tensor:
        """Return [R, 1, 1, kv_length], to add to attention scores: 0 at the positions up to the row's position that are
        within `limit` (None: at all of them), else the type's lowest number."""
        if self._positions_R is None:
            raise RuntimeError("decode_mask() was called outside a decode pass")
        positions_R1 = self._positions_R[:, None]
        index_C = torch.arange(self._kv_length, device=positions_R1.device)
        beyond_RC = index_C > positions_R1
        if limit is not None:
            size = limit.num_tokens
            first_R1 = positions_R1 // size * size if limit.in_chunks else positions_R1 - size + 1
            beyond_RC |= index_C < first_R1
        mask_RC = torch.zeros(beyond_RC.shape, dtype=dtype, device=beyond_RC.device)
        return mask_RC.masked_fill_(beyond_RC, torch.finfo(dtype).min)[:, None, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [R, H, T, D] keys and values of one layer (which may differ in H and D), and return the keys and values
        to attend to."""
        keys_SHCD = self._store_SHCD(StoreKey("keys", layer_idx), key_states)
        values_SHCD = self._store_SHCD(StoreKey("values", layer_idx), value_states)
        if self._positions_R is None:
            num_tokens = key_states.shape[2]
            keys_SHCD[self._rows, :, :num_tokens] = self._spread(key_states)
            values_SHCD[self._rows, :, :num_tokens] = self._spread(value_states)
            return key_states, value_states
        keys_SHCD[self._rows_R, :, self._positions_R] = key_states[:, :, 0]
        values_SHCD[self._rows_R, :, self._positions_R] = value_states[:, :, 0]
        used = self._rows, slice(None), slice(self._kv_length)
        return keys_SHCD[used], values_SHCD[used]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a decode pass's [R, ..., W] last inputs of a convolution, a view to update in place; None in a prefill."""
        return self._state(StoreKey("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a decode pass's [R, ...] states of a recurrence, a view to update in place; None in a prefill."""
        return self._state(StoreKey("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last W of a convolution's [R, ..., T] inputs; return all inputs, preceded by the earlier inputs or
        zeros."""
        before = self.get_conv_state(layer_idx, state_idx)
        width = conv_kernel_size or conv_states.shape[-1]
        if before is not None:
            conv_states = torch.cat((before, conv_states), -1)
        elif conv_states.shape[-1] < width:
            conv_states = torch.nn.functional.pad(conv_states, (width - conv_states.shape[-1], 0))
        self._keep_state(StoreKey("conv", layer_idx, state_idx), conv_states[..., -width:])
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep the [R, ...] states of a recurrence, and return them."""
        self._keep_state(StoreKey("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether this is a decode pass."""
        return self._positions_R is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: the engine never takes a token back."""
        return False

    def read_row(self, row: int, num_tokens: int) -> dict[StoreKey, Tensor]:
        """Return copies of the keys and values [H, T, D] of a row's first `num_tokens` positions, and of its states."""
        tokens = {key: each_SHCD[row, :, :num_tokens].clone() for key, each_SHCD in self._tokens_SHCD.items()}
        return tokens | {key: each[row].clone() for key, each in self._states.items()}

    def write_rows(self, rows: slice, num_tokens: int, stored: dict[StoreKey, Tensor]) -> None:
        """Write the result of `read_row` to each of the `rows`."""
        self.reserve(rows.stop, num_tokens)
        for key, tensor in stored.items():
            if key in self._states:
                self._states[key][rows] = tensor
            else:
                self._tokens_SHCD[key][rows, :, :num_tokens] = tensor

    def move_rows(self, source_R: Tensor, target_R: Tensor, num_tokens: int) -> None:
        """Copy the first `num_tokens` positions and the states of rows `source_R` over rows `target_R`."""
        for each_SHCD in self._tokens_SHCD.values():
            view_SHCD = each_SHCD[:, :, :num_tokens]
            view_SHCD[target_R] = view_SHCD[source_R]
        for each in self._states.values():
            each[target_R] = each[source_R]

    def wipe(self, first_row: int) -> None:
        """Zero the rows from `first_row` on, because masked values take part in sums, and would spread a NaN."""
        for each in (*self._tokens_SHCD.values(), *self._states.values()):
            each[first_row:] = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: a prefill starts from an empty cache, and a decode pass has its mask and positions."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (keys, offset) for transformers' mask code; only a prefill calls it."""
        return query_length, 0

    def _state(self, key: StoreKey) -> Tensor | None:
        return None if self._positions_R is None else self._states[key][self._rows]

    def _keep_state(self, key: StoreKey, states: Tensor) -> None:
        if key not in self._states:
            self._states[key] = states.new_zeros(self.rows, *states.shape[1:])
        self._states[key][self._rows] = self._spread(states)

    def _spread(self, states: Tensor) -> Tensor:
        return states if self._source_R is None else states[self._source_R]

    def _store_SHCD(self, key: StoreKey, like_RHTD: Tensor) -> Tensor:
        if key not in self._tokens_SHCD:
            self._tokens_SHCD[key] = self._allocate(like_RHTD)
        return self._tokens_SHCD[key]

    def _allocate(self, like_RHTD: Tensor) -> Tensor:
        # Zeros, not empty memory: attention multiplies masked values by 0, and 0 times a NaN is a NaN.
        _, num_heads, _, head_size = like_RHTD.shape
        return like_RHTD.new_zeros(self.rows, num_heads, self.capacity, head_size)
