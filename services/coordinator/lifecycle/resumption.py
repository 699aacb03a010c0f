"""The files that a person may have corrected while a run was paused, and that are therefore read anew at `resume`: data sets, the
chat template, reward functions. Changes are events of the run.

Digests of the functions' files are taken where they are on this machine; the coordinator never runs them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import xxhash

from paceline.spec import RunSpec
from services.coordinator.exchange.state import ActiveRun
from services.coordinator.exchange.uploads.prompt_check import PromptCheck
from services.coordinator.lifecycle.context import RunContext
from services.coordinator.lifecycle.dataset_openings import Openings
from services.coordinator.lifecycle.run_data import changed_data_warnings, open_data


class Resumption:
    """Everything that is read anew for a run that goes on."""

    def __init__(self, context: RunContext, prompts: PromptCheck):
        self._ledger, self._exchange = context.ledger, context.exchange
        self._prompts = prompts
        self._openings = Openings()

    async def read(self, run_id: str) -> ActiveRun | None:
        """Return the active run with its data sets opened anew, if dropped groups have paused it; else None.

        An opening goes on when the caller gives up waiting, and the next call gets its outcome. Raises DataError, Unreadable
        for a data set that cannot be used now: the run stays paused.
        """
        run = self._exchange.active
        if run is None or run.run_id != run_id or not self._ledger.drop_reason_of_pause(run_id):
            return None
        data = await self._openings.open(run_id, partial(open_data, run.spec))
        return replace(run, prompts=data.prompts, validation=data.validation)

    def take(self, run_id: str, run: ActiveRun | None) -> dict[str, str]:
        """Take what was read, forget the failures before, and record what has changed; return the facts for the event of
        the run's state. Inside a transaction.
        """
        active = self._exchange.active
        if active is None or active.run_id != run_id:
            return {}
        self._exchange.groups.clear_failures(run_id)
        admitted = self._ledger.counters(run_id).get("groups:ever_admitted", 0)
        self._exchange.clear_failures(first_group=admitted)
        facts = {"functions": function_digests(active.spec)}
        warnings = changed_function_warnings(self._ledger.function_digests(run_id), facts["functions"])
        if run is not None and run.prompts is not None:
            before = self._ledger.data_fingerprint(run_id)
            warnings += changed_data_warnings(before, run.spec, run.prompts)
            facts["data"] = run.prompts.fingerprint
            self._exchange.active = run
            self._prompts.begin(run_id, run.spec)
        for warning in warnings:
            self._ledger.add_event(run_id, "warning", {"message": warning})
        return facts


def function_digests(spec: RunSpec) -> str:
    """Return a JSON object with the digest of each reward function's file; without those that are not on this machine."""
    digests = {}
    for reward in spec.rewards:
        path, colon, _ = reward.function.rpartition(":")
        try:
            digests[path] = xxhash.xxh3_64(Path(path).read_bytes()).hexdigest() if colon else ""
        except OSError:
            continue
    return json.dumps({path: digest for path, digest in digests.items() if digest})


def changed_function_warnings(before: str, now: str) -> list[str]:
    """Return a warning for each file of a reward function that has another digest than before."""
    known, current = json.loads(before or "{}"), json.loads(now)
    return [
        f"the reward functions in {path!r} are not what they were when the run was last started (XXH3 {known[path]}; now "
        f"{digest}): further groups are scored by the new code"
        for path, digest in current.items()
        if known.get(path, digest) != digest
    ]


def started_facts(run: ActiveRun) -> dict[str, str]:
    """Return the facts for the event that a run starts: what its data and functions are."""
    fingerprint = run.prompts.fingerprint if run.prompts is not None else ""
    return {"data": fingerprint, "functions": function_digests(run.spec)}
