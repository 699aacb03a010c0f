"""Compares samplers' log-probabilities with the learner's: each token is compared under the version that sampled it,
with its whole prefix.

Each rank keeps its shards of older versions in host memory, in the published type (`KeptVersions`). A comparison loads
the shards of a version into the model, runs the ordinary forward pass over the chosen groups, and restores the weights
bit for bit. So the division of the model does not matter, and no other model exists. All ranks make each call together.

A comparison is exact if an engine computes the keys and values of running sequences anew at each update
(`async_grpo.recompute_kv_cache_after_weight_updates: true`) or updates no running sequence. Otherwise a token is
compared only if no update came between the beginning of its request and the token: a request begins with a completion
or a turn, or when another worker continues one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.groups import BoolArray, Completion, Group, Version, VersionSpan
from paceline.learner.batch.samples import TrainingSample
from paceline.learner.collectives import union_over_ranks
from paceline.learner.model.mesh import reshard
from paceline.learner.model.policy import packed_logprobs, published_dtype
from paceline.learner.step.plan import plan_updates
from paceline.learner.step.trainer import Trainer
from paceline.models.loading import resolved_dtype

MAX_DIFFERENCE = 1.0
"""Largest difference of one token in nats; larger differences count as this value, so that no single token decides
about a group."""


class Difference(NamedTuple):
    """log μ - log π of the tokens of one group that one sampler generated under one version, in nats."""

    group_id: int
    mean: float
    standard_error: float
    """Standard error of the mean."""
    tokens: int
    sampler: str
    """Member id of the rollout worker; empty if the group does not name it."""
    version_step: int
    mean_square: float
    """Mean of the squared differences, in nats²."""
    number_format: str
    """The coarser of two types: that of the learner's forward pass and that of the published weights."""


class KeptVersions:
    """This rank's shards of the newest versions before the current one: at most `number`, of each trained parameter,
    in host memory."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, number: int) -> None:
        self._model, self._dtype, self._number = model, dtype, number
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._shards: dict[Version, list[Tensor]] = {}
        self._spare: list[list[Tensor]] = []
        """Memory of removed versions, kept for new versions because new memory is slow."""

    def __contains__(self, version: Version) -> bool:
        return version in self._shards

    def remove_before(self, step: int) -> None:
        """Remove the versions of steps before `step`."""
        for version in [each for each in self._shards if each.step < step]:
            self._spare.append(self._shards.pop(version))

    @torch.no_grad()
    def keep(self, version: Version) -> None:
        """Copy the model's weights as `version`, unless there is no room."""
        if version in self._shards or len(self._shards) >= self._number:
            return
        copies = self._spare.pop() if self._spare else [self._empty(each, self._dtype) for each in self._local()]
        _copy(self._local(), copies)
        self._shards[version] = copies

    @contextmanager
    def loaded(self, version: Version) -> Iterator[None]:
        """Let the model have the weights of a kept version inside the block. Afterwards it has its present weights
        again, bit for bit."""
        local = self._local()
        before = [self._empty(each, each.dtype) for each in local]
        with torch.no_grad():
            _copy(local, before)
            try:
                _copy(self._shards[version], local)
                yield
            finally:
                reshard(self._model)
                _copy(before, local)

    def _local(self) -> list[Tensor]:
        whole = [parameter.detach() for parameter in self._parameters]
        return [each.to_local() if isinstance(each, DTensor) else each for each in whole]

    def _empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(like.shape, dtype=dtype, device="cpu", pin_memory=like.device.type == "cuda")


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
    if any(each.device.type == "cuda" for each in (*sources[:1], *targets[:1])):
        torch.cuda.synchronize()


