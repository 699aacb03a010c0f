"""The faults of services, and a seeded schedule of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from lies import LIES

ROLES = {"rollout": 2, "reward": 2, "learner": 1, "coordinator": 1}
"""Number of services of each role in a campaign."""

KINDS = {
    **{"kill": 6, "pause": 4, "term": 1, "full": 1},
    **{"cut": 2, "drop": 2, "delay": 1, "truncate": 1, "duplicate": 1},
    "corrupt": 2,
    "lie": 2,
}
"""SIGKILL; SIGSTOP with SIGCONT later; SIGTERM; the disk of ledger, checkpoints and logs full to the last byte for a while;
what a link suffers for a while (harm.py); a bit that the disk changes (corruption.py); a rollout worker that
lies (liar.py). The numbers say how often, in proportion."""

ON_REQUEST = ("full", "corrupt")
"""Kinds that a campaign has only when they are asked for."""

FILES = ("segment", "checkpoint", "manifest", "sqlite", "export")
"""Files in which a bit is changed; the last belongs to an earlier run."""

LINKS = {
    "control": ("cut", "drop", "delay", "truncate"),
    "exchange": ("cut", "drop", "delay", "truncate", "duplicate"),
    "network": ("drop", "delay"),
}
"""Faults of each link: the proxies before the coordinator's two ports, which every worker uses, and the network of the
rollout workers, where they have one of their own (network.py)."""

UNNOTICED_S = 6.0
"""A changed bit is not put right before whoever was killed for it is back."""

PAUSES_S = (0.5, 3.0, 7.0, 13.0)
"""The last is longer than the heartbeat time-out: such a worker is given up and wakes as a stranger."""


@dataclass(frozen=True)
class Fault:
    """One fault."""

    after_s: float
    """Since the fault before it."""
    kind: str
    role: str
    """A service's; a link's, for what meets every worker behind it; `disk`; `liar`."""
    index: int
    """Of the service; of the lie in `LIES`."""
    lasts_s: float = 0.0
    """Of a pause, a full disk, or what a link suffers."""

    def __str__(self) -> str:
        if self.kind == "lie":
            return f"lie about {LIES[self.index]}"
        lasts = f" for {self.lasts_s:g} s" if self.lasts_s else ""
        return f"{self.kind} {self.role}-{self.index}{lasts}"


def schedule(
    seed: int,
    roles: tuple[str, ...] = (),
    kinds: tuple[str, ...] = (),
    sizes: dict[str, int] = ROLES,
    pace: float = 1.0,
    links: tuple[str, ...] = ("control", "exchange"),
) -> Iterator[Fault]:
    """Faults without end; the same arguments give the same ones. Every role (of `roles`, if any are named) comes up
    equally often in the long run, and so does every service of it, of which there are as many as `sizes` says, and every link
    of `links` that can suffer what is to happen. Times between faults are `pace` times as long. Without `kinds`, all but
    those of ON_REQUEST."""
    rng = random.Random(seed)
    weights = {
        kind: weight for kind, weight in KINDS.items() if kind in kinds or (not kinds and kind not in ON_REQUEST)
    }
    while True:
        order = list(roles or ROLES)
        rng.shuffle(order)
        for role in order:
            kind = rng.choices(list(weights), list(weights.values()))[0]
            after_s = pace * rng.uniform(0.2, 2.5)
            lasts_s = 0.0 if kind in ("kill", "term") else rng.choice(PAUSES_S)
            able = [link for link in links if kind in LINKS[link]]
            if able:
                yield Fault(after_s, kind, rng.choice(able), 0, lasts_s)
            elif kind == "lie":
                yield Fault(after_s, kind, "liar", rng.randrange(len(LIES)), lasts_s)
            elif kind == "full":
                yield Fault(after_s, kind, "disk", 0, lasts_s)
            elif kind == "corrupt":
                yield Fault(after_s, kind, rng.choice(FILES), 0, UNNOTICED_S + lasts_s)
            else:
                yield Fault(after_s, kind, role, rng.randrange(sizes[role]), lasts_s)
