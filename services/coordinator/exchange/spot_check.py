"""Spot-checks the samplers: chooses groups whose log-probabilities the learner compares with its own, and finds, by two
sequential tests, workers that sample with other weights than those of their versions. Has no I/O.

Promise: such a worker is named in the run's events. Unless `logger.verify_drops` drops its groups, they train as
before, because a person has to judge whether the worker or the learner is at fault. The first FIRST_CHECKS comparisons
of a worker, and then at least the share `logger.verify_share` of its groups, are due; while its newest groups indicate
a fault, its next groups are always due. One group of a large batch is compared in any case, because each version may be
damaged. No worker can foresee which groups are chosen. Repeated requests of a batch get the same choice. The state is
in memory; a coordinator's restart resets the counts.

An observation summarizes the tokens of one group that one worker sampled under one version. It has the mean and the
mean square of log μ - log π in nats, where μ is the probability that the worker reported and π is the learner's with
the weights of that version (`paceline/learner/step/sampler_check.py`). A worker that is due stays due until the learner
has compared it.

The first test finds a large mean: that of a correct worker is a few thousandths of a nat, that of a wrong kernel or a
broken GPU is larger. It is a cumulative sum (E. S. Page, "Continuous inspection schemes", Biometrika 41, 1954) of the
log-likelihood ratio between a mean of FAULTY and one of TOLERATED, one sum for each sign. For Gaussian noise of
standard deviation σ an observation x adds

(FAULTY - TOLERATED) / σ² · (x - (FAULTY + TOLERATED) / 2)

to the sum, which never falls below 0. A worker is named when a sum reaches THRESHOLD. Noise is neither Gaussian nor
known, so an observation adds at most MAX_INCREMENT (no single group names a worker), counts as at most CLIP_SIGMAS σ,
and σ is the largest of three estimates: the group's own standard error, the median of all groups' standard errors, and
the spread of the groups around the median of their worker.

The second test finds wrong weights, whose differences have a small mean but scatter: E_μ[log μ - log π] is the
Kullback-Leibler divergence, about half the mean square. An observation adds the binary logarithm of the mean square
over SPREAD_LIMITS of the number format, between -1 and 1, less for few tokens, to another sum that never falls below 0.
The worker is named when it reaches WIDE, which takes at least two groups.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from paceline.groups import Group

TOLERATED = 0.003
"""Largest mean deviation of a correct worker, in nats a token."""

FAULTY = 0.01
"""Mean deviation that the test should detect, in nats a token."""

THRESHOLD = 18.0
"""Sum at which a worker is named: a likelihood ratio of e^18, some 7·10⁷."""

MAX_INCREMENT = 9.5
"""One group increases a sum by at most this much, so a worker is named only after at least two groups."""

CLIP_SIGMAS = 4.0

SMALLEST_SIGMA = 2e-4
"""A smaller standard error, in nats, is replaced by this one, because rounding errors within a group are alike."""

SPREAD_FROM = 8
"""Number of observations from which on their spread is used to estimate the noise."""

MAX_OBSERVATIONS = 256
"""Number of newest observations of all workers from which the noise is estimated."""

MAX_WORKERS = 4096
"""Largest number of workers whose observations are kept; the least recently observed worker is removed first."""

MAD_TO_SIGMA = 1.4826
"""If values are Gaussian, their median absolute deviation times this factor is their standard deviation."""


SPREAD_LIMITS = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}
"""Mean square of a token's difference, in nats², that no group of a correct engine of this number format reaches
(docs/operate/performance.md, "Noise of samplers"). Nothing here computes in TensorFloat-32."""

WIDE = 2.0
"""Sum at which a worker is named because its differences scatter: two groups with twice the limit, or more groups."""

ENOUGH_TOKENS = 200
"""An observation of fewer tokens counts in proportion, because few tokens may decide about its mean square."""


class Observation(NamedTuple):
    mean: float
    """Mean over tokens of the worker's log-probability less the learner's, in nats."""
    standard_error: float
    """Standard error of that mean, in nats, estimated from the spread over the group's completions."""
    tokens: int
    mean_square: float = 0.0
    """Mean of the squared differences, in nats²."""
    number_format: str = "float32"
    version_step: int = 0
    """Step of the version under which the tokens were sampled."""

    @property
    def spread_limit(self) -> float:
        return SPREAD_LIMITS.get(self.number_format, max(SPREAD_LIMITS.values()))


