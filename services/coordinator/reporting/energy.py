"""Energy of the GPUs by step, from the counters in the members' gauges. Pure.

A counter is that of a GPU, whoever reports it, so a GPU of several members counts once. A GPU that is new, or whose driver was loaded
anew, counts from its second reading on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.host.gpu_gauges import ENERGY, XID

MAX_GPUS = 10_000


class Energy:
    """The counters at the step before."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def metrics(self, members: Iterable[Mapping[str, float]], trained_tokens: float) -> dict[str, float]:
        """Return the energy since the last call in joules, and that for each trained token; nothing without GPUs."""
        now: dict[str, float] = {}
        for gauges in members:
            for name, value in gauges.items():
                if name.startswith(ENERGY) and (name in now or len(now) < MAX_GPUS):
                    now[name] = max(value, now.get(name, value))
        known = [value - self._before[name] for name, value in now.items() if name in self._before]
        self._before |= now
        if not known:
            return {}
        joules = sum(value for value in known if value > 0)
        found = {"gpu_energy_j": joules}
        return found | ({"joules_per_trained_token": joules / trained_tokens} if trained_tokens > 0 else {})


def is_added_up(gauge: str) -> bool:
    """Return whether a gauge of members means something as a sum over them."""
    return gauge != XID and not gauge.startswith(ENERGY)
