"""The running batch of the native engine: sequences join, decode one token a step, and leave when they end.

Slots [0, n) of every tensor hold the running sequences; when a sequence ends, the last one moves into its slot. The
data of a step are tensors on the model's device, and the data of the host are in `RunningSequence`, so a step has no
Python work per sequence and reads back one flag per sequence. Promise: a sequence's tokens are those that it would get
alone.

The last token of a sequence has no keys and values yet, because it is the input of the next step. So the cache holds
`total` - 1 positions, and only those are computed again after a change of weights. Layers without keys keep the states
after these positions. Padding would change states, so a pass that computes states has prompts of equal length. Requests
with equal tokens, such as the completions of one group, share one prefill pass even if they join at different times
(`PromptCache`, cleared with new weights).

Axis suffixes: S slots, R slots in use, T tokens of a padded prompt, L tokens of a sequence, K stop tokens, V
vocabulary, H key-value heads, D head size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.groups import Completion, IntArray, Version, VersionSpan, append_span
from paceline.rollout.engine import GenerationRequest
from paceline.rollout.native.kv_cache import SlotCache, StoreKey
from paceline.rollout.native.model import NativeModel
from paceline.rollout.native.sampling import mask_stop_tokens, mix_seed, penalise, sample, uniform
from paceline.rollout.stop_strings import StopScanner

PREFILL_TOKENS = 8192
"""Most padded tokens in one prefill pass, which bounds its activations; a single longer prompt has its own pass."""
TOTAL, PROMPT, LIMIT, MIN_TOTAL, SEED, TOP_K = range(6)
TEMPERATURE, TOP_P, MIN_P, PENALTY = range(4)


@dataclass(eq=False)
class RunningSequence:
    request: GenerationRequest
    stop_ids: frozenset[int]
    limit: int
    """Number of tokens, including the prompt, at which the sequence ends by its length."""
    spans: list[VersionSpan] = field(default_factory=list)
    birth: int = 0
    """Decode step at which the sequence would have had 0 tokens: its `total` is the batch's step minus this."""
    computed_at: int = 0
    """Number of weight changes that the batch had made when the oldest keys and values of this sequence were computed.
    """
    scanner: StopScanner | None = None
    """Search for the request's stop strings."""

    def __post_init__(self) -> None:
        request = self.request
        if request.stop is not None:
            self.scanner = request.stop.scanner(request.params.min_new_tokens, request.prefix)

    @property
    def stopped(self) -> bool:
        return self.scanner is not None and self.scanner.stopped

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    def given_ids(self) -> IntArray:
        return np.asarray(self.request.given_ids, np.int32)

    def add_span(self, version: Version, num_tokens: int) -> None:
        """Add a span with `version` for those of the completion's first `num_tokens` tokens that have none."""
        start = self.spans[-1].end if self.spans else 0
        if start != num_tokens:
            append_span(self.spans, VersionSpan(*version, start, num_tokens))


Ended = tuple[RunningSequence, Completion]


