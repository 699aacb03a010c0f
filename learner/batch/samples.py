"""The training sample, made from groups or examples, and the packed batch of several samples.

Promise: a packed batch leaves out the last token of each sequence, because that token is only predicted; so no unused
value is computed. Suffixes: P prompt tokens, T completion tokens, C completions of a group; R tokens of a packed row, N
completion tokens and S sequences in it.

With `policy.shared_prompts` a row has a prompt once, followed by the tokens of its completions. The positions of each
completion continue the prompt's. Prompts are compared by token ids, never by text.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.errors import InvalidInput
from paceline.groups import Completion, FloatArray, Group, IntArray, Rows, Turn
from paceline.spec import RunSpec


class SharedPrompt(NamedTuple):
    """A prompt in a row, followed by the tokens of its completions."""

    begin: int
    """Index of the prompt's first token in the row."""
    length: int
    """Number of the prompt's tokens."""
    own: tuple[int, ...]
    """Number of tokens in the row of each completion, in order; 0 for a completion whose only token the prompt
    predicts."""

    @property
    def end(self) -> int:
        """Index behind the prompt's last completion."""
        return self.begin + self.length + sum(self.own)


class Unshared(NamedTuple):
    """A row with shared prompts, laid out as if each completion had its own copy of the prompt before it."""

    tokens: Tensor
    """[U] index in the row of each token."""
    layout: SequenceLayout
    own: Tensor
    """[T] index in `tokens` of each token of the row."""


@dataclass(eq=False)
class SequenceLayout:
    """Boundaries of the sequences in one packed row [1, T]; never changed. It is not `frozen`, because torch 2.11's
    torch.compile takes a frozen dataclass as a constant, and would compile again for each length of `runs`."""

    runs: tuple[tuple[int, int], ...]
    """(count, length) of each run of neighbouring spans with equal length, in order. A span is a sequence; with shared
    prompts also a prompt, or the tokens of a completion behind it."""
    starts: Tensor
    """[S + 1] int32 on the row's device: start of each span, then T (`cu_seqlens` in flash attention)."""
    max_length: int
    """Number of tokens of the longest sequence, its prompt included."""
    shared: tuple[SharedPrompt, ...] = ()
    """The shared prompts, in order."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, shared: Sequence[SharedPrompt] = ()) -> SequenceLayout:
        """Return the layout of spans with these lengths (each > 0), end to end."""
        runs = tuple((len(list(same)), length) for length, same in itertools.groupby(lengths))
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        longest = max(*lengths, *(prompt.length + max(prompt.own) for prompt in shared), 0)
        return cls(runs, starts.to(device, non_blocking=True), longest, tuple(shared))

    @property
    def costed_runs(self) -> list[tuple[int, int]]:
        """(count, length) of separate sequences whose attention would cost as much as this row; a negative count
        subtracts. A completion of W tokens behind a prompt of P tokens adds (P + W)² - P² - W² to the cost, and no
        token."""
        behind = [(prompt.length, sum(prompt.own)) for prompt in self.shared]
        return [*self.runs, *(run for p, w in behind for run in ((1, p + w), (-1, p), (-1, w)))]

    @functools.cached_property
    def padded(self) -> PaddedBatch:
        """The spans as batches of similar lengths. A row with shared prompts is unshared first."""
        return _padded([length for count, length in self.runs for _ in range(count)], self.starts.device)

    @functools.cached_property
    def unshared(self) -> Unshared:
        """The row with each prompt before each of its completions."""
        lengths = [length for count, length in self.runs for _ in range(count)]
        begins = [0, *itertools.accumulate(lengths)]
        prefix_of: dict[int, SharedPrompt] = {}
        for prompt in self.shared:
            first = prompt.begin + prompt.length
            prefix_of |= {begin: prompt for begin in begins if first <= begin < prompt.end}
        tokens, spans, own, at = [], [], [], 0
        for begin, length in zip(begins, lengths, strict=False):
            before = prefix_of.get(begin)
            prefix = np.arange(0) if before is None else np.arange(before.begin, before.begin + before.length)
            tokens += [prefix, np.arange(begin, begin + length)]
            spans.append(len(prefix) + length)
            own.append(np.arange(at + len(prefix), at + len(prefix) + length))
            at += spans[-1]
        device = self.starts.device
        all_tokens, all_own = (torch.from_numpy(np.concatenate(each)).to(device) for each in (tokens, own))
        return Unshared(all_tokens, SequenceLayout.of(spans, device), all_own)


class PaddedBatch(NamedTuple):
    """Sequences of a row as batches of similar lengths, padded on the right."""

    tokens: tuple[Tensor, ...]
    """[n, L] indices in the row of each batch; padding repeats a sequence's last token."""
    own: Tensor
    """[T] index of each token of the row among the tokens of all batches."""


