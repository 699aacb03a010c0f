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
    """`raised`: an exception; `timeout`: its time limit was exceeded; `died`: it ended its process; `invalid`: it
    cannot take the data set's columns, or did not return a finite number or None for each completion. Two kinds are
    not the group's fault: `unavailable`, a service could not be reached (ConnectionError, TimeoutError, an unknown
    host), its file is missing, or it got no processor; and `killed`: by a signal from outside or a crash."""
    message: str
    """One line for people: event and location, with the function's name."""


@dataclass(frozen=True)
class RewardResult:
    """Exactly one of `rewards_CF` and `failure` is set."""

    rewards_CF: FloatArray | None
    """[C, F] finite rewards in the order of the spec; NaN where a function gave None."""
    failure: RewardFailure | None
    """The first failure; later functions did not run."""
    durations_s_F: tuple[float, ...]
    """Seconds of each function that ran, including a failed one."""
    metrics: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Sum and number of the values that the functions logged, by name."""
    extra: Mapping[str, list[Any]] = field(default_factory=dict)
    """[C] values of each additional column that the functions logged."""
    usage: Mapping[str, float] = field(default_factory=dict)
    """Sums of the functions' requests to services, under `NAME/LABEL`."""
