"""The parts of the coordinator that pool and runs share, and the wake-up of `Watch` calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.exchange.transport.server import ExchangeServer
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.reporting.run_log import RunLog


class Watchers:
    """The `Watch` calls of one coordinator. `lock` serialises transactions with those of the exchange."""

    def __init__(self, ledger: Ledger, exchange: Exchange, lock: asyncio.Lock, run_log: RunLog, server: ExchangeServer):
        self.changed = asyncio.Condition()
        """Notified when events were added or the coordinator stops."""
        self.stopping = False
        """True if the coordinator stops."""
        self._ledger, self._exchange, self._lock = ledger, exchange, lock
        self._run_log, self._server = run_log, server

    async def notify(self, *kinds: str) -> None:
        """Wake every `Watch` call for new events, and the exchange's waiting requests of the given kinds."""
        if kinds:
            self._server.wake(*kinds)
        async with self.changed:
            self.changed.notify_all()

    async def warn(self, messages: list[str], stalls: Sequence[str] = ()) -> None:
        """Add warnings to the events of the active run, if there is one; those in `stalls` are marked as stalls."""
        run = self._exchange.active
        if run is None or not messages:
            return
        async with self._lock:
            with self._ledger.transaction():
                stalled = {message: {"stalled": True} for message in stalls}
                contents = [{"message": message} | stalled.get(message, {}) for message in messages]
                self._run_log.write_down([Notice("warning", content) for content in contents])
        await self.notify("lease")


@dataclass
class Delays:
    """Reasons why a run does not train now. `RunStates`, `RunStarter` and `Commands` change them."""

    retried: str = ""
    """Id of the run that is paused and retried automatically."""
    passed_over: set[str] = field(default_factory=set)
    """Ids of the runs that let other runs go first: they could not be started, or a person must resume them."""
    start_again_s: float = 0.0
    """Monotonic time of the next attempt to start a run that could not be started."""
    waits_for: str = ""
    """Reason why workers must connect later: the run that they may be working on has not been opened yet. Begins with
    `run ID `."""


@dataclass(frozen=True)
class RunContext:
    ledger: Ledger
    exchange: Exchange
    lock: asyncio.Lock
    """Serialises transactions with those of the exchange."""
    run_log: RunLog
    server: ExchangeServer
    watchers: Watchers
    delays: Delays = field(default_factory=Delays)
