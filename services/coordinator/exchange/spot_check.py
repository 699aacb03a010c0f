"""Spot-checks the samplers: chooses groups whose log-probabilities the learner compares with its own, and finds, by a
sequential test, workers whose mean deviation is wrong. Has no I/O.

Promise: such a worker is named in the run's events. Nothing else changes: its groups train as before, because a person
has to judge whether the worker or the learner is at fault. The first FIRST_CHECKS groups of a worker, and then at least
the share `logger.verify_share` of its groups, are due for a comparison; while its newest groups indicate a fault, the
next group is always due. No worker can foresee which groups are chosen. Repeated requests of a batch get the same
choice.

A comparison costs no computation, because the learner computes the log-probabilities anyway. So it needs a group whose
tokens all have the version that the step starts from (age 0). A worker that is due is checked at its next such group.
Groups that several workers generated in turn are left out, because the ledger does not tell their tokens apart. The
state is in memory; a coordinator's restart resets the counts.

An observation is one group: the mean over its tokens of log μ - log π in nats, where μ is the worker's reported
probability and π the learner's with the same weights, and the standard error of that mean. A correct worker has a mean
of a few thousandths at most, because kernels and number formats differ; a wrong kernel or a broken GPU has more.

The test is a cumulative sum (E. S. Page, "Continuous inspection schemes", Biometrika 41, 1954) of the log-likelihood
ratio between a mean of FAULTY and one of TOLERATED, one sum for each sign. For Gaussian noise of standard deviation σ
an observation x adds

(FAULTY - TOLERATED) / σ² · (x - (FAULTY + TOLERATED) / 2)

to the sum, which never falls below 0. A worker is named when a sum reaches THRESHOLD. Noise is neither Gaussian nor
known, so an observation adds at most MAX_INCREMENT (no single group names a worker), counts as at most CLIP_SIGMAS σ,
and σ is the largest of three estimates: the group's own standard error, the median of all groups' standard errors, and
the spread of the groups around the median of their worker.
"""

from __future__ import annotations

import math
import random
import sqlite3
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from paceline.groups import held_attempt

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


class Observation(NamedTuple):
    mean: float
    """Mean over tokens of the worker's log-probability less the learner's, in nats."""
    standard_error: float
    """Standard error of that mean, in nats, estimated from the spread over the group's completions."""
    tokens: int


class Finding(NamedTuple):
    member_id: str
    mean: float
    """Mean deviation over the worker's newest groups, in nats a token."""
    groups: int
    """Number of the worker's groups since its sum was last 0."""
    others: float | None
    """Median of the other workers' mean deviations, in nats a token; None without other workers."""
    times: int
    """Number of times that the worker was named, including this one."""

    def explain(self) -> str:
        times = f" ({self.times} times so far)" if self.times > 1 else ""
        text = (
            f"log-probabilities of {self.member_id} are off by {self.mean:+.4f} nats a token in the mean of its newest "
            f"{self.groups} compared groups{times}; the learner has used the same weights"
        )
        if self.others is not None:
            text += f"; the median of the other workers' mean deviations is {self.others:+.4f} nats a token"
        if self.others is not None and abs(self.others) <= TOLERATED:
            return (
                f"{text}. Its GPU, its kernels or its copy of the model may be broken: drain this worker and start it on "
                "another device (docs/operate/alerts.md)"
            )
        return (
            f"{text}. All workers may be off: compare the engine's number format, attention kernels and sampling settings "
            "with the learner's (docs/operate/alerts.md)"
        )


@dataclass
class _Worker:
    above: float = 0.0
    below: float = 0.0
    groups: int = 0
    since_zero: int = 0
    named: int = 0
    newest: deque[float] = field(default_factory=lambda: deque(maxlen=32))


