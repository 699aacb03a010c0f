"""What the episodes of a worker did, as sums since its start: the service reports them as gauges."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class EpisodeCounts:
    """Sums since the start of a run on this worker."""

    samples: int = 0
    """Samples that were finished here, given up ones not among them."""
    turns: int = 0
    """Turns that were recorded."""
    rows: int = 0
    """Rows of the finished samples."""
    bridge_breaks: int = 0
    """Turns whose conversation could not be extended token by token, so that a new row began."""
    tool_calls: int = 0
    tool_errors: int = 0
    """Calls of tools that raised, whose names are unknown, or that could not be read."""
    truncated: int = 0
    """Finished samples that a limit ended."""
    failures: int = 0
    """Lives that ended by a fault of the environment."""
    given_up: int = 0
    """Samples that were given up."""
    replayed: int = 0
    """Lives that went on from their record, by running the recorded calls again."""
    restored: int = 0
    """Lives that went on from the saved state of their environment."""
    restarted: int = 0
    """Lives that could do neither, and whose turns were dropped."""
    environment_s: float = 0.0
    """Seconds in which episodes ran user code."""

    def values(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items()}
