"""The secret of the run whose versions are on this host, and the readers on other hosts that have not proved that they know it.

Plans reach the hosts of a run one after the other, so an agent of the same run may ask before this one has the run's secret, or after it
has the next run's. Such a reader is refused, and is no stranger: its proof is compared again with the secrets that come within WAIT_S, and
with those of the last runs. Bounded, whatever readers send. Any thread.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from paceline.weights.hosts.frames import proof

WAIT_S = 10.0
MAX_KEPT = 8
"""Secrets of runs, the newest last."""
MAX_WAITING = 256
"""Refused readers that wait; beyond it the oldest is judged before its time."""
MAX_RUN_ID = 200
PROOF_BYTES = 32
"""Bytes of a proof that can fit."""


@dataclass(frozen=True)
class RefusedReader:
    """A reader whose proof did not fit."""

    address: str
    run_id: str
    nonce: bytes
    given: bytes
    """The proof, or its beginning where it is too long."""
    why: str


class RunSecrets:
    """The secrets of one agent. `on_stranger` gets the readers of no run of this host; it must not block."""

    def __init__(
        self, on_stranger: Callable[[RefusedReader], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_stranger, self._clock = on_stranger, clock
        self._lock = threading.Lock()
        self._run_id = ""
        self._secrets: OrderedDict[str, bytes] = OrderedDict()
        self._refused: deque[tuple[float, RefusedReader]] = deque()
        """Each with the time at which it is judged."""

    def use(self, run_id: str, secret: bytes) -> None:
        """Let the readers of this run in from now on, and no others."""
        with self._lock:
            self._run_id = run_id
            self._secrets[run_id] = secret
            self._secrets.move_to_end(run_id)
            while len(self._secrets) > MAX_KEPT:
                self._secrets.popitem(last=False)

    def admits(self, run_id: str, nonce: bytes, given: bytes) -> bool:
        """Return whether a proof is that of a reader of the present run."""
        with self._lock:
            return run_id == self._run_id and self._fits(run_id, nonce, given)

    def note_refused(self, address: str, run_id: str, nonce: bytes, given: bytes, why: str) -> None:
        """Take a reader at `address` that was refused, with its proof and the reason."""
        reader = RefusedReader(address, run_id[:MAX_RUN_ID], nonce, given[: PROOF_BYTES + 1], why)
        with self._lock:
            self._refused.append((self._clock() + WAIT_S, reader))
            if len(self._refused) > MAX_WAITING:
                self._judge(self._refused.popleft()[1])

    def judge(self) -> None:
        """Judge the readers whose time has passed. To be called every now and then."""
        with self._lock:
            while self._refused and self._refused[0][0] <= self._clock():
                self._judge(self._refused.popleft()[1])

    def _judge(self, reader: RefusedReader) -> None:
        if not self._fits(reader.run_id, reader.nonce, reader.given):
            self._on_stranger(reader)

    def _fits(self, run_id: str, nonce: bytes, given: bytes) -> bool:
        secret = self._secrets.get(run_id, b"")
        return bool(secret) and hmac.compare_digest(proof(secret, nonce), given)
