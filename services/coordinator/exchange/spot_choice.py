"""Choice of the groups that the learner compares with its own log-probabilities. Pure.

Promise: the first FIRST_CHECKS groups of a worker, and then at least the share `logger.verify_share` of its groups, are due for a
comparison, and the next group at once while the newest ones speak for a fault. No worker can foresee which. The same batch has the same choice, however often it is requested.
"""

from __future__ import annotations

import random
import sqlite3
from collections import OrderedDict, defaultdict
from collections.abc import Sequence

from paceline.groups import held_attempt
from paceline.services.coordinator.exchange.drift import DriftTest, Finding, Observation

FIRST_CHECKS = 4
"""Groups of a new worker that are compared as soon as they can be."""

MAX_CHECKS = 16
"""Groups of a batch that are compared at most."""

MAX_WORKERS = 4096
"""Workers whose counts are kept; the newest ones."""

KEPT_CHOICES = 8
"""Batches whose choice is remembered, because every rank and every later session may ask for the same batch again."""


class SpotCheck:
    """Choice and judgement for one run."""

    def __init__(self, seed: int | None = None) -> None:
        """`seed` is for tests: workers cannot foresee which of their groups are compared."""
        self.test = DriftTest()
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._until_due: OrderedDict[str, int] = OrderedDict()
        self._checked: defaultdict[str, int] = defaultdict(int)
        self._choices: OrderedDict[str, dict[int, str]] = OrderedDict()

    def choose(self, chain: str, step: int, groups: Sequence[sqlite3.Row], share: float) -> dict[int, str]:
        """Return the groups of a batch that are to be compared, with their workers. The same for each request of a batch,
        which `chain` names."""
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
        """Take a comparison of a worker in. Return a finding when it is named."""
        finding = self.test.observe(worker, observation)
        if self.test.is_suspected(worker):
            self._until_due[worker] = 0
        return finding

    def chosen(self, chain: str) -> dict[int, str]:
        """Return the earlier choice for a batch; empty where there was none."""
        return self._choices.get(chain, {})

    def _trim(self, chain: str, chosen: dict[int, str]) -> None:
        self._choices[chain] = chosen
        while len(self._choices) > KEPT_CHOICES:
            self._choices.popitem(last=False)
        while len(self._until_due) > MAX_WORKERS:
            worker, _ = self._until_due.popitem(last=False)
            self._checked.pop(worker, None)