class Finding(NamedTuple):
    member_id: str
    mean: float
    """Mean deviation over the worker's newest groups, in nats a token."""
    spread: float
    """Root of the mean square over the same groups, in nats."""
    limit: float
    """Largest such root of a correct engine of this number format."""
    number_format: str
    groups: int
    """Number of the worker's comparisons since its sums were last 0."""
    version_step: int
    """Oldest version among these comparisons."""
    others: float | None
    """Median of the other workers' mean deviations, in nats a token; None without other workers."""
    others_spread: float | None
    """Median of the other workers' roots of the mean square."""
    times: int
    """Number of times that the worker was named, including this one."""

    def explain(self) -> str:
        times = f" ({self.times} times so far)" if self.times > 1 else ""
        since = f"its newest {self.groups} compared groups{times}, from version {self.version_step} on"
        if self._scatters:
            text = (
                f"log-probabilities of {self.member_id} scatter by {self.spread:.3g} nats a token around the learner's in "
                f"{since}; correct engines in {self.number_format} stay below {self.limit:.2g}"
            )
        else:
            text = (
                f"log-probabilities of {self.member_id} are off by {self.mean:+.4f} nats a token in the mean of {since}; "
                "the learner has used the same weights"
            )
        if self.others is not None and self.others_spread is not None:
            text += (
                f"; the medians of the other workers are {self.others:+.4f} in the mean and {self.others_spread:.3g} around "
                "the learner's"
            )
            if abs(self.others) <= TOLERATED and self.others_spread <= self.limit:
                return (
                    f"{text}. Its weights, its GPU, its kernels or its copy of the model may be broken: drain this worker and "
                    "start it on another device (docs/operate/alerts.md)"
                )
        return (
            f"{text}. All workers may be off: compare the engine's number format, attention kernels and sampling settings "
            "with the learner's (docs/operate/alerts.md)"
        )

    @property
    def _scatters(self) -> bool:
        return self.spread > self.limit


@dataclass
class _Worker:
    above: float = 0.0
    below: float = 0.0
    wide: float = 0.0
    groups: int = 0
    since_zero: int = 0
    named: int = 0
    newest: deque[Observation] = field(default_factory=lambda: deque(maxlen=32))
    wrong: tuple[int, int] | None = None
    """Oldest and newest version seen to be wrong since the worker was named; None once an observation shows no
    fault."""

    @property
    def mean(self) -> float:
        return median(each.mean for each in self.newest)

    @property
    def spread(self) -> float:
        return math.sqrt(median(each.mean_square for each in self.newest))