MOST_PADDED = 1.15
"""Largest ratio of the tokens of a padded batch, padding included, to its real tokens."""


def _padded(lengths: Sequence[int], device: torch.device) -> PaddedBatch:
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    begins = [0, *itertools.accumulate(lengths)]
    batches: list[list[int]] = []
    num_real = 0
    for index in order:
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * longest <= MOST_PADDED * (num_real + lengths[index]):
            batches[-1].append(index)
            num_real += lengths[index]
        else:
            batches.append([index])
            num_real = lengths[index]
    tokens, own, at = [], np.empty(begins[-1], np.int64), 0
    for batch in batches:
        longest = lengths[batch[0]]
        own_lengths = np.array([lengths[index] for index in batch])
        columns = np.minimum(np.arange(longest)[None], own_lengths[:, None] - 1)
        tokens.append(np.array([begins[index] for index in batch])[:, None] + columns)
        for row, index in enumerate(batch):
            first = at + row * longest
            own[begins[index] : begins[index] + lengths[index]] = np.arange(first, first + lengths[index])
        at += len(batch) * longest
    return PaddedBatch(
        tuple(torch.from_numpy(each).to(device, non_blocking=True) for each in tokens),
        torch.from_numpy(own).to(device, non_blocking=True),
    )


class PreferenceLabel(NamedTuple):
    """Label of a completion in a preference data set. Sequences of one prompt share their group id."""

    good: bool
    """True for chosen or desirable, False for rejected or undesirable."""
    margin: float = 0.0
    """Difference by which the chosen completion's score should exceed the rejected one's (`rm`)."""
    mismatched: bool = False
    """True if the completion belongs to another prompt: it does not train, and KTO measures its KL on it."""
    reference_logprob: float | None = None
    """Σ_t log π_ref of the completion in nats, if precomputed. None if the step computes it."""


@dataclass(frozen=True)
class SampleTranscript:
    """Location of a sequence in an episode, whose sample may have several transcripts."""

    sample: int
    """Index of the sample in its group."""
    sample_tokens: int
    """Number of tokens that train, over all transcripts of the sample."""
    is_first: bool
    """True for the sample's first transcript, the only one that counts as a sample."""
    turns: tuple[Turn, ...]
    """Turns of the transcript, in order."""
    first_turn: int
    """Index of the transcript's first turn within the sample."""


