"""An engine that decodes by the clock: every running sequence gains a token in each decode step, and a step costs the same time
whatever the batch, as on a GPU whose weights are read once a step. Lengths are log-normal and follow from the request's seed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.groups import Completion, Version, VersionSpan
from paceline.rollout.engine import GenerationRequest
from paceline.spec import RunSpec

DECODE_STEP_S = 0.02
"""Seconds of one decode step, whatever the batch."""
MEDIAN_TOKENS = 20
LONGEST = 20
"""The longest completion, in medians."""
SIGMA = 1.2
"""Standard deviation of the lengths' logarithm: of 160 completions about one reaches LONGEST."""


def length_of(seed: int) -> int:
    """Return the tokens of the completion of a seed: log-normal, cut at LONGEST medians."""
    drawn = MEDIAN_TOKENS * math.exp(SIGMA * np.random.default_rng(seed).standard_normal())
    return max(1, min(round(drawn), LONGEST * MEDIAN_TOKENS))


@dataclass
class _Sequence:
    request: GenerationRequest
    begin: int
    """Decode step at which it began."""
    done: asyncio.Future[Completion]
    tokens_before: int = 0
    """Tokens of its prefix."""
    versions: list[tuple[int, Version]] = field(default_factory=list)
    """First token of each version, and the version."""


class TimedEngine:
    """`paceline.rollout.engine.Engine` without a model."""

    def __init__(self, spec: RunSpec, *, device: str = "cpu", load_weights: bool = False):
        self.version: Version | None = Version(0, 0) if load_weights else None
        self.max_batch_size = spec.policy.generation.batch_size(on_gpu=False)
        self.capacity = self.max_batch_size
        self._running: dict[str, _Sequence] = {}
        self._began_s = time.monotonic()
        self._closed = asyncio.Event()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return 0

    async def ready(self) -> None:
        return

    async def watch(self) -> None:
        await self._closed.wait()

    async def generate(self, request: GenerationRequest) -> Completion:
        assert self.version is not None
        loop, now = asyncio.get_running_loop(), self._step()
        before = len(request.prefix.token_ids) if request.prefix is not None else 0
        sequence = _Sequence(request, now, loop.create_future(), before, [(before, self.version)])
        self._running[request.request_id] = sequence
        length = max(before + 1, min(length_of(request.seed), request.params.max_new_tokens))
        end_s = self._began_s + (now + length - before) * DECODE_STEP_S
        timer = loop.call_later(end_s - time.monotonic(), self._finish, sequence, length, "stop")
        try:
            return await sequence.done
        finally:
            timer.cancel()
            self._running.pop(request.request_id, None)

    def abort(self, request_id: str) -> None:
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._finish(sequence, self._tokens(sequence), "abort")

    async def update_weights(self, version: Version, weights: Mapping[str, Any]) -> float:
        self.version = version
        for sequence in self._running.values():
            sequence.versions.append((self._tokens(sequence), version))
        return 0.0

    async def close(self) -> None:
        for request_id in list(self._running):
            self.abort(request_id)
        self._closed.set()

    def _step(self) -> int:
        """Return the number of decode steps since the engine began."""
        return int((time.monotonic() - self._began_s) / DECODE_STEP_S)

    def _tokens(self, sequence: _Sequence) -> int:
        return sequence.tokens_before + self._step() - sequence.begin

    def _finish(self, sequence: _Sequence, tokens: int, reason: str) -> None:
        if sequence.done.done():
            return
        prefix = sequence.request.prefix
        spans = list(prefix.spans) if prefix is not None else []
        ends = [start for start, _ in sequence.versions[1:]] + [tokens]
        for (start, version), end in zip(sequence.versions, ends, strict=True):
            if min(end, tokens) > start:
                spans.append(VersionSpan(*version, start, min(end, tokens)))
        ids, logprobs = np.full(tokens, 2, np.int32), np.full(tokens, -1.0, np.float32)
        sequence.done.set_result(Completion(ids, logprobs, tuple(spans), reason))
