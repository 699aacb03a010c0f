"""The sending side of one rollout member: a thread that keeps that member at the newest staged version.

The link's thread waits for a newer version, then for its transfer with a deadline (`learner.weights.transfer`), then backs
off after a failure. A member that works on a version gets no other offer until it has answered or fallen silent. The
transfer runs in a second thread, because forming and sending block outside Python and may outlast every time-out; the
link's thread never enters them. A transfer that fails or passes its deadline is abandoned with its process group, and the next
attempt starts with a fresh prefix. No other thread waits for either.

One condition per member guards its state. A version counts as delivered only when the member has answered so.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from learner.weights.publish_result import PublishResult
from learner.weights.staged import StagedWeights
from learner.weights.transfer import Transfer
from paceline.backoff import pause_after
from paceline.errors import PacelineError
from paceline.groups import Version
from paceline.rate_limited_log import unforeseen
from paceline.tracing import span, version_traceparent
from paceline.weights.link import SENDER, WeightLink, first_line, form_link
from paceline.weights.manifest import longest_s
from paceline.weights.offers import LinkOffer
from paceline.weights.shared_memory_link import SharedLink

FIRST_BACKOFF_S = 0.2
MAX_BUSY = 4
"""Versions that a member may be working on at one time."""


@dataclass(frozen=True)
class LinkSettings:
    """Settings of all links of a publisher."""

    run_id: str
    backend: str
    host: str
    """Address of this side and of the rendezvous, as members reach it."""
    rendezvous_host: str
    """Address of the rendezvous, as this process reaches it."""
    rendezvous_port: int
    prefix: str
    """Prefix of the keys in the rendezvous, unique for the publisher; each attempt extends it."""
    max_wait_s: float
    allow_plaintext: bool
    """The spec's `weights.allow_plaintext_network`."""
    send_offer: Callable[[LinkOffer], None]
    on_result: Callable[[PublishResult], None]


@dataclass(frozen=True)
class LinkHistory:
    """State that a member's links pass on to its next one: prefixes must not repeat, a member that was expelled and is
    in the roster again must wait for its back-off, and a backend that could not reach it is not tried again."""

    attempts: int = 0
    failures: int = 0
    """Failed attempts in a row."""
    backend: str = ""
    """Backend of the next link; empty: that of the settings."""


@dataclass
class _Busy:
    last_s: float
    """Latest value of `until_s`; reports cannot extend it further."""
    until_s: float = 0.0


