"""One attempt to bring a version to a member: its phases, its deadlines and its result.

The phases are `pack`, `offer`, `form` (without a link), `transfer` (entered again for each bucket) and `answer`. The deadline
is the longest silence: each phase moves it, and while the member answers each of its reports does, up to a bound that
grows with the bytes.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from learner.weights.publish_result import Failure, PublishResult
from learner.weights.staged import StagedWeights
from paceline.weights.link import WeightLink
from paceline.weights.manifest import longest_s
from paceline.weights.shared_memory_link import SharedLink


@dataclass
class Transfer:
    """One attempt in progress. Written by its thread, read by the link's, both under the link's condition."""

    staged: StagedWeights
    attempt: int
    link: WeightLink | SharedLink | None
    phase: str = "pack"
    deadline: float = math.inf
    last_deadline: float = math.inf
    """Limit of the deadline, however often the member reports."""
    heard: bool = False
    """True when the member has reported work on this version: it has the offer, and will answer."""
    phase_started: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each phase that has ended."""
    size_bytes: int = 0
    failure: Failure = ""
    error: str = ""

    def enter(self, phase: str, max_wait_s: float) -> None:
        """End the current phase, and begin `phase` with a new deadline."""
        now = time.monotonic()
        spent = self.seconds.get(self.phase, 0.0) + now - self.phase_started
        self.seconds[self.phase] = spent
        self.phase, self.phase_started = phase, now
        self.deadline = now + max_wait_s
        if phase == "answer":
            self.last_deadline = now + longest_s(max_wait_s, self.size_bytes)

    @property
    def left_s(self) -> float:
        """Seconds until the attempt is given up."""
        return min(self.deadline, self.last_deadline) - time.monotonic()

    def result(
        self, member_id: str, epoch: int, answer: tuple[bool, str] | None, max_wait_s: float
    ) -> PublishResult:
        """Return the result, with the member's `answer` if it came: (whether it serves the version, its message)."""
        seconds = dict(self.seconds)
        seconds[self.phase] = seconds.get(self.phase, 0.0) + time.monotonic() - self.phase_started
        silent: Failure = "silent" if self.phase == "answer" else "link"
        failure = self.failure or ("link" if self.error else silent)
        error = self.error or f"{self.phase}: nothing within {max_wait_s} s"
        if not self.error and self.last_deadline < self.deadline:
            error = (
                f"answer: not loaded {seconds[self.phase]:.0f} s after the last byte, though still working"
            )
        if answer is not None:
            failure = "" if answer[0] else "refused"
            error = "" if answer[0] else f"the member refused: {answer[1]}"
        return PublishResult(
            member_id,
            epoch,
            self.attempt,
            self.staged.version,
            ok=answer is not None and answer[0],
            form_s=seconds.get("form", 0.0),
            transfer_s=seconds.get("transfer", 0.0),
            ack_s=seconds.get("answer", 0.0),
            size_bytes=self.size_bytes,
            failure=failure,
            error=error,
        )