@dataclass(frozen=True)
class TrainingSample:
    """One prompt with one completion, ready to train; with an environment, one transcript of an episode."""

    group_id: int
    prompt_ids: IntArray
    """[P] tokens of the prompt, P > 0: the last one predicts the first completion token."""
    completion_ids: IntArray
    """[T] tokens of the completion. A sample with T = 0 trains nothing, but counts as a sequence."""
    behaviour_logprobs_T: FloatArray | None = None
    """[T] log-probabilities by the sampler (log μ), in nats. None for supervised data."""
    versions_T: IntArray | None = None
    """[T] step of the version that sampled each token; None for supervised data."""
    rewards_F: FloatArray | None = None
    """[F] rewards as the functions returned them, NaN for None; `assign_advantages` computes advantages from them."""
    trained_T: np.ndarray | None = None
    """[T] True for completion tokens that train; the other tokens are only context. None if all train."""
    label: PreferenceLabel | None = None
    """Label of the completion in the data set. None if the data set has no labels (`grpo`, `sft`)."""
    reference_logprobs_T: FloatArray | None = None
    """[T] log-probabilities by a teacher or by the policy before training (log π_ref), if the reward pool serves them.
    """
    truncated: bool = False
    """True if the completion reached its token limit: `gae` then takes the value of its last state for missing rewards.
    """
    advantage: float | None = None
    """Advantage of every completion token, if the data set determines it (`offline_grpo`); else None."""
    transcript: SampleTranscript | None = None
    """Location of the completion in an episode. None if it is the whole sample."""

    def __post_init__(self) -> None:
        if len(self.prompt_ids) == 0:
            raise InvalidInput(f"group {self.group_id} has an empty prompt; nothing predicts its first token")
        for name in ("behaviour_logprobs_T", "versions_T", "reference_logprobs_T", "trained_T"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.completion_ids):
                raise InvalidInput(
                    f"group {self.group_id}: {name} has {len(values)} values for "
                    f"{len(self.completion_ids)} completion tokens"
                )

    @property
    def is_mismatched(self) -> bool:
        return self.label is not None and self.label.mismatched

    @property
    def num_trained_tokens(self) -> int:
        return len(self.completion_ids) if self.trained_T is None else int(self.trained_T.sum())

    @property
    def num_sample_tokens(self) -> int:
        return self.num_trained_tokens if self.transcript is None else self.transcript.sample_tokens

    @property
    def counts(self) -> bool:
        """Return whether this transcript counts as a sample: of an episode's transcripts, only the first does."""
        return self.transcript is None or self.transcript.is_first

    @property
    def num_row_tokens(self) -> int:
        """Number of tokens that the sequence takes in a packed row; 0 without trained tokens."""
        return len(self.prompt_ids) + len(self.completion_ids) - 1 if self.num_trained_tokens else 0


def sequences_from_groups(groups: Iterable[Group], spec: RunSpec) -> list[TrainingSample]:
    """Return a sample for each completion of scored groups, or, with an environment, for each transcript. With
    grpo.overlong_filtering (and for episodes with `environment.truncated: leave_out`) a truncated completion stays in
    the batch without tokens. Raises InvalidInput if a group has no rewards, or another number of rewards than the spec
    has functions; also if the reward pool serves log-probabilities of the reference and a group has none."""
    sequences = []
    for group in groups:
        if group.rewards_CF is None or group.rewards_CF.shape != (group.num_samples, len(spec.rewards)):
            shape = None if group.rewards_CF is None else group.rewards_CF.shape
            raise InvalidInput(
                f"group {group.group_id} has rewards of shape {shape}, "
                f"but must have ({group.num_samples}, {len(spec.rewards)})"
            )
        if group.rows is None:
            sequences += [
                _of_completion(group, completion, rewards_F, spec)
                for completion, rewards_F in zip(group.completions, group.rewards_CF, strict=True)
            ]
        else:
            sequences += _of_rows(group, group.rows, spec)
    return sequences


def _of_completion(group: Group, completion: Completion, rewards_F: FloatArray, spec: RunSpec) -> TrainingSample:
    cut_off = spec.grpo.overlong_filtering and completion.finish_reason == "length"
    trained = slice(0, 0 if cut_off else None)
    reference_T = completion.reference_logprobs
    if spec.pool_serves_reference and reference_T is None:
        raise InvalidInput(
            f"group {group.group_id} has no log-probabilities of the reference; the reward pool must serve them"
        )
    return TrainingSample(
        group.group_id,
        group.prompt_ids,
        completion.token_ids[trained],
        completion.logprobs[trained],
        completion.version_steps()[trained],
        rewards_F,
        reference_logprobs_T=None if reference_T is None else reference_T[trained],
        truncated=completion.finish_reason == "length",
    )


