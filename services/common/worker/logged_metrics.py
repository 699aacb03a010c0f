"""Values that reward functions log: sums and counts that travel with a reward worker's heartbeats as gauges.

Promise: the mean of a step is over all values that came with heartbeats since the step before, whatever the worker.
"""

from __future__ import annotations

from collections.abc import Mapping

SUM, COUNT = "logged_sum/", "logged_count/"
MAX_NAMES = 32
"""Names of one worker; further ones are left out."""


class LoggedMetrics:
    """Sum and number of values by name."""

    def __init__(self) -> None:
        self._metrics: dict[str, tuple[float, int]] = {}

    def add(self, metrics: Mapping[str, tuple[float, int]]) -> None:
        """Add sums and numbers."""
        for name, (total, count) in metrics.items():
            if name in self._metrics or len(self._metrics) < MAX_NAMES:
                before = self._metrics.get(name, (0.0, 0))
                self._metrics[name] = (before[0] + total, before[1] + count)

    def take(self) -> dict[str, tuple[float, int]]:
        """Return sums and numbers by name, and begin anew."""
        taken, self._metrics = self._metrics, {}
        return taken

    def take_gauges(self) -> dict[str, float]:
        """Return them as gauges of a heartbeat, and begin anew."""
        taken = self.take().items()
        sums = {f"{SUM}{name}": total for name, (total, _) in taken}
        return sums | {f"{COUNT}{name}": float(count) for name, (_, count) in taken}

    def add_gauges(self, gauges: Mapping[str, float]) -> dict[str, float]:
        """Add the sums and numbers among a heartbeat's gauges; return the other gauges."""
        for gauge, total in gauges.items():
            name = gauge.removeprefix(SUM)
            count = gauges.get(f"{COUNT}{name}", 0.0)
            if gauge.startswith(SUM) and count >= 1:
                self.add({name: (total, int(count))})
        return {gauge: value for gauge, value in gauges.items() if not gauge.startswith((SUM, COUNT))}

    def means(self) -> dict[str, float]:
        """Return `logged/NAME` for each name: the mean of its values."""
        return {f"logged/{name}": total / count for name, (total, count) in self._metrics.items()}
