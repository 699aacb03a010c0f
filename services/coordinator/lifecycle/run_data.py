"""Opens the data sets of a run when it is submitted, to check them, and again when it starts. Checks its bundle at
submission, unpacks it if the coordinator reads data from it, and keeps it while a run has it. Of the events about a
run's state, the newest one that names a bundle decides which bundle the run has. The spec of a run without a bundle has
paths of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from paceline.bundle.allowed import refusal_of_bundle, refusal_of_files
from paceline.bundle.cache import BundleCache
from paceline.bundle.manifest import REPORT, Kind, for_submitter, localized
from paceline.data.examples import exchange_of, open_examples, report_of
from paceline.data.prompts import PromptSource, open_prompts
from paceline.errors import Busy, DataError, InvalidInput, NotFound, SpecError, Unreadable
from paceline.services.coordinator.blobs import BlobStore
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.text_limits import MAX_TEXT_BYTES, one_line
from paceline.spec import RunSpec

NUM_FIRST = 8
"""Number of rows whose texts are checked when a run is submitted."""


class RunData(NamedTuple):
    num_rows: int
    """Number of rows of the training data."""
    prompts: PromptSource | None = None
    """Training prompts; None for a run on examples, because the learner reads those."""
    validation: PromptSource | None = None
    report: str = ""
    """Format of the training data, and the used and ignored columns, for people."""
    first: tuple[Any, ...] = ()
    """Prompts of the first rows, and completions if they are examples: texts or messages."""


def open_data(spec: RunSpec) -> RunData:
    """Open training and validation prompts; only check examples, because the learner reads them. Raises DataError."""
    data = spec.data
    if spec.examples is not None:
        rows = open_examples(spec)
        if spec.examples.validates and data.validation is not None:
            open_examples(spec, validation=True)
        shown = [rows[index] for index in range(min(len(rows), NUM_FIRST))]
        shown = [row["traces"][0] for row in shown] if spec.trains_traces else shown
        parts = (part for row in shown for part in exchange_of(row, spec)[:2] if part is not None)
        return RunData(len(rows), report=report_of(rows, spec), first=tuple(parts))
    has_tools = spec.prompts_have_tools
    prompts = open_prompts(spec.data, spec.seed, has_tools=has_tools)
    validation = (
        open_prompts(spec.data, spec.seed, validation=True, has_tools=has_tools) if spec.data.validation else None
    )
    first = tuple(prompts.draw(cursor)[0] for cursor in range(min(len(prompts), NUM_FIRST)))
    return RunData(len(prompts), prompts, validation, prompts.format, first)


def changed_data_warnings(before: str, spec: RunSpec, prompts: PromptSource | None) -> list[str]:
    """Return a warning if the prompts differ from their fingerprint `before`, which is empty if none was recorded."""
    if prompts is None or before in ("", prompts.fingerprint):
        return []
    return [
        f"the data set {spec.data.train!r} has changed since the run began ({before}; now {prompts.fingerprint}): "
        "further prompts are drawn from the changed data"
    ]


MAX_OPENINGS = 16
OPENING_S = 1800.0
"""Longest wait of a caller until the data sets of a run are open; it includes the copying of a store's large files."""
T = TypeVar("T")


class StillOpening(Unreadable):
    """The data sets of a run did not open in time; the thread that opens them continues."""