def _of_rows(group: Group, rows: Rows, spec: RunSpec) -> list[TrainingSample]:
    """Return the transcripts of a group. Transcripts of a truncated sample have the finish reason `length`."""
    assert group.rewards_CF is not None
    leaves_out = spec.grpo.overlong_filtering or spec.environment.truncated == "leave_out"

    def sampled_of(row: Completion) -> np.ndarray:
        left_out = leaves_out and row.finish_reason == "length"
        return np.full(len(row.token_ids), not left_out) if left_out or row.sampled_T is None else row.sampled_T

    sampled = [sampled_of(row) for row in group.completions]
    tokens: Counter[int] = Counter()
    for sample, mask in zip(rows.samples, sampled, strict=True):
        tokens[sample] += int(mask.sum())
    turns_of: dict[int, list[Turn]] = defaultdict(list)
    for turn in rows.turns:
        turns_of[turn.row].append(turn)
    sequences: list[TrainingSample] = []
    num_turns: Counter[int] = Counter()
    earlier = -1
    for index, (sample, row, mask) in enumerate(zip(rows.samples, group.completions, sampled, strict=True)):
        transcript = SampleTranscript(
            sample, tokens[sample], sample != earlier, tuple(turns_of[index]), num_turns[sample]
        )
        num_turns[sample] += len(transcript.turns)
        earlier = sample
        sequences.append(
            TrainingSample(
                group.group_id,
                group.prompt_ids if row.prompt_ids is None else row.prompt_ids,
                row.token_ids,
                row.logprobs,
                row.version_steps(),
                group.rewards_CF[sample],
                trained_T=mask,
                truncated=row.finish_reason == "length",
                transcript=transcript,
            )
        )
    return sequences


@dataclass(frozen=True)
class PackedBatch:
    """Sequences of one micro-batch end to end, on the training device."""

    input_ids: Tensor
    """[1, R] int64 tokens of all sequences, one sequence after another; a shared prompt is there once."""
    position_ids: Tensor
    """[1, R] int64 positions, counted from 0 in each sequence; behind a shared prompt they go on from it."""
    layout: SequenceLayout
    predictors_N: Tensor
    """[N] index in the row of the token whose hidden state predicts completion token n."""
    targets_N: Tensor
    """[N] int64 completion tokens."""
    lengths_N: Tensor
    """[N] float32 number of completion tokens in the token's sequence."""
    sample_lengths_N: Tensor
    """[N] float32 number of completion tokens in the token's sample, which in an episode may have several sequences."""
    sequence_N: Tensor
    """[N] index in [0, S) of the token's sequence."""
    behaviour_N: Tensor | None
    group_ids_S: tuple[int, ...]
    versions_N: Tensor | None = None
    """[N] int64 step of the version that sampled the token. None for supervised data."""
    reference_N: Tensor | None = None
    """[N] log π_ref if it came with the batch. None if the step computes it or does not need it."""
    labels_S: tuple[PreferenceLabel, ...] = ()
    """Label of each sequence in the data set; empty if the data set has no labels."""


MIN_SAVED_TOKENS, MIN_SAVED_SHARE = 16, 1 / 16
"""A prompt is shared if sharing saves at least MIN_SAVED_TOKENS tokens, and at least MIN_SAVED_SHARE of the tokens that
the sequences would have if each were as short as the shortest one. Sharing has a price: two more calls of attention in
each layer, and sequences of equal length in different groups no longer run together. By this rule a further sequence
never ends the sharing, so a row has no more tokens than were counted for its parts."""


def shared_tokens(sequences: Sequence[TrainingSample], known: int | None = None) -> int:
    """Return the length of the prefix that the prompts of a group's sequences have in common (`known` if it is given),
    or 0 if sharing it does not pay."""
    length = _equal_tokens([sequence.prompt_ids for sequence in sequences]) if known is None else known
    saved, shortest = (len(sequences) - 1) * length, min(sequence.num_row_tokens for sequence in sequences)
    return length if saved >= max(MIN_SAVED_TOKENS, MIN_SAVED_SHARE * len(sequences) * shortest) else 0


