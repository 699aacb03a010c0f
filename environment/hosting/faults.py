"""Faults of an episode, by whose fault they are; a fault of the infrastructure is never the environment's.

EpisodeFault
├── EnvironmentFailed   user code raised, hung, broke its limits or returned nonsense: the life ends and is counted
├── EnvironmentLost     the instance is gone by no fault of its own: it is replayed, restored or restarted, uncounted
│   ├── ServiceAway     user code could not reach a service: again later, uncounted
│   └── CannotGoOn      it can be neither replayed nor restored: the life ends as restarted, uncounted
└── TimeIsUp            the episode's seconds are over in the middle of a call: it ends as it is
"""

from __future__ import annotations

from paceline.errors import PacelineError


class EpisodeFault(PacelineError):
    """Base of the faults of an episode."""


class EnvironmentFailed(EpisodeFault):
    """User code raised, hung, broke its limits or returned nonsense."""


class EnvironmentLost(EpisodeFault):
    """The instance is gone by no fault of its own: its process died with another's call, or was killed."""


class ServiceAway(EnvironmentLost):
    """User code could not reach a service that it needs."""


class CannotGoOn(EnvironmentLost):
    """The life has turns, and its environment can be neither replayed nor restored."""


class TimeIsUp(EpisodeFault):
    """The seconds of the episode are over in the middle of a call."""
