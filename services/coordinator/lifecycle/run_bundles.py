"""The bundles of runs: checked at submission, unpacked for the coordinator's own reading of data, kept while a run has them.

The newest event of a run's state that names a bundle says which one the run has. A run without one is as before there were
bundles: its spec's paths are those of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.bundle import allowed as allowed_code
from paceline.bundle.allowed import refusal_of_bundle
from paceline.bundle.cache import BundleCache
from paceline.bundle.manifest import REPORT, Kind, localized, with_original_paths
from paceline.errors import DataError, InvalidInput, NotFound, SpecError, Unreadable
from paceline.services.coordinator.blobs.store import BlobStore
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.lifecycle.run_data import RunData, open_data
from paceline.services.coordinator.text_limits import MAX_TEXT_BYTES, one_line
from paceline.spec import RunSpec

TIDY_UP_S = 600.0
MAX_REPORT = 1 << 14
"""Bytes of a report on prepared data; a longer one is left out."""


class RunBundles:
    """Bundles in one store. Methods that take a digest read files and are for threads; the others use the ledger."""

    def __init__(self, ledger: Ledger, blobs: BlobStore, functions_from: Sequence[Path] = ()):
        self._ledger, self._blobs, self._functions_from = ledger, blobs, functions_from
        self._tidied_up_s = time.monotonic()

    def of_run(self, run_id: str) -> str:
        """Return the digest of a run's bundle; empty for a run without one."""
        return self._ledger.bundle(run_id)

    def check(self, spec: RunSpec, bundle: str) -> None:
        """Check that the functions may be used and that the whole bundle is here. Raises SpecError, InvalidInput."""
        allowed = () if bundle else self._functions_from
        if (
            why := allowed_code.refusal_of_files(spec, allowed)
            if not (bundle and self._functions_from)
            else ""
        ):
            raise SpecError(why)
        if not bundle:
            return
        try:
            manifest = self._blobs.manifest(bundle)
        except NotFound:
            raise InvalidInput(
                f"bundle {bundle[:12]}… is not here; send its files first, then submit again"
            ) from None
        if why := refusal_of_bundle(spec, manifest, self._functions_from):
            raise SpecError(f"the functions may not be used: {why}")
        for file in manifest.files:
            if not self._blobs.has(file.sha256):
                raise InvalidInput(
                    f"{file.path!r} of bundle {bundle[:12]}… is not here; send it first, then submit again"
                )

    def preparation_report(self, bundle: str) -> str:
        """Return what the submitter's machine reports about `data.preparation`; empty where nothing was prepared."""
        files = self._blobs.manifest(bundle).files if bundle else ()
        for file in files:
            if file.path == REPORT and file.size <= MAX_REPORT:
                text = b"".join(self._blobs.read(file.sha256)).decode(errors="replace")
                return one_line("; ".join(text.splitlines()), MAX_TEXT_BYTES)
        return ""

    def changes(self, spec: RunSpec, before: str, bundle: str) -> list[str]:
        """Return the places of the files in which two bundles of a run differ. Raises InvalidInput where examples differ,
        which the learner has to read again as they were."""
        new = set(self._blobs.manifest(bundle).files)
        try:
            old = set(self._blobs.manifest(before).files)
        except NotFound:  # lost with the store; nothing is known of it
            return sorted(file.path for file in new)
        changed = {file.path: file.kind for file in old ^ new}
        data = sorted(path for path, kind in changed.items() if kind == "data")
        if data and not spec.samples:
            raise InvalidInput(
                f"{data[0]!r} is not what it was when the run was submitted; a run that trains on examples keeps them: submit "
                "a new one"
            )
        return sorted(changed)

    @contextlib.contextmanager
    def opened(self, spec: RunSpec, bundle: str, *kinds: Kind) -> Iterator[RunSpec]:
        """Yield the spec with the paths of the bundle's files of some kinds, as long as they stay. Messages of errors have the
        submitter's paths. Raises Unreadable for a file that is gone."""
        if not bundle:
            yield spec
            return
        try:
            manifest = self._blobs.manifest(bundle).subset(*kinds)
            unpacked = BundleCache.of_user().open(manifest, lambda file: self._blobs.read(file.sha256))
        except NotFound as error:
            raise Unreadable(str(error)) from None
        with unpacked:
            try:
                yield localized(spec, manifest, unpacked.root)
            except (SpecError, DataError, Unreadable) as error:
                raise type(error)(with_original_paths(str(error), spec, unpacked.root)) from None

    def open_data(self, spec: RunSpec, bundle: str) -> RunData:
        """Open the data sets of a run, from its bundle where that has them. Opened data stay readable. Raises DataError."""
        with self.opened(spec, bundle, "data") as local:
            return open_data(local)

    async def tidy_up(self) -> None:
        """Remove files that no run needs, now and then."""
        if time.monotonic() - self._tidied_up_s > TIDY_UP_S:
            self._tidied_up_s = time.monotonic()
            await asyncio.to_thread(self._blobs.remove_unused, self._ledger.bundles())