class MemberSender:
    """Sender that keeps one member at the newest version, until `leave`. `before` is the history of its earlier links."""

    def __init__(self, settings: LinkSettings, member_id: str, epoch: int, before: LinkHistory) -> None:
        self._settings = settings
        self.member_id = member_id
        self.epoch = epoch
        self.attempt = before.attempts
        self._failures = before.failures
        self._backend = before.backend or settings.backend
        self.held: Version | None = None
        self._changed = threading.Condition()
        self._newest: StagedWeights | None = None
        self._transfer: Transfer | None = None
        self._busy: dict[Version, _Busy] = {}
        """Versions that the member works on although their attempts were given up."""
        self._answer: tuple[bool, str] | None = None
        self._link: WeightLink | SharedLink | None = None
        self._has_left = False
        self._thread = threading.Thread(target=self._run, name=f"weights-{member_id}", daemon=True)
        self._transfer_threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def publish(self, staged: StagedWeights) -> None:
        """Make `staged` the version for the member. Return at once; a version that has not begun is skipped."""
        with self._changed:
            self._newest = staged
            self._changed.notify_all()

    def answer(self, version: Version, ok: bool, message: str) -> None:
        """Take the member's answer to `version`. A late yes counts too, because the member holds the version."""
        late = None
        with self._changed:
            if self._busy.pop(version, None) is not None:
                self._changed.notify_all()
            transfer = self._transfer
            if transfer is not None and transfer.staged.version == version and self._answer is None:
                self._answer = (ok, message)
                self._changed.notify_all()
            elif ok and not self._has_left and self._is_news(version):
                self.held = version
                late = PublishResult(self.member_id, self.epoch, self.attempt, version, ok=True)
        if late is not None:
            self._report(late)

    def progress(self, version: Version) -> None:
        """Note that the member still works on `version`."""
        with self._changed:
            now, transfer = time.monotonic(), self._transfer
            if transfer is not None and transfer.staged.version == version:
                transfer.heard = True
                if transfer.phase == "answer":
                    transfer.deadline = now + self._settings.max_wait_s
            elif self.held is None or version > self.held:
                size_bytes = self._newest.size_bytes if self._newest is not None else 0
                last_s = now + longest_s(self._settings.max_wait_s, size_bytes)
                busy = self._busy.setdefault(version, _Busy(last_s))
                if len(self._busy) > MAX_BUSY:
                    del self._busy[next(iter(self._busy))]
                busy.until_s = min(now + self._settings.max_wait_s, busy.last_s)

    def interrupt(self, reason: str) -> None:
        """Give up a transfer whose offer may have been lost while the control plane was away, and try again with a fresh link.
        A member that has reported work on this version repeats its answer by itself."""
        with self._changed:
            transfer = self._transfer
            if transfer is None or self._answer is not None or transfer.error:
                return
            transfer.failure = "interrupted"
            if not transfer.heard:
                transfer.error = reason
                self._changed.notify_all()
            elif transfer.phase == "answer":
                transfer.deadline = time.monotonic() + self._settings.max_wait_s

    @property
    def history(self) -> LinkHistory:
        """History for this member's next link."""
        return LinkHistory(self.attempt, self._failures, self._backend)

    def leave(self) -> None:
        """End the link without waiting for anything."""
        with self._changed:
            self._has_left = True
            self._changed.notify_all()

    def join(self, deadline: float) -> bool:
        """Wait for the threads until the monotonic time `deadline`; return False when one is still stuck."""
        for thread in (self._thread, *self._transfer_threads):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in (self._thread, *self._transfer_threads))

    def _run(self) -> None:
        self._back_off()
        while (staged := self._next_version()) is not None:
            result = self._deliver(staged)
            if result is None:
                break
            self._failures = 0 if result.ok else self._failures + 1
            if result.failure in ("link", "refused") and self._backend == "shared":
                self._backend, self._link = "gloo", None  # it may be on another host, which TCP reaches
                result = replace(result, fallback="gloo")
            self._report(result)
            self._back_off()
        self._link = None

    def _next_version(self) -> StagedWeights | None:
        with self._changed:
            while not self._has_left:
                if not self._is_behind():
                    # No deadline: a member may be up to date for as long as a step takes. `leave` ends it.
                    self._changed.wait()
                elif (busy_s := self._busy_s()) > 0:
                    self._changed.wait(busy_s)
                else:
                    return self._newest
            return None

    def _busy_s(self) -> float:
        """Return the seconds for which the member may still work on versions of earlier attempts."""
        return max((busy.until_s - time.monotonic() for busy in self._busy.values()), default=0.0)

    def _is_news(self, version: Version) -> bool:
        """Return whether `version` has been published, and is newer than the member's last known one."""
        published = self._newest is not None and version <= self._newest.version
        return published and (self.held is None or version > self.held)

    def _is_behind(self) -> bool:
        return self._newest is not None and (self.held is None or self._newest.version > self.held)

    def _back_off(self) -> None:
        """Wait after failures in a row for 0.2 s, 0.4 s, … max_wait_s, or until the member has left."""
        if not self._failures:
            return
        seconds = pause_after(self._failures, FIRST_BACKOFF_S, self._settings.max_wait_s)
        with self._changed:
            self._changed.wait_for(lambda: self._has_left, seconds)

    def _deliver(self, staged: StagedWeights) -> PublishResult | None:
        """Make one attempt and return its result; None when the member left during it."""
        with self._changed:
            if self._link is None:
                self.attempt += 1
            transfer = Transfer(staged, self.attempt, self._link, phase_started=time.monotonic())
            self._transfer, self._answer, self._link = transfer, None, None
            thread = threading.Thread(
                target=self._carry, args=(transfer,), name=f"weights-{self.member_id}-send", daemon=True
            )
            self._transfer_threads = [t for t in self._transfer_threads if t.is_alive()] + [thread]
            thread.start()
            self._wait_while(transfer, lambda: self._answer is None and not transfer.error)
            left, answer = self._has_left, self._answer
            if answer is not None and answer[0]:
                self.held = staged.version
                # The answer may arrive shortly before this side's send ends; the link can be used again only after that.
                grace = min(1.0, self._settings.max_wait_s)
                transfer.deadline = min(transfer.deadline, time.monotonic() + grace)
                self._wait_while(transfer, lambda: transfer.phase != "answer" and not transfer.error)
                if transfer.phase == "answer" and not transfer.error:
                    self._link = transfer.link
            self._transfer = None
            if left and answer is None:
                return None
            return transfer.result(self.member_id, self.epoch, answer, self._settings.max_wait_s)

    def _wait_while(self, transfer: Transfer, pending: Callable[[], bool]) -> None:
        while pending() and not self._has_left:
            left_s = transfer.left_s
            if left_s <= 0:
                return
            self._changed.wait(None if left_s == math.inf else left_s)

    def _report(self, result: PublishResult) -> None:
        try:
            self._settings.on_result(result)
        except Exception as error:  # of the listener: the member must not lose its link by it
            unforeseen.note("what follows from a publish", error)

    def _carry(self, transfer: Transfer) -> None:
        """Run the transfer, in its thread: every call in here may block outside Python."""
        try:
            version = transfer.staged.version
            about: dict[str, str | int] = {"member": self.member_id, "attempt": transfer.attempt}
            trace = version_traceparent(self._settings.run_id, version.step)
            with span("weights.prepare", trace, session=version.session, step=version.step):
                manifest, manifest_bytes, flat = transfer.staged.ready()
            transfer.size_bytes = manifest.total_bytes
            self._enter(transfer, "offer")
            offer = self._offer(transfer, manifest_bytes)
            self._settings.send_offer(offer)
            link = transfer.link
            if link is None:
                self._enter(transfer, "form")
                with span("weights.form", trace, epoch=offer.epoch, **about):
                    link = self._form(offer, transfer)
            self._enter(transfer, "transfer")
            with span("weights.transfer", trace, epoch=offer.epoch, bytes=manifest.total_bytes, **about):
                link.send(flat, manifest, lambda _: self._enter(transfer, "transfer"))
            transfer.link = link
            self._enter(transfer, "answer")
        except (
            Exception
        ) as error:  # of torch, the rendezvous and the listener: it fails this attempt, with its text
            if not isinstance(error, PacelineError | RuntimeError | OSError):
                unforeseen.note("bringing weights to a member", error)
            with self._changed:
                transfer.error = f"{transfer.phase}: {first_line(error)}"
                self._changed.notify_all()

    def _enter(self, transfer: Transfer, phase: str) -> None:
        with self._changed:
            transfer.enter(phase, self._settings.max_wait_s)
            self._changed.notify_all()

    def _offer(self, transfer: Transfer, manifest_bytes: bytes) -> LinkOffer:
        settings, version = self._settings, transfer.staged.version
        return LinkOffer(
            run_id=settings.run_id,
            epoch=self.epoch,
            member_id=self.member_id,
            attempt=transfer.attempt,
            backend=self._backend,
            store_host=settings.host,
            store_port=settings.rendezvous_port,
            prefix=f"{settings.prefix}/{self.member_id}/{transfer.attempt}",
            session=version.session,
            step=version.step,
            manifest=manifest_bytes,
        )

    def _form(self, offer: LinkOffer, transfer: Transfer) -> WeightLink | SharedLink:
        return form_link(
            backend=offer.backend,
            store_host=self._settings.rendezvous_host,
            store_port=offer.store_port,
            prefix=offer.prefix,
            rank=SENDER,
            max_wait_s=self._settings.max_wait_s,
            host=self._settings.host,
            allow_plaintext=self._settings.allow_plaintext,
            given_up=lambda: self._transfer is not transfer,
        )