def _equal_tokens(prompts: Sequence[np.ndarray]) -> int:
    length = min(map(len, prompts))
    for prompt in prompts[1:]:
        differ = np.flatnonzero(prompt[:length] != prompts[0][:length])
        length = int(differ[0]) if len(differ) else length
    return length


class _Row:
    """The tokens of a row, as numpy arrays for each span, with the index of each completion token's predictor."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.predictors: list[np.ndarray] = []
        self.shared: list[SharedPrompt] = []
        self._end = 0

    def add(self, sequences: Sequence[TrainingSample], num_shared: int) -> None:
        """Add sequences whose prompts begin with the same `num_shared` tokens."""
        begin = self._end
        self._add(sequences[0].prompt_ids[:num_shared], 0)
        own = []
        for sequence in sequences:
            first, num_prompt = self._end, len(sequence.prompt_ids)
            ids = np.concatenate((sequence.prompt_ids, sequence.completion_ids[:-1]))[num_shared:]
            self._add(ids, num_shared)
            own.append(len(ids))
            # Completion token t is predicted from position P - 1 + t of its sequence.
            positions = np.arange(num_prompt - 1, num_prompt - 1 + len(sequence.completion_ids))
            behind = positions >= num_shared
            self.predictors.append(_trained(np.where(behind, first - num_shared, begin) + positions, sequence))
        if num_shared:
            self.shared.append(SharedPrompt(begin, num_shared, tuple(own)))

    def _add(self, ids: np.ndarray, position: int) -> None:
        if len(ids):
            self.tokens.append(ids)
            self.positions.append(np.arange(position, position + len(ids)))
            self._end += len(ids)


def pack_samples(sequences: Sequence[TrainingSample], device: torch.device, *, share: bool = False) -> PackedBatch:
    """Pack sequences end to end in the given order. Each has at least one completion token that trains. With `share`,
    the row has the common beginning of the prompts of neighbours from one group only once (`shared_tokens`)."""
    lengths_S = np.array([s.num_trained_tokens for s in sequences])
    row = _Row()
    for _, neighbours in itertools.groupby(sequences, key=lambda s: s.group_id):
        unit = list(neighbours)
        num_shared = shared_tokens(unit) if share else 0
        for part in [unit] if num_shared else [[sequence] for sequence in unit]:
            row.add(part, num_shared)

    def integers(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True)

    def floats(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.float32)).to(device, non_blocking=True)

    def trained(name: str, convert: Callable[[np.ndarray], Tensor]) -> Tensor | None:
        if any(getattr(s, name) is None for s in sequences):
            return None
        return convert(np.concatenate([_trained(getattr(s, name), s) for s in sequences]))

    return PackedBatch(
        input_ids=integers(np.concatenate(row.tokens))[None],
        position_ids=integers(np.concatenate(row.positions))[None],
        layout=SequenceLayout.of([len(ids) for ids in row.tokens], device, row.shared),
        predictors_N=integers(np.concatenate(row.predictors)),
        targets_N=integers(np.concatenate([_trained(s.completion_ids, s) for s in sequences])),
        lengths_N=floats(np.repeat(lengths_S, lengths_S)),
        sample_lengths_N=floats(np.repeat([s.num_sample_tokens for s in sequences], lengths_S)),
        sequence_N=integers(np.repeat(np.arange(len(sequences)), lengths_S)),
        behaviour_N=trained("behaviour_logprobs_T", floats),
        group_ids_S=tuple(s.group_id for s in sequences),
        versions_N=trained("versions_T", integers),
        reference_N=trained("reference_logprobs_T", floats),
        labels_S=tuple(s.label for s in sequences if s.label is not None),
    )


def _trained(values_T: np.ndarray, sequence: TrainingSample) -> np.ndarray:
    return values_T if sequence.trained_T is None else values_T[sequence.trained_T]
