"""Strangers that this process has refused, until somebody takes them to the audit log: summed, and bounded whatever comes.

Equal refusals (of one host, with one attempt, caller and reason) are one, with their number. The first is taken at once; equal later
ones are summed over the pauses, one after the other, so that a program that tries for ever costs little. Beyond MAX_KINDS different
ones, further ones are counted together. Any thread; nothing here waits, and nothing that a caller sends raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.address import FORM
from protos.paceline.v1 import worker_pb2

PAUSES_S = (60.0, 600.0, 3600.0)
MAX_KINDS = 64
MAX_AT_ONCE = 32
"""Refusals in one message."""
MAX_COUNT = 1_000_000
MAX_NAME, MAX_REASON = 120, 300
"""Characters of the reason, and of all other texts."""
HANDSHAKE = "tls/handshake"
WHY_NO_HANDSHAKE = "its handshake came to nothing: TLS refused it, or the peer left before it called"
SEVERAL = "one of several kinds: "
"""Beginning of the reason where a refusal stands for others of further kinds."""
Key = tuple[str, ...]
OTHERS: Key = ()


@dataclass
class _Sum:
    next_s: float
    """Time from which it may be taken."""
    num_taken: int = 0
    count: int = 0
    newest: worker_pb2.Refusal = field(default_factory=worker_pb2.Refusal)


class RefusalSums:
    """The refusals of one process."""

    def __init__(
        self, pauses_s: Sequence[float] = PAUSES_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pauses_s, self._clock = pauses_s, clock
        self._lock = threading.Lock()
        self._sums: dict[Key, _Sum] = {}

    def note(self, what: str, result: str, address: str, why: str, *, who: str = "", count: int = 1) -> None:
        """Take a refusal. `result` is the name of a gRPC status, `address` the caller's, host:port, and `who` its name by its
        token."""
        refusal = worker_pb2.Refusal(
            what=_text(what),
            result=_text(result),
            address=_text(address),
            who=_text(who),
            why=_text(why, MAX_REASON),
            count=max(1, min(count, MAX_COUNT)),
        )
        self._add(refusal)

    def note_handshake(self, address: str, count: int = 1) -> None:
        """Take connections to a gRPC port, from one address, whose TLS handshake was refused. The address is empty where it is
        unknown."""
        self.note(HANDSHAKE, "UNAUTHENTICATED", address, WHY_NO_HANDSHAKE, count=count)

    def add(self, refusals: worker_pb2.Refusals) -> None:
        """Take those of another process, as a host's agent sends them to a worker."""
        for each in refusals.refusals[:MAX_AT_ONCE]:
            self.note(each.what, each.result, each.address, each.why, who=each.who, count=each.count)

    def take(self, *, last: bool = False) -> worker_pb2.Refusals | None:
        """Return refusals that are due, MAX_AT_ONCE at most; None where there are none. `last` returns all that wait."""
        taken = worker_pb2.Refusals()
        with self._lock:
            now_s = self._clock()
            for key, found in list(self._sums.items()):
                if found.count and (last or now_s >= found.next_s):
                    taken.refusals.append(found.newest)
                    taken.refusals[-1].count = found.count
                    found.next_s = now_s + self._pauses_s[min(found.num_taken, len(self._pauses_s) - 1)]
                    found.num_taken, found.count = found.num_taken + 1, 0
                    if len(taken.refusals) == MAX_AT_ONCE:
                        break
                elif not found.count and now_s >= found.next_s + self._pauses_s[-1]:
                    del self._sums[key]
        return taken if taken.refusals else None

    def put_back(self, refusals: worker_pb2.Refusals) -> None:
        """Take back what could not be sent, to be taken at once."""
        for refusal in refusals.refusals:
            self._add(refusal, at_once=True)

    def _add(self, refusal: worker_pb2.Refusal, *, at_once: bool = False) -> None:
        key: Key = (refusal.what, refusal.result, host_of(refusal.address), refusal.who, refusal.why)
        with self._lock:
            if key not in self._sums and not self._has_room():
                key = OTHERS
                refusal.why = SEVERAL + refusal.why.removeprefix(SEVERAL)
            found = self._sums.setdefault(key, _Sum(self._clock()))
            found.count = min(MAX_COUNT, found.count + refusal.count)
            found.newest = refusal
            if at_once:
                found.next_s = self._clock()

    def _has_room(self) -> bool:
        """Return whether another kind fits; one that nothing waits of makes room."""
        if len(self._sums) < MAX_KINDS:
            return True
        quiet = next((key for key, found in self._sums.items() if key and not found.count), None)
        if quiet is not None:
            del self._sums[quiet]
        return quiet is not None


def _text(text: str, limit: int = MAX_NAME) -> str:
    """Return a text as a message can carry it."""
    return text[:limit].encode("utf-8", "replace").decode()


def host_of(address: str) -> str:
    """Return the host of host:port; other texts unchanged."""
    found = FORM.fullmatch(address)
    return found[1] if found else address
