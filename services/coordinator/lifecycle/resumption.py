"""The files that a person may have corrected while a run was paused, and that are therefore read anew at `resume`: data sets, the
chat template, reward functions. Changes are events of the run.

A run with a bundle gets the corrected files with a new one. Of a run without, digests of the functions' files are taken where
they are on this machine; the coordinator never runs them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import xxhash

from paceline.errors import InvalidInput
from paceline.services.coordinator.exchange.state import ActiveRun
from paceline.services.coordinator.exchange.uploads.prompt_check import PromptCheck
from paceline.services.coordinator.lifecycle.context import RunContext
from paceline.services.coordinator.lifecycle.dataset_openings import Openings
from paceline.services.coordinator.lifecycle.run_bundles import RunBundles
from paceline.services.coordinator.lifecycle.run_data import changed_data_warnings
from paceline.spec import RunSpec
from paceline.spec.reading import spec_of_run

MAX_NAMED = 5


class Resumption:
    """Everything that is read anew for a run that goes on."""

    def __init__(self, context: RunContext, prompts: PromptCheck, bundles: RunBundles):
        self._ledger, self._exchange = context.ledger, context.exchange
        self._prompts, self._bundles = prompts, bundles
        self._openings = Openings()

    async def changes(self, run_id: str, bundle: str) -> list[str]:
        """Check a run's new bundle, and return the places of the files that it changes. Raises NotFound, InvalidInput."""
        before = self._bundles.of_run(run_id)
        if not bundle or bundle == before:
            return []
        spec, _ = await asyncio.to_thread(spec_of_run, run_id, self._ledger.run(run_id)["spec_yaml"])
        if not before:
            raise InvalidInput(f"run {run_id} was submitted without a bundle; resume it without one")
        await asyncio.to_thread(self._bundles.check, spec, bundle)
        return await asyncio.to_thread(self._bundles.changes, spec, before, bundle)

    async def read(self, run_id: str, bundle: str = "", changes: Sequence[str] = ()) -> ActiveRun | None:
        """Return the active run with its data sets opened anew, if dropped groups have paused it or its new bundle `changes`
        them; else None.

        An opening goes on when the caller gives up waiting, and the next call gets its outcome. Raises DataError, Unreadable
        for a data set that cannot be used now: the run stays paused.
        """
        run = self._exchange.active
        if run is None or run.run_id != run_id:
            return None
        has_other_data = any(path.startswith("data/") for path in changes)
        if not has_other_data and not self._ledger.drop_reason_of_pause(run_id):
            return None
        bundle = bundle or self._bundles.of_run(run_id)
        data = await self._openings.open(run_id + bundle, partial(self._bundles.open_data, run.spec, bundle))
        return replace(run, prompts=data.prompts, validation=data.validation)

    def take(
        self, run_id: str, run: ActiveRun | None, bundle: str = "", changes: Sequence[str] = ()
    ) -> dict[str, str]:
        """Take what was read, forget the failures before, and record what has changed; return the facts for the event of
        the run's state. Inside a transaction.
        """
        if changes:
            self._ledger.add_event(
                run_id, "warning", {"message": self._changed_bundle(run_id, bundle, changes)}
            )
        new_bundle = {"bundle": bundle} if bundle else {}
        active = self._exchange.active
        if active is None or active.run_id != run_id:
            return new_bundle
        self._exchange.groups.clear_failures(run_id)
        self._ledger.episodes.clear_failures(run_id)
        admitted = self._ledger.counters(run_id).get("groups:ever_admitted", 0)
        self._exchange.clear_failures(first_group=admitted)
        in_bundle = bool(bundle or self._bundles.of_run(run_id))
        facts = new_bundle | ({} if in_bundle else {"functions": function_digests(active.spec)})
        warnings = (
            []
            if in_bundle
            else changed_function_warnings(self._ledger.function_digests(run_id), facts["functions"])
        )
        if run is not None and run.prompts is not None:
            before = self._ledger.data_fingerprint(run_id)
            warnings += changed_data_warnings(before, run.spec, run.prompts)
            facts["data"] = run.prompts.fingerprint
            self._exchange.active = run
            self._prompts.begin(run_id, run.spec)
        for warning in warnings:
            self._ledger.add_event(run_id, "warning", {"message": warning})
        return facts

    def _changed_bundle(self, run_id: str, bundle: str, changes: Sequence[str]) -> str:
        named = ", ".join(changes[:MAX_NAMED]) + (", …" if len(changes) > MAX_NAMED else "")
        before = self._bundles.of_run(run_id)
        return (
            f"the run goes on with bundle {bundle} in place of {before}: {len(changes)} of its files differ ({named}); further "
            "groups are generated and scored with these"
        )


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


def started_facts(run: ActiveRun, bundles: RunBundles) -> dict[str, str]:
    """Return the facts for the event that a run starts: what its data are, and its functions unless a bundle names them."""
    fingerprint = run.prompts.fingerprint if run.prompts is not None else ""
    functions = {} if bundles.of_run(run.run_id) else {"functions": function_digests(run.spec)}
    return {"data": fingerprint} | functions
