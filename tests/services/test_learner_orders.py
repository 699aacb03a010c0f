"""Orders to the learner: one export for all that want the same, nothing for callers who have gone."""

from __future__ import annotations

import pytest

from paceline.errors import Conflict
from services.learner_service import ExportOrder, Orders


def test_exports_that_want_the_same_are_one_and_others_wait() -> None:
    orders = Orders()
    whole, adapter = ExportOrder("now", False), ExportOrder("now", True)
    first, other, again = (orders.ask_export(order) for order in (whole, adapter, whole))
    assert orders.take_exports() == [(whole, first), (whole, again)]
    assert orders.take_exports() == [(adapter, other)]
    assert orders.take_exports() == []


def test_a_caller_who_has_gone_breaks_nothing() -> None:
    orders = Orders()
    gone, waits = orders.ask_export(ExportOrder("a", False)), orders.ask_export(ExportOrder("b", False))
    gone.cancel()
    ((order, future),) = orders.take_exports()
    assert order.name == "b"
    assert not waits.cancel(), "it is under way, and its result can be set"
    future.set_result("path")
    checkpoint = orders.ask_checkpoint()
    checkpoint.cancel()
    assert orders.take_checkpoints() == []


def test_what_comes_too_late_is_refused() -> None:
    orders = Orders()
    futures = [orders.ask_export(ExportOrder(name, False)) for name in ("a", "b")]
    gone = orders.ask_export(ExportOrder("c", False))
    gone.cancel()
    orders.refuse_all("the run has ended")
    assert orders.export == []
    for future in futures:
        with pytest.raises(Conflict, match="the run has ended"):
            future.result(0)
