"""The training sample, made from groups or examples, and the packed batch of several samples.

Promise: a packed batch has each sequence without its last token, which is only predicted, so no unused value is
computed. Suffixes: P prompt tokens, T completion tokens, C completions of a group; R tokens of a packed row, N
completion tokens and S sequences in it.
"""

from __future__ import annotations

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


@dataclass(eq=False)
class SequenceLayout:
    """Boundaries of the sequences in one packed row [1, T]; never changed. It is not `frozen`, because torch 2.11's
    torch.compile takes a frozen dataclass as a constant, and would compile again for each number of runs."""

    runs: tuple[tuple[int, int], ...]
    """(count, length) of each run of neighbouring sequences with equal length, in order."""
    starts: Tensor
    """[S + 1] int32 on the row's device: start of each sequence, then T (`cu_seqlens` in flash attention)."""
    max_length: int
    """Number of tokens of the longest sequence."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> SequenceLayout:
        """Return the layout of sequences with these lengths (each > 0), end to end."""
        runs = tuple((len(list(same)), length) for length, same in itertools.groupby(lengths))
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        return cls(runs, starts.to(device, non_blocking=True), max(lengths))


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
    """[T] tokens of the completion. T = 0 trains nothing, but counts as a sequence."""
    behaviour_logprobs_T: FloatArray | None = None
    """[T] log-probabilities by the sampler (log μ), in nats. None for supervised data."""
    versions_T: IntArray | None = None
    """[T] step of the version that sampled each token; None for supervised data."""
    rewards_F: FloatArray | None = None
    """[F] rewards as the functions returned them, NaN for None; `assign_advantages` computes advantages from them."""
    trained_T: np.ndarray | None = None
    """[T] True for completion tokens that train; the others are only context. None if all train."""
    label: PreferenceLabel | None = None
    """Label of the completion in the data set. None if the data set has none (`grpo`, `sft`)."""
    reference_logprobs_T: FloatArray | None = None
    """[T] log-probabilities by a teacher or by the policy before training (log π_ref), if the reward pool serves them.
    """
    truncated: bool = False
    """True if the completion reached its token limit: `gae` takes the value of its last state for the missing rewards.
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
    """Return a sample for each completion of scored groups; with an environment for each transcript. With
    grpo.overlong_filtering (and for episodes with `environment.truncated: leave_out`) a truncated completion stays
    in the batch without tokens. Raises InvalidInput for a group without rewards or with another number than the spec
    has functions, and for one without log-probabilities of the reference if the reward pool serves them."""
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
    """[1, R] int64 tokens of all sequences, one sequence after another."""
    position_ids: Tensor
    """[1, R] int64 positions, counted from 0 in each sequence."""
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
    """Label of each sequence in the data set; empty if it has none."""


def pack_samples(sequences: Sequence[TrainingSample], device: torch.device) -> PackedBatch:
    """Pack sequences end to end in the given order. Each has at least one completion token that trains."""
    row_lengths_S = np.array([s.num_row_tokens for s in sequences])
    lengths_S = np.array([s.num_trained_tokens for s in sequences])
    ends_S = np.cumsum(row_lengths_S)
    # Completion token t of a sequence is predicted from row position end - T + t.
    positions = zip(ends_S, sequences, strict=True)
    predictors = [_trained(np.arange(end - len(s.completion_ids), end), s) for end, s in positions]
    tokens = [np.concatenate((s.prompt_ids, s.completion_ids[:-1])) for s in sequences]

    def integers(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True)

    def floats(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.float32)).to(device, non_blocking=True)

    def trained(name: str, convert: Callable[[np.ndarray], Tensor]) -> Tensor | None:
        if any(getattr(s, name) is None for s in sequences):
            return None
        return convert(np.concatenate([_trained(getattr(s, name), s) for s in sequences]))

    return PackedBatch(
        input_ids=integers(np.concatenate(tokens))[None],
        position_ids=integers(np.concatenate([np.arange(n) for n in row_lengths_S]))[None],
        layout=SequenceLayout.of(row_lengths_S.tolist(), device),
        predictors_N=integers(np.concatenate(predictors)),
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
