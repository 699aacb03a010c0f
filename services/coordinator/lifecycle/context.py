"""What everything that changes a run's state needs, and news of the active run for `Watch` calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.services.coordinator.exchange.state import Exchange, Notice
from paceline.services.coordinator.exchange.transport.server import ExchangeServer
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.reporting.run_log import RunLog


class Watchers:
    """The `Watch` calls of one coordinator. `lock` serialises transactions with the exchange's."""

    def __init__(
        self, ledger: Ledger, exchange: Exchange, lock: asyncio.Lock, run_log: RunLog, server: ExchangeServer
    ):
        self.changed = asyncio.Condition()
        """Notified when events were added or the coordinator stops."""
        self._ledger, self._exchange, self._lock = ledger, exchange, lock
        self._run_log, self._server = run_log, server

    async def notify(self) -> None:
        """Wake every `Watch` call: there may be new events."""
        async with self.changed:
            self.changed.notify_all()

    async def warn(self, messages: list[str], stalls: Sequence[str] = ()) -> None:
        """Add warnings to the events of the active run, if there is one; those among `stalls` are marked."""
        run = self._exchange.active
        if run is None or not messages:
            return
        async with self._lock:
            with self._ledger.transaction():
                self._run_log.write_down(
                    [
                        Notice(
                            "warning", {"message": message} | ({"stalled": True} if message in stalls else {})
                        )
                        for message in messages
                    ]
                )
        self._server.wake("lease")
        await self.notify()


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