class DecodeBatch:
    """Up to `num_slots` sequences under one version of the weights. One thread makes all calls."""

    def __init__(self, model: NativeModel, num_slots: int, prompts: PromptCache | None = None) -> None:
        self.model = model
        self.num_slots = num_slots
        self.sequences: list[RunningSequence] = []
        self.version: Version | None = None
        self.prefix_hits = 0
        """Number of prompt tokens taken from other sequences with the same prompt, not computed."""
        self._cache = SlotCache(num_slots)
        self._prompts = prompts if prompts is not None else PromptCache()
        self._step = self._changes = 0
        self._masks_top = self._masks_stop = self._masks_min_p = self._penalises = False
        self._longest = 0
        device = model.device
        self._index_S = torch.arange(num_slots, device=device)
        self._tokens_SL = torch.zeros(num_slots, model.max_tokens, dtype=torch.int64, device=device)
        self._logprobs_SL = torch.zeros(num_slots, model.max_tokens, device=device)
        self._counts = torch.zeros(num_slots, 6, dtype=torch.int64, device=device)
        self._floats = torch.ones(num_slots, 4, device=device)
        self._stops_SK = torch.full((num_slots, 1), -1, dtype=torch.int64, device=device)

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self.sequences)

    def add(self, sequences: Sequence[RunningSequence]) -> list[Ended]:
        """Compute the prompts (equal prompts once for each version) and sample the first tokens; return the ended
        sequences."""
        by_prompt: dict[bytes, list[RunningSequence]] = {}
        for sequence in sequences:
            by_prompt.setdefault(sequence.given_ids().tobytes(), []).append(sequence)
        computed = {prompt: self._prompts.get(prompt) for prompt in by_prompt}
        for prompt, group in by_prompt.items():
            shared_by = len(group) if computed[prompt] is not None else len(group) - 1
            self.prefix_hits += shared_by * len(group[0].given_ids())
        uncomputed = [group for prompt, group in by_prompt.items() if computed[prompt] is None]
        for shared in _passes(uncomputed, lambda group: len(group[0].given_ids()), self.model.has_states):
            self._prefill(shared)
        for prompt, state in computed.items():
            if state is not None:
                self._restore(by_prompt[prompt], state)
        self._measure()
        return self._take(self._ended(), None)

    def step(self) -> list[Ended]:
        """Sample one more token for every sequence. Return the sequences that ended, which have left the batch."""
        num_rows = len(self.sequences)
        total_R = self._counts[:num_rows, TOTAL]
        positions_R = total_R - 1
        rows_R = self._index_S[:num_rows]
        self._cache.begin_decode(rows_R, positions_R, self._longest)
        ids_R = self._tokens_SL[rows_R, positions_R]
        self._append(self.model.decode(ids_R, positions_R, self._cache), 0, num_rows)
        self._step += 1
        self._longest += 1
        return self._take(self._ended(), None)

    def remove(self, sequences: Sequence[RunningSequence]) -> list[Ended]:
        """Remove unfinished `sequences` from the batch, and return them with the tokens sampled so far."""
        return self._take([self.sequences.index(sequence) for sequence in sequences], "abort")

    def watched(self) -> list[Ended]:
        """Return each sequence that has a progress callback, with its tokens sampled so far; all stay in the batch."""
        watched = [i for i, each in enumerate(self.sequences) if each.request.on_progress is not None]
        return self._read(watched, "abort") if watched else []

    def change_version(self, version: Version, recompute_after: int | None) -> None:
        """Assign tokens from now on to `version`, whose weights the model has; compute those keys and values again that
        are `recompute_after` or more weight changes old (None: compute none again)."""
        if self.version is not None:
            for sequence in self.sequences:
                sequence.add_span(self.version, self._step - sequence.birth - sequence.prompt_length)
        self.version = version
        self._changes += 1
        self._prompts.clear()
        if recompute_after is not None:
            oldest = self._changes - recompute_after
            stale = [index for index, each in enumerate(self.sequences) if each.computed_at <= oldest]
            for indexes in _passes(stale, self._num_computed, self.model.has_states):
                self._recompute(indexes)

    def _prefill(self, shared: list[list[RunningSequence]]) -> None:
        """Add sequences whose tokens must be computed. The sequences in one list of `shared` have the same tokens."""
        sequences = [sequence for group in shared for sequence in group]
        first, end, longest = self._place(sequences)
        sizes = [len(group) for group in shared]
        leaders = (first + np.cumsum([0, *sizes[:-1]])).tolist()
        source_R = None
        leaders_U = self._index_S[first:end]
        if len(shared) < len(sequences):
            device = self.model.device
            source_R = torch.from_numpy(np.repeat(np.arange(len(shared)), sizes)).to(device)
            leaders_U = torch.tensor(leaders, device=device)
        self._cache.begin_prefill(slice(first, end), longest, source_R)
        logits_UV = self.model.prefill(
            self._tokens_SL[leaders_U, :longest], self._counts[leaders_U, TOTAL], self._cache
        )
        for row, (leader, *_), logits_V in zip(leaders, shared, logits_UV, strict=True):
            ids = leader.given_ids()
            state = PromptState(self._cache.read_row(row, len(ids)), logits_V.clone())
            self._prompts.put(ids.tobytes(), state)
        self._append(logits_UV if source_R is None else logits_UV[source_R], first, end)

    def _restore(self, sequences: list[RunningSequence], state: PromptState) -> None:
        first, end, num_tokens = self._place(sequences)
        self._cache.write_rows(slice(first, end), num_tokens, state.stored)
        self._append(state.logits_V.expand(end - first, -1), first, end)

    def _place(self, sequences: list[RunningSequence]) -> tuple[int, int, int]:
        """Write new sequences' tokens and parameters to the next slots; return (first slot, end, longest length)."""
        first, end = len(self.sequences), len(self.sequences) + len(sequences)
        token_ids = [sequence.given_ids() for sequence in sequences]
        longest = max(map(len, token_ids))
        ids_RL = np.zeros((len(sequences), longest), np.int64)
        logprobs_RL = np.zeros((len(sequences), longest), np.float32)
        for index, (sequence, ids) in enumerate(zip(sequences, token_ids, strict=True)):
            ids_RL[index, : len(ids)] = ids
            if sequence.request.prefix is not None:
                logprobs_RL[index, sequence.prompt_length : len(ids)] = sequence.request.prefix.logprobs
            sequence.birth = self._step - len(ids) - 1
            sequence.computed_at = self._changes
        device = self.model.device
        self._tokens_SL[first:end, :longest] = torch.from_numpy(ids_RL).to(device)
        self._logprobs_SL[first:end, :longest] = torch.from_numpy(logprobs_RL).to(device)
        self._write_parameters(sequences, token_ids, first, end)
        self.sequences += sequences
        return first, end, longest

    def _write_parameters(
        self, sequences: list[RunningSequence], token_ids: list[IntArray], first: int, end: int
    ) -> None:
        counts, floats = [], []
        for sequence, ids in zip(sequences, token_ids, strict=True):
            params, prompt = sequence.request.params, sequence.prompt_length
            min_total, seed = prompt + params.min_new_tokens, mix_seed(sequence.request.seed)
            counts.append((len(ids), prompt, sequence.limit, min_total, seed, params.top_k))
            floats.append((params.temperature, params.top_p, params.min_p, params.repetition_penalty))
        width = max(self._stops_SK.shape[1], *(len(sequence.stop_ids) for sequence in sequences))
        if width > self._stops_SK.shape[1]:
            added = width - self._stops_SK.shape[1]
            self._stops_SK = torch.nn.functional.pad(self._stops_SK, (0, added), value=-1)
        stops = [sorted(each.stop_ids) + [-1] * (width - len(each.stop_ids)) for each in sequences]
        device = self.model.device
        self._counts[first:end] = torch.tensor(counts, device=device)
        self._floats[first:end] = torch.tensor(floats, device=device)
        self._stops_SK[first:end] = torch.tensor(stops, device=device)
        self._note_masks(sequences)

    def _append(self, logits_RV: Tensor, first: int, end: int) -> None:
        counts, floats = self._counts[first:end], self._floats[first:end]
        total_R = counts[:, TOTAL]
        if self._penalises:
            longest = int(total_R.max())
            tokens_RL = self._tokens_SL[first:end, :longest]
            logits_RV = penalise(logits_RV, tokens_RL, total_R, floats[:, PENALTY])
        if self._masks_stop:
            logits_RV = mask_stop_tokens(logits_RV, self._stops_SK[first:end], total_R < counts[:, MIN_TOTAL])
        tokens_R, logprobs_R = sample(
            logits_RV,
            uniform(counts[:, SEED], total_R - counts[:, PROMPT]),
            floats[:, TEMPERATURE],
            counts[:, TOP_K] if self._masks_top else None,
            floats[:, TOP_P] if self._masks_top else None,
            floats[:, MIN_P] if self._masks_min_p else None,
        )
        rows_R = self._index_S[first:end]
        self._tokens_SL[rows_R, total_R] = tokens_R
        self._logprobs_SL[rows_R, total_R] = logprobs_R
        total_R += 1

    def _ended(self) -> list[int]:
        num_rows = len(self.sequences)
        total_R = self._counts[:num_rows, TOTAL]
        last_R1 = self._tokens_SL[self._index_S[:num_rows], total_R - 1][:, None]
        ended_R = (last_R1 == self._stops_SK[:num_rows]).any(1) | (total_R >= self._counts[:num_rows, LIMIT])
        ended = np.flatnonzero(ended_R.cpu().numpy()).tolist()
        if any(sequence.scanner is not None for sequence in self.sequences):
            ended = sorted({*ended, *self._stopped(last_R1[:, 0].tolist())})
        return ended

    def _stopped(self, last_ids: list[int]) -> list[int]:
        """Return the indices of the sequences whose newest token completes a stop string."""
        for sequence, last_id in zip(self.sequences, last_ids, strict=True):
            scanner, num_tokens = sequence.scanner, self._step - sequence.birth - sequence.prompt_length
            # Sequences that already run get no token while others join.
            if scanner is not None and scanner.num_tokens < num_tokens:
                scanner.push([last_id])
        return [index for index, sequence in enumerate(self.sequences) if sequence.stopped]

    def _take(self, leaving: list[int], reason: str | None) -> list[Ended]:
        """Remove sequences by index, and return their completions with the finish reason `reason`. If it is None, the
        reason is `stop` or `length`, depending on the last token and the stop strings."""
        if not leaving:
            return []
        ended = self._read(leaving, reason)
        self._close_gaps(leaving)
        self._measure()
        if not all(np.isfinite(completion.logprobs).all() for _, completion in ended):
            self._cache.wipe(len(self.sequences))
        return ended

    def _read(self, indexes: list[int], reason: str | None) -> list[Ended]:
        """Return the completions of sequences by index, as they are now. `reason` means the same as in `_take`."""
        index_R = torch.tensor(indexes, device=self.model.device)
        sequences = [self.sequences[index] for index in indexes]
        totals = [self._step - sequence.birth for sequence in sequences]
        tokens_RL = self._tokens_SL[index_R, : max(totals)].cpu().numpy().astype(np.int32)
        logprobs_RL = self._logprobs_SL[index_R, : max(totals)].cpu().numpy()
        completions = []
        for sequence, total, ids_L, logprobs_L in zip(sequences, totals, tokens_RL, logprobs_RL, strict=True):
            assert self.version is not None
            sequence.add_span(self.version, total - sequence.prompt_length)
            stopped = sequence.stopped or int(ids_L[total - 1]) in sequence.stop_ids
            why = reason or ("stop" if stopped else "length")
            taken = slice(sequence.prompt_length, total)
            # Copies, so that a completion does not keep the arrays of all sequences in memory.
            ids_T, logprobs_T = ids_L[taken].copy(), logprobs_L[taken].copy()
            completions.append((sequence, Completion(ids_T, logprobs_T, tuple(sequence.spans), why)))
        return completions

    def _close_gaps(self, leaving: list[int]) -> None:
        num_left = len(self.sequences) - len(leaving)
        gone = set(leaving)
        targets = [index for index in sorted(gone) if index < num_left]
        sources = [index for index in range(num_left, len(self.sequences)) if index not in gone]
        if targets:
            device = self.model.device
            source_R, target_R = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
            self._cache.move_rows(source_R, target_R, self._longest)
            for store in (self._tokens_SL, self._logprobs_SL, self._counts, self._floats, self._stops_SK):
                store[target_R] = store[source_R]
            for source, target in zip(sources, targets, strict=True):
                self.sequences[target] = self.sequences[source]
        del self.sequences[num_left:]

    def _measure(self) -> None:
        """Update the host's data about all sequences, after some joined or left."""
        self._longest = max((self._step - sequence.birth for sequence in self.sequences), default=0)
        self._masks_top = self._masks_stop = self._masks_min_p = self._penalises = False
        self._note_masks(self.sequences)

    def _note_masks(self, sequences: Sequence[RunningSequence]) -> None:
        """Note the changes of logits that the parameters of `sequences` need."""
        params = [sequence.request.params for sequence in sequences]
        self._masks_top |= any(p.top_k > 0 or p.top_p < 1 for p in params)
        self._masks_stop |= any(p.min_new_tokens > 0 for p in params)
        self._masks_min_p |= any(p.min_p > 0 for p in params)
        self._penalises |= any(p.repetition_penalty != 1 for p in params)

    def _num_computed(self, index: int) -> int:
        """Return the number of a sequence's tokens that are in the cache: all but the last."""
        return self._step - self.sequences[index].birth - 1

    def _recompute(self, indexes: list[int]) -> None:
        """Compute keys, values and states of sequences again with new weights, but not of their last tokens."""
        for index in indexes:
            self.sequences[index].computed_at = self._changes
        longest = max(map(self._num_computed, indexes))
        rows_R = torch.tensor(indexes, device=self.model.device)
        self._cache.begin_prefill(rows_R, longest)
        self.model.prefill(self._tokens_SL[rows_R, :longest], self._counts[rows_R, TOTAL] - 1, self._cache)


