"""Receiving weights in the rollout process, while it samples with its current ones.

Promise: new weights reach the engine whole or not at all. A version is received into a segment of host memory that lives
for the next versions too, every tensor's checksum and the layout are compared while it arrives, then `on_weights` swaps
it in, and only then is it acknowledged. Where the engine's workers compare checksums, each of its part, this process
does not. A sender that dies, stops or sends wrong bytes has no effect: the old weights stay in use.

Every link has a thread, which waits for offers of its prefix, for buckets (each with a time-out) and for `on_weights`.
`offer` never waits. An offer with another prefix makes a new link and abandons the old thread, wherever it is stuck;
its further bytes are thrown away. Swaps happen one at a time and only forward.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from paceline.errors import Conflict, PacelineError, Unavailable
from paceline.groups import Version
from paceline.rate_limited_log import unforeseen
from paceline.tracing import span, version_traceparent
from paceline.weights.host_segment import HostSegment
from paceline.weights.host_weights import HostWeights, State
from paceline.weights.link import MEMBER, WeightLink, first_line, form_link
from paceline.weights.manifest import Phase, WeightManifest, WeightProgress, longest_s
from paceline.weights.offers import LinkOffer
from paceline.weights.packing import check_fits
from paceline.weights.segment_pair import SegmentPair
from paceline.weights.shared_memory_link import SharedLink
from paceline.weights.verification import Check

log = logging.getLogger(__name__)


class WeightReceiver:
    """One member's receiving side.

    `on_weights(version, weights)` returns when the engine samples with a copy of the weights, whose memory then takes a later
    version; an exception refuses the version. `on_ack(version, ok, message)` sends the answer to the learner.
    `on_progress(version, received_bytes)` is called after each bucket. All three are called from the links' threads.
    `host` is the address at which the learner reaches this machine. With `verify` False `on_weights` gets weights that it
    has to verify itself. `allow_plaintext` is the spec's `weights.allow_plaintext_network`.
    """

    def __init__(
        self,
        *,
        run_id: str,
        max_wait_s: float,
        on_weights: Callable[[Version, HostWeights], None],
        on_ack: Callable[[Version, bool, str], None],
        on_progress: Callable[[Version, int], None] | None = None,
        host: str = "127.0.0.1",
        verify: bool = True,
        allow_plaintext: bool = False,
    ) -> None:
        self._run_id = run_id
        self._max_wait_s = max_wait_s
        self._on_weights = on_weights
        self._on_ack = on_ack
        self._on_progress = on_progress
        self._host = host
        self._verify = verify
        self._allow_plaintext = allow_plaintext
        self._lock = threading.Lock()
        self._swap = threading.Lock()
        self._held: Version | None = None
        self._held_manifest: WeightManifest | None = None
        self._current: _Link | None = None
        self._segments = SegmentPair()
        self._at_work: dict[_Link, WeightProgress] = {}
        self._closed = False

    @property
    def held(self) -> Version | None:
        """The last version that the engine got; None before the first."""
        return self._held

    @property
    def at_work(self) -> list[WeightProgress]:
        """Return the versions that are received or loaded now, by abandoned links too."""
        with self._lock:
            return list(self._at_work.values())

    def offer(self, offer: LinkOffer) -> None:
        """Take an offer; the newest wins. Return at once: every outcome goes to `on_ack`.

        Raises WireError for an invalid offer or manifest, and Conflict after `close`.
        """
        offer.check()
        manifest = WeightManifest.from_bytes(offer.manifest)
        with self._lock:
            if self._closed:
                raise Conflict("this receiver is closed")
            answer = self._answer_without_receiving(offer, manifest)
            if answer is None:
                link = self._current
                if link is not None and link.overtook(offer):
                    log.info("weight offer %s attempt %d came late", offer.version, offer.attempt)
                    return
                if link is None or link.prefix != offer.prefix:
                    self._supersede()
                    link = self._current = _Link(self, offer)
                link.put(offer, manifest)
                return
        threading.Thread(target=self._acknowledge, args=(offer.version, *answer), daemon=True).start()

    def leave_epoch(self) -> None:
        """Drop the link, whatever it does; the current weights stay in use, and the next offer makes another link."""
        with self._lock:
            self._supersede()

    def close(self) -> None:
        """Take no more offers and drop the link, without waiting."""
        with self._lock:
            self._closed = True
            self._supersede()
        self._segments.close()

    def _supersede(self) -> None:
        if self._current is not None:
            self._current.leave()
        self._current = None

    def _answer_without_receiving(
        self, offer: LinkOffer, manifest: WeightManifest
    ) -> tuple[bool, str] | None:
        if offer.run_id != self._run_id:
            return False, f"offer is of run {offer.run_id!r}, this member serves {self._run_id!r}"
        if self._held is None or self._held_manifest is None:
            return None
        if offer.version == self._held and manifest.content_hash == self._held_manifest.content_hash:
            return True, "already held"
        if offer.version <= self._held:
            return False, f"offered {tuple(offer.version)}, but {tuple(self._held)} is held"
        if manifest.layout_hash != self._held_manifest.layout_hash:
            return False, (
                f"layout {manifest.layout_hash} differs from {self._held_manifest.layout_hash} of version "
                f"{tuple(self._held)}; a run's layout cannot change"
            )
        return None

    def _take(self, link: _Link, offer: LinkOffer, manifest: WeightManifest) -> None:
        """Receive one offer over `link`, and swap it in. Runs in the link's thread."""
        try:
            self._receive(link, offer, manifest)
        finally:
            with self._lock:
                self._at_work.pop(link, None)

    def _receive(self, link: _Link, offer: LinkOffer, manifest: WeightManifest) -> None:
        self._note(link, offer.version, "receiving", 0)
        check_fits(manifest.total_bytes)
        formed = link.connect(self._max_wait_s, self._host, self._allow_plaintext)
        segment, generation = self._segments.begin(
            max(1, manifest.total_bytes),
            manifest.bucket_bytes,
            self._max_wait_s,
            given_up=lambda: self._current is not link,
        )
        trace = version_traceparent(offer.run_id, offer.version.step)
        try:
            self._fill(link, offer, formed, segment, manifest, trace)
            state: State = "verified" if self._verify else "received"
            self._swap_in(link, offer, HostWeights(segment, generation, manifest, state), trace)
        except BaseException as error:
            # Of a link that failed, something may still write; and of an engine that did not just refuse, something read.
            refused = isinstance(error, PacelineError) and segment.complete_generation == generation
            (self._segments.release if refused else self._segments.discard)(segment)
            raise
        self._segments.release(segment)

    def _fill(
        self,
        link: _Link,
        offer: LinkOffer,
        formed: WeightLink | SharedLink,
        segment: HostSegment,
        manifest: WeightManifest,
        trace: str,
    ) -> None:
        """Receive all bytes, and compare them meanwhile unless the engine does."""
        flat = segment.flat()[: manifest.total_bytes]
        with (
            span("weights.receive", trace, member=offer.member_id, bytes=manifest.total_bytes),
            Check(flat, manifest, None if self._verify else ()) as check,
        ):

            def on_bucket(num_bytes: int) -> None:
                self._note(link, offer.version, "receiving", num_bytes)
                if self._on_progress is not None:
                    self._on_progress(offer.version, num_bytes)
                check.arrived(num_bytes)

            formed.receive(flat, manifest, on_bucket)
            segment.complete()
            self._note(link, offer.version, "received", manifest.total_bytes)
            check.finish()

    def _swap_in(self, link: _Link, offer: LinkOffer, weights: HostWeights, trace: str) -> None:
        # One swap at a time: an abandoned thread may still be inside the engine.
        manifest = weights.manifest
        limit_s = longest_s(self._max_wait_s, manifest.total_bytes)
        if not self._swap.acquire(timeout=limit_s):
            raise Unavailable(f"the engine was busy with an earlier swap for {limit_s:.0f} s")
        try:
            if self._holds(offer, manifest):
                return  # the earlier swap has loaded this version
            with self._lock:
                overtaken = self._current is not link or (
                    self._held is not None and offer.version <= self._held
                )
            if overtaken:
                raise Unavailable("overtaken by a newer offer")
            self._note(link, offer.version, "loading", manifest.total_bytes)
            with span("weights.swap", trace, member=offer.member_id):
                self._on_weights(offer.version, weights)
            with self._lock:
                if offer.run_id == self._run_id:
                    self._held, self._held_manifest = offer.version, manifest
        finally:
            self._swap.release()

    def _holds(self, offer: LinkOffer, manifest: WeightManifest) -> bool:
        with self._lock:
            held = self._held_manifest
            same = offer.run_id == self._run_id and offer.version == self._held
            return same and held is not None and manifest.content_hash == held.content_hash

    def _note(self, link: _Link, version: Version, phase: Phase, received_bytes: int) -> None:
        with self._lock:
            self._at_work[link] = WeightProgress(version, phase, received_bytes)

    def _acknowledge(self, version: Version, ok: bool, message: str) -> None:
        try:
            self._on_ack(version, ok, message)
        except Exception as error:  # of the listener: this thread has to receive further versions
            # The learner gets no answer and tries again after its deadline; this side then answers "already held".
            unforeseen.note("acknowledging weights", error)

    def _failed(self, link: _Link, version: Version, error: Exception) -> None:
        with self._lock:
            was_current = self._current is link
            if was_current:
                self._current = None
        if was_current:
            log.warning("weights %s refused: %s", tuple(version), first_line(error))
            self._acknowledge(version, False, first_line(error))