class SamplerCheck:
    """Comparisons of one session of a run, on one rank."""

    def __init__(self, trainer: Trainer, session: int) -> None:
        spec, device = trainer.spec, trainer.device
        self._trainer, self._session = trainer, session
        asynchronous = spec.async_grpo
        self._max_age = asynchronous.max_trajectory_age_steps
        number, published = spec.num_kept_versions, published_dtype(spec.policy, device)
        self._kept = KeptVersions(trainer.model, published, number)
        self._is_exact = asynchronous.recompute_after_updates == 1 or not asynchronous.in_flight_weight_updates
        names = [
            resolved_dtype(each, device.type) for each in (spec.policy.precision, spec.policy.generation_precision)
        ]
        self._number_format = max(names, key=lambda name: torch.finfo(getattr(torch, name)).eps)

    def keep(self, step: int) -> None:
        """Copy the weights of version `step`, which the model has before the step."""
        self._kept.remove_before(step + 1 - self._max_age)
        self._kept.keep(Version(self._session, step))

    @torch.no_grad()
    def compare(
        self, groups: Sequence[Group], samples: Sequence[TrainingSample], chosen: Collection[int], step: int
    ) -> list[Difference]:
        """Return the differences of this rank's `chosen` groups, before the step changes the weights. Tokens of versions
        that are not kept are left out. `samples` are those of `sequences_from_groups`. A collective call."""
        completions = [(group, index) for group in groups for index in range(len(group.completions))]
        spans_of: defaultdict[int, dict[int, list[VersionSpan]]] = defaultdict(dict)
        for number, (group, index) in enumerate(completions):
            if group.group_id in chosen and samples[number].num_trained_tokens:
                for span in comparable_spans(group, index, exact=self._is_exact):
                    if self._is_known(span, step):
                        spans_of[span.step].setdefault(number, []).append(span)
        found: defaultdict[tuple[int, str, int], list[np.ndarray]] = defaultdict(list)
        for version_step in union_over_ranks(list(spans_of), self._trainer.device):
            spans = spans_of[version_step]
            with self._weights_of(version_step, step):
                differences = self._differences([samples[number] for number in spans], step)
            for number, differences_T in zip(spans, differences, strict=True):
                for sampler in {span.sampler for span in spans[number]}:
                    mask_T = _mask([span for span in spans[number] if span.sampler == sampler], len(differences_T))
                    values = differences_T[mask_T & ~np.isnan(differences_T)]
                    if len(values):
                        found[samples[number].group_id, sampler, version_step].append(values)
        return [difference(*key, found[key], self._number_format) for key in sorted(found)]

    def _is_known(self, span: VersionSpan, step: int) -> bool:
        version = Version(span.session, span.step)
        return version == (self._session, step) or version in self._kept

    @contextmanager
    def _weights_of(self, version_step: int, step: int) -> Iterator[None]:
        if version_step == step:
            yield
            reshard(self._trainer.model)
        else:
            with self._kept.loaded(Version(self._session, version_step)):
                yield

    def _differences(self, samples: Sequence[TrainingSample], step: int) -> list[np.ndarray]:
        """Return [T] log μ - log π of each sample under the model's present weights; NaN if a token does not train."""
        trainer, policy = self._trainer, self._trainer.spec.policy
        (update,) = plan_updates(samples, step, trainer.spec, trainer.objective, trainer.device, num_updates=1)
        differences = [np.full(len(sample.completion_ids), np.nan) for sample in samples]
        for micro in update.micro_batches:
            logprobs_N, _ = packed_logprobs(
                trainer.model,
                micro.packed,
                temperature=trainer.objective.temperature,
                chunk_tokens=policy.logprob_chunk_tokens,
            )
            if micro.is_dummy:
                continue
            assert micro.packed.behaviour_N is not None
            values_N = (micro.packed.behaviour_N - logprobs_N.float()).double().cpu().numpy()
            sequence_N = micro.packed.sequence_N.cpu().numpy()
            for sequence, index in enumerate(micro.indices):
                trained_T = samples[index].trained_T
                differences[index][slice(None) if trained_T is None else trained_T] = values_N[sequence_N == sequence]
        return differences


def comparable_spans(group: Group, index: int, *, exact: bool) -> Iterator[VersionSpan]:
    """Yield the spans of a completion or transcript whose prefix the engine had computed under the span's version."""
    completion: Completion = group.completions[index]
    begins = {0} if group.rows is None else {turn.start for turn in group.rows.turns if turn.row == index}
    first: VersionSpan | None = None
    is_updated = False
    for span in completion.spans:
        if first is None or span.start in begins or span.sampler != first.sampler:
            first, is_updated = span, False
        is_updated |= span[:2] != first[:2]
        if exact or not is_updated:
            yield span


def _mask(spans: Sequence[VersionSpan], length: int) -> BoolArray:
    mask_T = np.zeros(length, np.bool_)
    for span in spans:
        mask_T[span.start : span.end] = True
    return mask_T


def difference(
    group_id: int, sampler: str, version_step: int, differences: Collection[np.ndarray], number_format: str
) -> Difference:
    """Return the mean of a group with the larger of two standard errors: by the spread of its tokens, taken as
    independent, and by the spread of its completions, because the tokens of a completion may have a common error.
    `differences` has an array [T] in nats for each completion, with at least one token in all."""
    tokens = np.concatenate([values.clip(-MAX_DIFFERENCE, MAX_DIFFERENCE) for values in differences])
    mean, number = float(tokens.mean()), len(tokens)
    bounds = np.cumsum([len(values) for values in differences])[:-1]
    sums_C = np.array([float((values - mean).sum()) for values in np.split(tokens, bounds)])
    by_tokens = float(tokens.std()) / number**0.5
    by_completions = float(np.sqrt((sums_C**2).sum() * len(sums_C) / max(len(sums_C) - 1, 1))) / number
    return Difference(
        group_id,
        mean,
        max(by_tokens, by_completions),
        number,
        sampler,
        version_step,
        float((tokens**2).mean()),
        number_format,
    )