Item = TypeVar("Item")


def _passes(items: Sequence[Item], length: Callable[[Item], int], equal: bool) -> Iterator[list[Item]]:
    """Yield `items` in parts whose tokens, padded to the part's longest, stay within PREFILL_TOKENS. With `equal` all
    items of a part have the same length."""
    part: list[Item] = []
    longest = 0
    for item in sorted(items, key=length) if equal else items:
        padded = max(longest, length(item))
        if part and (padded * (len(part) + 1) > PREFILL_TOKENS or (equal and padded != longest)):
            yield part
            part, padded = [], length(item)
        part.append(item)
        longest = padded
    if part:
        yield part


MAX_BYTES = 1 << 28
"""Largest size of all entries together in bytes; the least recently used are dropped first."""


@dataclass(frozen=True)
class PromptState:
    """Results of a prefill pass for one prompt."""

    stored: dict[StoreKey, Tensor]
    """Keys, values and states of all layers."""
    logits_V: Tensor
    """Logits of the token after the prompt."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.logits_V, *self.stored.values()))


class PromptCache:
    """Cache of recent prompts' keys, values, states and next-token logits under the current weights, keyed by the bytes
    of their token ids; at most `max_bytes` in total, 0 keeps none."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[bytes, PromptState] = OrderedDict()
        self._num_bytes = 0

    def get(self, prompt: bytes) -> PromptState | None:
        """Return the entry of a prompt, and mark it as used now."""
        if prompt in self._entries:
            self._entries.move_to_end(prompt)
        return self._entries.get(prompt)

    def put(self, prompt: bytes, state: PromptState) -> None:
        """Keep an entry, unless it is larger than the whole cache."""
        size = state.num_bytes
        if size > self.max_bytes or prompt in self._entries:
            return
        self._entries[prompt] = state
        self._num_bytes += size
        while self._num_bytes > self.max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def clear(self) -> None:
        """Drop all entries: the weights have changed."""
        self._entries.clear()
        self._num_bytes = 0
