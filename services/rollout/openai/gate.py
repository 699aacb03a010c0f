"""Limit on external requests to the engine: a few sequences at a time, a bounded queue, and an error beyond it.

Training comes first: leases enter the engine as they come, external requests through this gate.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from paceline.errors import Busy

SHARE = 8
"""External requests get one in so many of the engine's places (at least one)."""

QUEUE = 16
"""Sequences that may run or wait, in multiples of the places."""


class Gate:
    """Places for external sequences in an engine that decodes `batch_size` at a time."""

    def __init__(self, batch_size: int, share: int = SHARE, queue: int = QUEUE) -> None:
        self.places = max(1, batch_size // share)
        self.capacity = queue * self.places
        self._taken = 0
        self._free = asyncio.Semaphore(self.places)

    @contextlib.contextmanager
    def admitted(self, num_sequences: int) -> Iterator[None]:
        """Reserve room for a request's sequences in the queue. Raises Busy when there is none now."""
        if self._taken + num_sequences > self.capacity:
            raise Busy(
                f"{self._taken} sequences are under way or wait, at most {self.capacity} may; this request has "
                f"{num_sequences}. Try again later, or ask another worker"
            )
        self._taken += num_sequences
        try:
            yield
        finally:
            self._taken -= num_sequences

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold one sequence's place in the engine, in the order of asking."""
        async with self._free:
            yield
