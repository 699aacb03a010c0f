"""Keys, values and next-token logits of prompts that were computed lately, under the current version of the weights.

So requests with equal tokens, as the completions of one group, share one prefill pass also when they join the batch at
different times. Everything is forgotten when the weights change, so no entry is from another version.

Axis suffixes: H key-value heads, T tokens of a prompt, D head size, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

MAX_BYTES = 1 << 28
"""Bytes of all entries together; the least recently used go first."""


@dataclass(frozen=True)
class PromptState:
    """What a prefill pass has computed for one prompt."""

    layers_HTD: tuple[tuple[int, Tensor, Tensor], ...]
    """Index, keys and values of each layer."""
    logits_V: Tensor
    """Logits of the token that follows the prompt."""

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors."""
        tensors = [self.logits_V, *(tensor for _, *pair in self.layers_HTD for tensor in pair)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class PromptCache:
    """Entries by the bytes of a prompt's token ids, within `max_bytes`; 0 keeps none."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[bytes, PromptState] = OrderedDict()
        self._num_bytes = 0

    def get(self, prompt: bytes) -> PromptState | None:
        """Return the entry of a prompt, which counts as used now."""
        if prompt in self._entries:
            self._entries.move_to_end(prompt)
        return self._entries.get(prompt)

    def put(self, prompt: bytes, state: PromptState) -> None:
        """Keep an entry; one that is larger than all room is not kept."""
        size = state.num_bytes
        if size > self.max_bytes or prompt in self._entries:
            return
        self._entries[prompt] = state
        self._num_bytes += size
        while self._num_bytes > self.max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def clear(self) -> None:
        """Forget all entries, because the weights are others."""
        self._entries.clear()
        self._num_bytes = 0
