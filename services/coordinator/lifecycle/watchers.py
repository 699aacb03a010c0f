"""News of the active run for `Watch` calls: a signal that there are events, and warnings as events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

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