def on_own_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work`, which may wait for a server that never answers. The thread is not from the event loop's pool, so it
    delays neither other work nor the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    done.add_done_callback(lambda future: future.exception())  # perhaps nobody fetches it

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = done.set_result, work()
        except BaseException as error:
            outcome = done.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(outcome[0], outcome[1])

    threading.Thread(target=run, name="data", daemon=True).start()
    return done


class Openings:
    """Openings of data sets by name: those in progress, and those whose outcome nobody has fetched. An opening counts
    until its thread ends, so the number of threads is bounded."""

    def __init__(self) -> None:
        self._threads: dict[Hashable, asyncio.Future[Any]] = {}

    async def open(self, name: Hashable, work: Callable[[], T], limit_s: float = OPENING_S) -> T:
        """Run `work` on a thread, or join the opening that an earlier call of this name began; return the result.
        Raises the error of `work`; Busy if too many openings are in progress; StillOpening after `limit_s` seconds: a
        later call joins the opening."""
        thread = self._threads.get(name)
        if thread is None:
            self._make_room()
            thread = self._threads[name] = on_own_thread(work)
        await asyncio.wait((thread,), timeout=limit_s)  # the thread continues if this caller is cancelled
        if not thread.done():
            raise StillOpening("the data sets are still being opened; check that the servers of their URLs answer")
        if self._threads.get(name) is thread:
            del self._threads[name]
        result: T = thread.result()
        return result

    def drop(self, is_needed: Callable[[Any], bool]) -> None:
        """Drop the outcomes that nobody needs, with their descriptors."""
        self._threads = {name: each for name, each in self._threads.items() if not each.done() or is_needed(name)}

    def _make_room(self) -> None:
        """Delete the oldest outcome that no client has fetched, if there are `MAX_OPENINGS`. Raises Busy."""
        if len(self._threads) < MAX_OPENINGS:
            return
        done = next((name for name, thread in self._threads.items() if thread.done()), None)
        if done is None:
            raise Busy(f"the data sets of {len(self._threads)} runs are being opened; submit again later")
        del self._threads[done]


TIDY_UP_S = 600.0
MAX_REPORT = 1 << 14
"""Largest number of bytes of a report on prepared data; a larger report is left out."""


@contextlib.contextmanager
def messages_for_submitter(spec: RunSpec, local: RunSpec, root: Path | None) -> Iterator[None]:
    """Replace the messages of errors about data by those of `for_submitter`."""
    try:
        yield
    except (SpecError, DataError, Unreadable) as error:
        raise type(error)(for_submitter(str(error), spec, local, root)) from None


class RunBundles:
    """The bundles in one `BlobStore`. Call methods that take a digest on threads, because they block; the other methods
    use the ledger."""

    def __init__(self, ledger: Ledger, blobs: BlobStore, functions_from: Sequence[Path] = ()):
        self._ledger, self._blobs, self._functions_from = ledger, blobs, functions_from
        self._tidied_up_s = time.monotonic()

    def check(self, spec: RunSpec, bundle: str) -> None:
        """Check that the functions are allowed and that the bundle is complete. Raises SpecError, InvalidInput."""
        allowed = () if bundle else self._functions_from
        if why := refusal_of_files(spec, allowed) if not (bundle and self._functions_from) else "":
            raise SpecError(why)
        if not bundle:
            return
        try:
            manifest = self._blobs.manifest(bundle)
        except NotFound:
            raise InvalidInput(f"bundle {bundle[:12]}… is missing; send its files first, then submit again") from None
        if why := refusal_of_bundle(spec, manifest, self._functions_from):
            raise SpecError(f"the functions are not allowed: {why}")
        for file in manifest.files:
            if not self._blobs.has(file.sha256):
                raise InvalidInput(
                    f"{file.path!r} of bundle {bundle[:12]}… is missing; send it first, then submit again"
                )

    def preparation_report(self, bundle: str) -> str:
        """Return the submitter's report on `data.preparation`; empty if nothing was prepared."""
        files = self._blobs.manifest(bundle).files if bundle else ()
        for file in files:
            if file.path == REPORT and file.size <= MAX_REPORT:
                text = b"".join(self._blobs.read(file.sha256)).decode(errors="replace")
                return one_line("; ".join(text.splitlines()), MAX_TEXT_BYTES)
        return ""

    def changes(self, spec: RunSpec, before: str, bundle: str) -> list[str]:
        """Return the paths of the files in which two bundles of a run differ. Raises InvalidInput if examples differ,
        because the learner must read the same examples again."""
        new = set(self._blobs.manifest(bundle).files)
        try:
            old = set(self._blobs.manifest(before).files)
        except NotFound:  # lost with the blobs, so the bundles cannot be compared
            return sorted(file.path for file in new)
        changed = {file.path: file.kind for file in old ^ new}
        data = sorted(path for path, kind in changed.items() if kind == "data")
        if data and not spec.samples:
            raise InvalidInput(
                f"{data[0]!r} has changed since the run was submitted, but a run that trains on examples cannot change "
                "its data; submit a new run"
            )
        return sorted(changed)

    @contextlib.contextmanager
    def opened(self, spec: RunSpec, bundle: str, *kinds: Kind) -> Iterator[RunSpec]:
        """Unpack the bundle's files of some kinds, and yield the spec with their paths, which are valid only
        inside the context. Error messages have the submitter's paths. Raises Unreadable for a missing file."""
        if not bundle:
            with messages_for_submitter(spec, spec, None):
                yield spec
            return
        try:
            manifest = self._blobs.manifest(bundle).subset(*kinds)
            unpacked = BundleCache.of_user().open(manifest, lambda file: self._blobs.read(file.sha256))
        except NotFound as error:
            raise Unreadable(str(error)) from None
        local = localized(spec, manifest, unpacked.root)
        with unpacked, messages_for_submitter(spec, local, unpacked.root):
            yield local

    def open_data(self, spec: RunSpec, bundle: str) -> RunData:
        """Open the data sets of a run, from its bundle if it has them. Opened data stay readable. Raises DataError."""
        with self.opened(spec, bundle, "data") as local:
            return open_data(local)

    async def tidy_up(self) -> None:
        """Remove files that no run needs, if this is due."""
        if time.monotonic() - self._tidied_up_s > TIDY_UP_S:
            self._tidied_up_s = time.monotonic()
            await asyncio.to_thread(self._blobs.remove_unused, self._ledger.bundles())