class DriftTest:
    def __init__(self) -> None:
        self._workers: OrderedDict[str, _Worker] = OrderedDict()
        self._deviations: deque[float] = deque(maxlen=MAX_OBSERVATIONS)
        self._errors: deque[float] = deque(maxlen=MAX_OBSERVATIONS)
        self.groups = 0

    def observe(self, member_id: str, observation: Observation) -> Finding | None:
        """Add the observation of a worker's group, if finite; return a finding if this names the worker."""
        if not all(map(math.isfinite, observation[:2])) or observation.tokens <= 0:
            return None
        worker = self._workers.setdefault(member_id, _Worker())
        self._workers.move_to_end(member_id)
        while len(self._workers) > MAX_WORKERS:
            self._workers.popitem(last=False)
        self.groups += 1
        worker.groups += 1
        worker.newest.append(observation.mean)
        self._errors.append(observation.standard_error)
        if len(worker.newest) > 1:
            self._deviations.append(abs(observation.mean - median(worker.newest)))
        return self._add(member_id, worker, observation)

    def is_suspected(self, member_id: str) -> bool:
        """Return whether the newest groups of a worker indicate a fault, however weakly."""
        worker = self._workers.get(member_id)
        return worker is not None and worker.since_zero > 0

    @property
    def largest_mean(self) -> float:
        """Return the mean deviation, in nats a token, that is farthest from 0 among the workers' newest groups."""
        return max((median(worker.newest) for worker in self._workers.values()), key=abs, default=0.0)

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
        worker.since_zero = worker.since_zero + 1 if worker.above or worker.below else 0
        if max(worker.above, worker.below) < THRESHOLD:
            return None
        newest = list(worker.newest)[-worker.since_zero :]
        worker.named += 1
        finding = Finding(
            member_id, sum(newest) / len(newest), worker.since_zero, self._others(member_id), worker.named
        )
        worker.above = worker.below = 0.0
        worker.since_zero = 0
        return finding

    def _sigma(self, standard_error: float) -> float:
        sigma = max(standard_error, median(self._errors), SMALLEST_SIGMA)
        if len(self._deviations) >= SPREAD_FROM:
            sigma = max(sigma, MAD_TO_SIGMA * median(self._deviations))
        return sigma

    def _others(self, member_id: str) -> float | None:
        means = [median(worker.newest) for name, worker in self._workers.items() if name != member_id]
        return median(means) if means else None


FIRST_CHECKS = 4
"""Number of groups of a new worker that are compared as soon as possible."""

MAX_CHECKS = 16
"""Largest number of groups of a batch that are compared."""

KEPT_CHOICES = 8
"""Number of batches whose choices are kept, because every rank and later session may request a batch again."""


class SpotCheck:
    def __init__(self, seed: int | None = None) -> None:
        """`seed` is for tests; without it nobody can foresee the chosen groups."""
        self.test = DriftTest()
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._until_due: OrderedDict[str, int] = OrderedDict()
        self._checked: defaultdict[str, int] = defaultdict(int)
        self._choices: OrderedDict[str, dict[int, str]] = OrderedDict()

    def choose(self, chain: str, step: int, groups: Sequence[sqlite3.Row], share: float) -> dict[int, str]:
        """Return a batch's groups to compare, with their workers; equal for all requests with the same `chain`."""
        if chain in self._choices:
            return self._choices[chain]
        by_worker: defaultdict[str, list[int]] = defaultdict(list)
        for group in groups:
            worker = held_attempt(group["holders"], 1) if group["attempt"] == 1 else ""
            if worker:
                self._until_due[worker] = self._until_due.get(worker, 0) - 1
                self._until_due.move_to_end(worker)
                if group["oldest_step"] == step:
                    by_worker[worker].append(group["group_id"])
        chosen: dict[int, str] = {}
        due = [worker for worker in by_worker if self._until_due[worker] < 0]
        for worker in self._random.sample(due, min(len(due), MAX_CHECKS)):
            chosen[self._random.choice(by_worker[worker])] = worker
            self._checked[worker] += 1
            if self._checked[worker] >= FIRST_CHECKS:
                self._until_due[worker] = int(self._random.uniform(0.5, 1.0) / share)
        self._trim(chain, chosen)
        return chosen

    def observe(self, worker: str, observation: Observation) -> Finding | None:
        finding = self.test.observe(worker, observation)
        if self.test.is_suspected(worker):
            self._until_due[worker] = 0
        return finding

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step; none before the first comparison."""
        if not self.test.groups:
            return {}
        return {
            "spot_check/groups": float(self.test.groups),
            "spot_check/largest_difference": self.test.largest_mean,
            "spot_check/named_workers": float(len(self.test.named)),
        }

    def chosen(self, chain: str) -> dict[int, str]:
        """Return the groups already chosen for a batch, with their workers; empty if there are none."""
        return self._choices.get(chain, {})

    def take(self, chain: str, group_id: int) -> str:
        """Return the worker of a chosen group, once; empty if the group was not chosen or was taken already."""
        return self._choices.get(chain, {}).pop(group_id, "")

    def _trim(self, chain: str, chosen: dict[int, str]) -> None:
        self._choices[chain] = chosen
        while len(self._choices) > KEPT_CHOICES:
            self._choices.popitem(last=False)
        while len(self._until_due) > MAX_WORKERS:
            worker, _ = self._until_due.popitem(last=False)
            self._checked.pop(worker, None)
