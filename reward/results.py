"""Result of scoring a group: rewards, or the failure that prevented them. A failure never becomes a zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.groups import FloatArray

FailureKind = Literal["raised", "timeout", "died", "invalid", "unavailable", "killed"]


@dataclass(frozen=True)
class RewardFailure:
    """Reason why a reward function gave no rewards for a group."""

    function: str
    """The function's label."""
    kind: FailureKind
    """`raised`: an exception; `timeout`: the time limit; `died`: the function ended its process; `invalid`: the
    function cannot take the data set's columns, or did not return a finite number or None for each completion. Two
    kinds are not the group's fault: `unavailable`, if a service could not be reached (ConnectionError, TimeoutError, an
    unknown host), if the function's file is missing, or if the function got no processor time; and `killed`, if a
    signal from outside or a crash ended the process."""
    message: str
    """One line for people, with the function's name, the event and its location."""


@dataclass(frozen=True)
class RewardResult:
    """Exactly one of `rewards_CF` and `failure` is set."""

    rewards_CF: FloatArray | None
    """[C, F] finite rewards in the order of the spec; NaN where a function gave None."""
    failure: RewardFailure | None
    """Failure of the first function that failed; later ones did not run."""
    durations_s_F: tuple[float, ...]
    """Seconds that each function took, in order, including a function that failed."""
    metrics: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Maps a metric to the sum and the number of its logged values."""
    extra: Mapping[str, list[Any]] = field(default_factory=dict)
    """Maps an additional column to its [C] logged values."""
    usage: Mapping[str, float] = field(default_factory=dict)
    """Maps `NAME/LABEL` to the sum NAME over the requests that the function LABEL sent to services."""
