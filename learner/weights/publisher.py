"""Publishing weights to the rollout members, over one link for each. Runs on rank 0 of the learner.

Promise: `stage` returns at once whatever the members do. One thread for each member brings it to the newest staged version;
versions that a newer one replaced before they began are skipped; a member that fails, stops or dies is reported and
tried again with a fresh link while it is in the roster, without an effect on the others. `close` does not wait for a
stuck member.

The control plane belongs to the caller: `send_offer` must bring the offer to the member (the links' threads call it, and it
should return within max_wait_s), and the member's answer must come back through `acknowledge`.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import torch

from learner.weights.member_sender import LinkHistory, LinkSettings, MemberSender
from learner.weights.publish_result import PublishResult
from learner.weights.staged import StagedWeights
from paceline.address import is_loopback
from paceline.errors import Conflict
from paceline.groups import Version
from paceline.weights.link import reachable_from_here, serve_rendezvous
from paceline.weights.manifest import Algorithm
from paceline.weights.offers import LinkOffer

__all__ = ["PublishResult", "Publisher"]

CLOSE_WAIT_S = 2.0
LEAVE_S = 0.5
"""Of it for threads that wait for no member."""
MAX_HISTORIES = 4096
"""Histories of members that left and may come back; the oldest is dropped first."""


class Publisher:
    """Sender of staged versions to members.

    The rendezvous listens on `bind_host`, and members reach this machine at `advertise_host` (default: the same); `port` 0
    takes a free one. `allow_plaintext` is the spec's `weights.allow_plaintext_network`. Beyond loopback the tensors' checksums are SHA-256, because the offer's checksums are then the
    only proof that the bytes are the learner's.
    """

    def __init__(
        self,
        *,
        run_id: str,
        send_offer: Callable[[LinkOffer], None],
        on_result: Callable[[PublishResult], None],
        bucket_bytes: int,
        max_wait_s: float,
        bind_host: str = "127.0.0.1",
        advertise_host: str | None = None,
        port: int = 0,
        backend: str = "gloo",
        allow_plaintext: bool = False,
    ) -> None:
        host = advertise_host or reachable_from_here(bind_host)
        self._rendezvous, rendezvous_port = serve_rendezvous(bind_host, port, max_wait_s)
        self.rendezvous_address = (host, rendezvous_port)
        """Host and port of the rendezvous, as members reach it."""
        self._bucket_bytes = bucket_bytes
        self._algorithm: Algorithm = "xxh3_64" if is_loopback(host) else "sha256"
        self._settings = LinkSettings(
            run_id=run_id,
            backend=backend,
            host=host,
            rendezvous_host=reachable_from_here(bind_host),
            rendezvous_port=rendezvous_port,
            # A publisher that starts again on the same port must not find keys or members of its predecessor.
            prefix=f"{run_id}/{secrets.token_hex(8)}",
            max_wait_s=max_wait_s,
            allow_plaintext=allow_plaintext,
            send_offer=send_offer,
            on_result=on_result,
        )
        self._lock = threading.Lock()
        self._links: dict[str, MemberSender] = {}
        self._before: dict[str, LinkHistory] = {}
        """Histories of ended links, by member."""
        self._left: list[MemberSender] = []
        self._staged: StagedWeights | None = None
        self._closed = False

    def set_members(
        self, epoch: int, member_ids: Iterable[str], held: Mapping[str, Version] | None = None
    ) -> None:
        """Make exactly these members the roster of number `epoch`: end the links of members that leave, and send the staged
        version to members that join.

        A member that stays keeps its link. `held` has the versions that joining members hold already. Return at once.
        """
        wanted = set(member_ids)
        with self._lock:
            self._check_open()
            for member_id in self._links.keys() - wanted:
                self._drop(member_id)
            for member_id in wanted - self._links.keys():
                link = MemberSender(
                    self._settings, member_id, epoch, self._before.get(member_id, LinkHistory())
                )
                link.held = held.get(member_id) if held else None
                self._links[member_id] = link
                if self._staged is not None:
                    link.publish(self._staged)
                link.start()
            for link in self._links.values():
                link.epoch = epoch

    def stage(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make `version` the one for every member. Return at once, without waiting for a member.

        `tensors` belong to the publisher from now on, and must not be written to again (`gather_weights` makes such a
        copy). Raises Conflict when `version` is not newer.
        """
        with self._lock:
            self._check_open()
            if self._staged is not None and version <= self._staged.version:
                raise Conflict(f"version {tuple(version)} is staged after {tuple(self._staged.version)}")
            self._staged = StagedWeights(
                version, tensors, bucket_bytes=self._bucket_bytes, algorithm=self._algorithm
            )
            for link in self._links.values():
                link.publish(self._staged)

    def acknowledge(self, member_id: str, version: Version, ok: bool, message: str = "") -> None:
        """Take the member's answer that it serves `version`, or why not. Ignore unknown members: they have left."""
        with self._lock:
            link = self._links.get(member_id)
        if link is not None:
            link.answer(version, ok, message)

    def progress(self, member_id: str, version: Version) -> None:
        """Note that the member still works on `version`."""
        with self._lock:
            link = self._links.get(member_id)
        if link is not None:
            link.progress(version)

    def interrupt(self, reason: str) -> None:
        """Begin every transfer again whose offer may have been lost while the control plane was away."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.interrupt(reason)

    def acknowledged(self) -> dict[str, Version | None]:
        """Return the version that each member of the roster acknowledged last."""
        with self._lock:
            return {member_id: link.held for member_id, link in self._links.items()}

    def close(self) -> None:
        """End all links. Wait a moment for threads that can end, never for a stuck member. May be called twice."""
        with self._lock:
            self._closed = True
            for member_id in list(self._links):
                self._drop(member_id)
            left, self._left = self._left, []
        now_s = time.monotonic()
        deadline = now_s + CLOSE_WAIT_S
        # A thread that is about to connect to the rendezvous would try for CONNECT_TIMEOUT if it were gone, and abort a
        # process that ends meanwhile. With it, those that wait for a peer end at once.
        for link in left:
            link.join(now_s + LEAVE_S)
        with self._lock:
            # Without its server every wait of a link that is being formed ends now.
            self._rendezvous = None
        for link in left:
            link.join(deadline)

    def _drop(self, member_id: str) -> None:
        link = self._links.pop(member_id)
        link.leave()
        self._before.pop(member_id, None)
        self._before[member_id] = link.history
        if len(self._before) > MAX_HISTORIES:
            del self._before[next(iter(self._before))]
        self._left = [old for old in self._left if not old.join(0.0)] + [link]

    def _check_open(self) -> None:
        if self._closed:
            raise Conflict("this publisher is closed")