class _Link:
    """The thread of a prefix, and the newest offer that it has not begun."""

    def __init__(self, receiver: WeightReceiver, first: LinkOffer) -> None:
        self.prefix = first.prefix
        self._receiver = receiver
        self._latest = first
        self._changed = threading.Condition()
        self._waiting: tuple[LinkOffer, WeightManifest] | None = None
        self._left = False
        self._link: WeightLink | SharedLink | None = None
        self._offer = first
        threading.Thread(target=self._run, name=f"weights-{first.attempt}", daemon=True).start()

    def overtook(self, offer: LinkOffer) -> bool:
        """Return whether `offer` is of an earlier session or attempt and the network delivered it late."""
        latest = self._latest
        if offer.session != latest.session:
            return offer.session < latest.session
        return offer.attempt < latest.attempt and offer.version <= latest.version

    def put(self, offer: LinkOffer, manifest: WeightManifest) -> None:
        self._latest = offer
        with self._changed:
            self._waiting = (offer, manifest)
            self._changed.notify_all()

    def leave(self) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def connect(self, max_wait_s: float, host: str, allow_plaintext: bool) -> WeightLink | SharedLink:
        """Return the link of this prefix; the first call forms it."""
        if self._link is None:
            self._link = form_link(
                backend=self._offer.backend,
                store_host=self._offer.store_host,
                store_port=self._offer.store_port,
                prefix=self.prefix,
                rank=MEMBER,
                max_wait_s=max_wait_s,
                host=host,
                allow_plaintext=allow_plaintext,
            )
        return self._link

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            offer, manifest = taken
            try:
                self._receiver._take(self, offer, manifest)
            except Exception as error:  # of torch and the engine too: its text is the reason of the refusal
                if not isinstance(error, PacelineError):
                    unforeseen.note("taking weights", error)
                # A link that failed once may hold half a version; the learner will offer another.
                self._link = None
                self._receiver._failed(self, offer.version, error)
                return
            self._receiver._acknowledge(offer.version, True, "")

    def _next(self) -> tuple[LinkOffer, WeightManifest] | None:
        with self._changed:
            # No deadline: the learner decides when the next version comes. `leave` ends it.
            self._changed.wait_for(lambda: self._left or self._waiting is not None)
            taken, self._waiting = self._waiting, None
            return None if self._left else taken
