"""Paceline: asynchronous, off-policy GRPO as plain services. The core that all packages share: `RunSpec`, the wire
types and the client. Importing it loads neither torch nor a service. The names in `__all__` are loaded on first use,
some from the services (docs/use/python.md)."""

import importlib
from typing import Any

__version__ = "0.2.0.dev0"

_PLACES = {
    "Client": "paceline.client",
    "Event": "paceline.client",
    "RunState": "paceline.client",
    "RunSpec": "paceline.spec",
    "PacelineError": "paceline.errors",
    "LocalCluster": "paceline.services.local.cluster",
    "TrainedRun": "paceline.services.local.one_call",
    "train": "paceline.services.local.one_call",
}
__all__ = ["Client", "Event", "LocalCluster", "PacelineError", "RunSpec", "RunState", "TrainedRun", "train"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