class DriftTest:
    def __init__(self) -> None:
        self._workers: OrderedDict[str, _Worker] = OrderedDict()
        self._deviations: deque[float] = deque(maxlen=MAX_OBSERVATIONS)
        self._errors: deque[float] = deque(maxlen=MAX_OBSERVATIONS)
        self.groups = 0

    def observe(self, member_id: str, observation: Observation) -> Finding | None:
        """Add the observation of a worker's group if it is finite; return a finding if the worker is named for it."""
        numbers = (*observation[:2], observation.mean_square)
        if not all(map(math.isfinite, numbers)) or observation.tokens <= 0 or observation.mean_square < 0:
            return None
        worker = self._workers.setdefault(member_id, _Worker())
        self._workers.move_to_end(member_id)
        while len(self._workers) > MAX_WORKERS:
            self._workers.popitem(last=False)
        self.groups += 1
        worker.groups += 1
        worker.newest.append(observation)
        self._errors.append(observation.standard_error)
        if len(worker.newest) > 1:
            self._deviations.append(abs(observation.mean - worker.mean))
        return self._add(member_id, worker, observation)

    def is_suspected(self, member_id: str) -> bool:
        """Return whether the newest groups of a worker indicate a fault, however weakly."""
        worker = self._workers.get(member_id)
        return worker is not None and (worker.since_zero > 0 or worker.wrong is not None)

    @property
    def wrong_versions(self) -> dict[str, tuple[int, int]]:
        """Return the oldest and the newest wrong version of each named worker, unless a later group showed no fault."""
        return {name: each.wrong for name, each in self._workers.items() if each.wrong is not None}

    @property
    def largest_mean(self) -> float:
        """Return the mean deviation, in nats a token, that is farthest from 0 among the workers' newest groups."""
        return max((worker.mean for worker in self._workers.values()), key=abs, default=0.0)

    @property
    def largest_spread(self) -> float:
        """Return the largest root of the mean square, in nats, among the workers' newest groups."""
        return max((worker.spread for worker in self._workers.values()), default=0.0)

    @property
    def named(self) -> list[str]:
        return sorted(member_id for member_id, worker in self._workers.items() if worker.named)

    def _add(self, member_id: str, worker: _Worker, observation: Observation) -> Finding | None:
        sigma = self._sigma(observation.standard_error)
        bound = max(2 * FAULTY, CLIP_SIGMAS * sigma)
        mean = min(max(observation.mean, -bound), bound)
        weight, middle = (FAULTY - TOLERATED) / sigma**2, (FAULTY + TOLERATED) / 2
        worker.above = max(0.0, worker.above + min(weight * (mean - middle), MAX_INCREMENT))
        worker.below = max(0.0, worker.below + min(weight * (-mean - middle), MAX_INCREMENT))
        doublings = math.log2(max(observation.mean_square / observation.spread_limit, 0.5))
        worker.wide = max(0.0, worker.wide + min(doublings, 1.0) * min(1.0, observation.tokens / ENOUGH_TOKENS))
        if not (worker.above or worker.below or worker.wide):
            worker.since_zero, worker.wrong = 0, None
            return None
        worker.since_zero += 1
        if worker.wrong is not None:
            worker.wrong = (worker.wrong[0], max(worker.wrong[1], observation.version_step))
        if max(worker.above, worker.below) < THRESHOLD and worker.wide < WIDE:
            return None
        finding = self._finding(member_id, worker)
        newest = max(each.version_step for each in list(worker.newest)[-worker.since_zero :])
        worker.named, worker.wrong = finding.times, (finding.version_step, newest)
        worker.above = worker.below = worker.wide = 0.0
        worker.since_zero = 0
        return finding

    def _finding(self, member_id: str, worker: _Worker) -> Finding:
        newest = list(worker.newest)[-worker.since_zero :]
        oldest = min(each.version_step for each in newest)
        others = [other for name, other in self._workers.items() if name != member_id]
        return Finding(
            member_id,
            sum(each.mean for each in newest) / len(newest),
            math.sqrt(sum(each.mean_square for each in newest) / len(newest)),
            math.sqrt(newest[-1].spread_limit),
            newest[-1].number_format,
            worker.since_zero,
            oldest if worker.wrong is None else min(oldest, worker.wrong[0]),
            median(each.mean for each in others) if others else None,
            median(each.spread for each in others) if others else None,
            worker.named + 1,
        )

    def _sigma(self, standard_error: float) -> float:
        sigma = max(standard_error, median(self._errors), SMALLEST_SIGMA)
        if len(self._deviations) >= SPREAD_FROM:
            sigma = max(sigma, MAD_TO_SIGMA * median(self._deviations))
        return sigma


FIRST_CHECKS = 4
"""Number of comparisons of a new worker that are made as soon as possible."""

SUSPECT_CHECKS = 2
"""Number of groups of a suspected worker that are compared in a batch."""

MAX_CHECKS = 16
"""Largest number of groups of a batch that are compared."""

LARGE_BATCH = 64
"""One group of a batch of at least this many groups is always compared, which takes about 1/200 of the step's work."""

MAX_GROUPS = 1 << 15
"""Number of newest groups whose samplers are known."""

KEPT_CHOICES = 8
"""Number of batches whose choices are kept, because every rank and later session may request a batch again."""


@dataclass
class _Choice:
    """Groups of one batch that are compared."""

    parts: set[tuple[int, int]] = field(default_factory=set)
    """Parts of the batch, as (rank, number of ranks), whose groups were chosen."""
    taken: dict[int, set[tuple[str, int]]] = field(default_factory=dict)
    """(worker, step of the version) of the comparisons that have arrived. The key is the group id."""
    samplers: dict[int, dict[str, int]] = field(default_factory=dict)
    """Workers that have sampled the group. The key is the group id."""


