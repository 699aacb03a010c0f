"""Handling of requests in savepoints: the changes of a request that fails are rolled back alone, and the other requests of its
transaction stay."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import LedgerFault
from paceline.rate_limited_log import RateLimitedLog, unforeseen
from paceline.services.coordinator.exchange.state import Exchange, Outcome
from paceline.services.coordinator.exchange.transport.dispatch import handle
from paceline.services.coordinator.exchange.transport.router_socket import PendingRequest

seldom = RateLimitedLog(logging.getLogger(__name__))


class IsolatedHandler:
    """Savepoints of a transaction, for one request or for several together."""

    def __init__(self, exchange: Exchange):
        self._exchange = exchange

    def handle(self, waiting: PendingRequest, now_s: float) -> Outcome:
        """Answer one request by itself: a fault in one must not undo the others of the transaction."""
        try:
            with self._undone_alone():
                return handle(self._exchange, waiting.arrived, now_s)
        except (sqlite3.Error, LedgerFault):
            raise  # the ledger itself is in trouble: nothing may be acknowledged any more
        except Exception as error:
            logged = unforeseen.note(f"a {waiting.kind} request", error)
            return self._exchange.refuse(waiting.request, f"the coordinator failed on it: {logged}")

    @contextmanager
    def together(self) -> Iterator[list[Outcome]]:
        """Yield a list for the outcomes of several requests that share a savepoint. When one of them fails, all are rolled
        back and the list is empty: the caller handles them one by one.
        """
        outcomes: list[Outcome] = []
        try:
            with self._undone_alone():
                yield outcomes
        except (sqlite3.Error, LedgerFault):
            raise
        except Exception as error:  # of one of them; `handle` logs it when that request runs by itself
            seldom.warning("together", "requests failed together, they are tried one by one: %r", error)
            outcomes.clear()

    @contextmanager
    def _undone_alone(self) -> Iterator[None]:
        """Run the body as a part of the transaction that is undone when it fails."""
        notices = len(self._exchange.notices)
        try:
            with self._exchange.ledger.savepoint():
                yield
        except BaseException:
            del self._exchange.notices[notices:]
            self._exchange.slots_changed()
            raise
