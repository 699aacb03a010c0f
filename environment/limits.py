"""Limits of an episode: its seconds, the tokens of an observation, and the room of a row.

The seconds of an episode are those in which its user code runs. Time in which it waits for the policy does not count: a loaded
or dead engine is no reason to cut an episode off.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

CHARS_PER_TOKEN = 64
"""Longer texts are cut before they are counted in tokens, because a tokenizer takes long for megabytes."""


class Stopwatch:
    """Seconds of user code, with a limit."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._used_s = 0.0
        self._since_s: float | None = None

    @property
    def used_s(self) -> float:
        running_s = 0.0 if self._since_s is None else self._clock() - self._since_s
        return self._used_s + running_s

    @property
    def left_s(self) -> float:
        """Return the seconds that are left, not below 0."""
        return max(0.0, self.limit_s - self.used_s)

    def start(self) -> None:
        if self._since_s is None:
            self._since_s = self._clock()

    def stop(self) -> None:
        if self._since_s is not None:
            self._used_s += self._clock() - self._since_s
            self._since_s = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()


def cut_to_tokens(text: str, max_tokens: int, tokenizer: Any) -> str:
    """Return a text with at most `max_tokens` tokens of its own; one that is cut off says so behind them."""
    if len(text.encode(errors="replace")) <= max_tokens:  # a token has at least one byte
        return text
    head = text[: max_tokens * CHARS_PER_TOKEN]
    encoded = tokenizer(head, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
    ids = encoded["input_ids"]
    if len(ids) <= max_tokens and len(head) == len(text):
        return text
    if tokenizer.is_fast:  # the text itself, up to the last character whose tokens are all kept
        offsets = [*encoded["offset_mapping"], (len(head), len(head))]
        kept = head[: min(offsets[min(len(ids), max_tokens)][0], max(end for _, end in offsets[:max_tokens]))]
    else:
        kept = tokenizer.decode(ids[:max_tokens], skip_special_tokens=False)
    return f"{kept}\n[cut off after {max_tokens} tokens]"