class SpotCheck:
    def __init__(self, seed: int | None = None) -> None:
        """`seed` is for tests; without it nobody can foresee the chosen groups."""
        self.test = DriftTest()
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._until_due: OrderedDict[str, int] = OrderedDict()
        self._checked: defaultdict[str, int] = defaultdict(int)
        self._choices: OrderedDict[str, _Choice] = OrderedDict()
        self._samplers: OrderedDict[int, dict[str, int]] = OrderedDict()
        """Newest version under which each worker has sampled tokens of a group. The key is the group id."""
        self._share = 1.0

    def note_group(self, group: Group, sender: str = "") -> None:
        """Note the samplers of a committed group or, if it names none, the `sender`. Groups from before a restart of
        the coordinator are unknown."""
        newest: dict[str, int] = {}
        for completion in group.completions:
            for span in completion.spans:
                if sampler := span.sampler or sender:
                    newest[sampler] = max(span.step, newest.get(sampler, 0))
        self._samplers[group.group_id] = newest
        if len(self._samplers) > MAX_GROUPS:
            self._samplers.popitem(last=False)

    def is_wrong(self, group_id: int) -> bool:
        """Return whether a named worker has sampled tokens of the group, and the newest of them under a version that
        was seen to be wrong. Groups of newer versions are not wrong yet: they are compared when they are trained."""
        wrong, samplers = self.test.wrong_versions, self._samplers.get(group_id, {})
        return any(oldest <= samplers.get(worker, -1) <= newest for worker, (oldest, newest) in wrong.items())

    def choose(
        self, chain: str, part: tuple[int, int], groups: Sequence[int], share: float, batch_size: int
    ) -> set[int]:
        """Return the ids of the groups to compare in a rank's part of the batch with this `chain`; equal for all
        requests of the part. `batch_size` is the number of groups of the whole batch, on all ranks."""
        choice = self._choices.setdefault(chain, _Choice())
        if part not in choice.parts:
            self._share = share
            choice.parts.add(part)
            known = [group for group in groups if self._samplers.get(group)]
            self._choose(choice, known)
            if batch_size >= LARGE_BATCH and known and not choice.samplers:
                self._mark(choice, self._random.choice(known))
            self._trim()
        return choice.samplers.keys() & set(groups)

    def _choose(self, choice: _Choice, groups: Sequence[int]) -> None:
        by_worker: defaultdict[str, list[int]] = defaultdict(list)
        for group in groups:
            for worker in self._samplers[group]:
                self._until_due[worker] = self._until_due.get(worker, 0) - 1
                self._until_due.move_to_end(worker)
                by_worker[worker].append(group)
        due = [worker for worker in by_worker if self._until_due[worker] < 0]
        for worker in self._random.sample(due, len(due)):
            wanted = max(FIRST_CHECKS - self._checked[worker], SUSPECT_CHECKS if self.test.is_suspected(worker) else 1)
            unmarked = [group for group in by_worker[worker] if group not in choice.samplers]
            marked = len(by_worker[worker]) - len(unmarked)
            number = min(wanted - marked, len(unmarked), MAX_CHECKS - len(choice.samplers))
            for group in self._random.sample(unmarked, max(number, 0)):
                self._mark(choice, group)

    def _mark(self, choice: _Choice, group_id: int) -> None:
        choice.samplers[group_id] = self._samplers[group_id]

    def observe(self, worker: str, observation: Observation) -> Finding | None:
        finding = self.test.observe(worker, observation)
        self._checked[worker] += 1
        if self.test.is_suspected(worker):
            self._until_due[worker] = 0
        elif self._checked[worker] >= FIRST_CHECKS:
            self._until_due[worker] = int(self._random.uniform(0.5, 1.0) / self._share)
        return finding

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step; none before the first comparison."""
        if not self.test.groups:
            return {}
        return {
            "spot_check/groups": float(self.test.groups),
            "spot_check/largest_difference": self.test.largest_mean,
            "spot_check/largest_spread": self.test.largest_spread,
            "spot_check/named_workers": float(len(self.test.named)),
        }

    def take(self, chain: str, group_id: int, sampler: str, version_step: int) -> str:
        """Return, once for each version, the worker whose tokens of a chosen group were compared; else an empty
        text."""
        choice = self._choices.get(chain)
        samplers = {} if choice is None else choice.samplers.get(group_id, {})
        worker = sampler if sampler or len(samplers) != 1 else next(iter(samplers))
        if choice is None or worker not in samplers:
            return ""
        taken = choice.taken.setdefault(group_id, set())
        if (worker, version_step) in taken:
            return ""
        taken.add((worker, version_step))
        return worker

    def _trim(self) -> None:
        while len(self._choices) > KEPT_CHOICES:
            self._choices.popitem(last=False)
        while len(self._until_due) > MAX_WORKERS:
            worker, _ = self._until_due.popitem(last=False)
            self._checked.pop(worker, None)
