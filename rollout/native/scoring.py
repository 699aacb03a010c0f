"""Scoring of given texts by the native engine: the ones that wait, padded into one forward pass at a time.

Promise: a text's log-probabilities are those that it would get alone, and a text whose numbers are not finite fails alone.

Axis suffixes: R texts of a pass, T tokens of the longest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.errors import InvalidInput, Unavailable
from paceline.groups import IntArray, Version
from paceline.rollout.engine import PromptLogprobs
from paceline.rollout.native.model import NativeModel

PASS_TOKENS = 8192
"""Padded tokens of one pass, which bound its activations. A single longer text is computed whole."""


@dataclass(eq=False)
class Scoring:
    """A text that waits for its log-probabilities."""

    token_ids: IntArray
    """[P]"""
    answer: asyncio.Future[PromptLogprobs]


def score_next(
    waiting: deque[Scoring], model: NativeModel, version: Version
) -> list[tuple[asyncio.Future[Any], Any]]:
    """Take the oldest texts that fit one pass from `waiting`, and return what each of them is answered. One thread calls it."""
    taken: list[Scoring] = []
    longest = 0
    while waiting and (
        not taken or max(longest, len(waiting[0].token_ids)) * (len(taken) + 1) <= PASS_TOKENS
    ):
        one = waiting.popleft()
        if not one.answer.done():  # a caller that has gone cancels its future
            taken.append(one)
            longest = max(longest, len(one.token_ids))
    if not taken:
        return []
    ids_RT = np.zeros((len(taken), longest), np.int64)
    lengths_R = np.array([len(one.token_ids) for one in taken])
    for row, one in zip(ids_RT, taken, strict=True):
        row[: len(one.token_ids)] = one.token_ids
    device = model.device
    try:
        scored = model.score(torch.from_numpy(ids_RT).to(device), torch.from_numpy(lengths_R).to(device))
    except InvalidInput as error:
        return [(one.answer, error) for one in taken]
    logprobs_RT, top_ids_RT, tops_RT = (tensor.cpu().numpy() for tensor in scored)
    return [
        (
            one.answer,
            _answer(logprobs_RT[row, :length], top_ids_RT[row, :length], tops_RT[row, :length], version),
        )
        for row, (one, length) in enumerate(zip(taken, lengths_R.tolist(), strict=True))
    ]


def _answer(logprobs_T: Any, top_ids_T: Any, tops_T: Any, version: Version) -> PromptLogprobs | Unavailable:
    if not np.isfinite(logprobs_T[1:]).all():
        return Unavailable(
            f"the model's logits under {tuple(version)} are not finite for a given text; newer weights or "
            "policy.generation_precision=float32 may help"
        )
    logprobs, top_ids, tops = logprobs_T.copy(), top_ids_T.astype(np.int32), tops_T.copy()
    logprobs[0] = tops[0] = np.nan
    top_ids[0] = -1
    return PromptLogprobs(logprobs, top_ids, tops, version)
