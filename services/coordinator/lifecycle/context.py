"""Parts of the coordinator that everything which changes a run's state needs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.exchange.transport.server import ExchangeServer
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.lifecycle.watchers import Watchers
from paceline.services.coordinator.reporting.run_log import RunLog


@dataclass
class Delays:
    """Reasons why a run does not train now. `RunStates`, `RunStarter` and `Commands` change them."""

    retried: str = ""
    """Id of the run that is paused and retried automatically."""
    passed_over: set[str] = field(default_factory=set)
    """Runs whose spec this version cannot read, while there are others."""
    start_again_s: float = 0.0
    """Monotonic time of the next attempt to start the run that is due."""
    waits_for: str = ""
    """Reason for which workers must connect later: the run that they may be working on has not been opened yet."""


@dataclass(frozen=True)
class RunContext:
    """Ledger, exchange and reports of one coordinator's runs."""

    ledger: Ledger
    exchange: Exchange
    lock: asyncio.Lock
    """Serialises transactions with the exchange's."""
    run_log: RunLog
    server: ExchangeServer
    watchers: Watchers
    delays: Delays = field(default_factory=Delays)
