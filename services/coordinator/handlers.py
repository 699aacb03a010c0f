"""From a request to the handler that answers it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import WireError
from paceline.wire import PROTOCOL
from protos.paceline.v1 import exchange_pb2 as pb
from services.coordinator import batches, leases, results, scores
from services.coordinator.exchange import Exchange, Outcome
from services.coordinator.intake import Arrived


def handle(exchange: Exchange, arrived: Arrived, now_s: float) -> Outcome:
    """Answers one request, inside a transaction. A result with payload frames has been through `intake`
    before.

    Bad messages are answered `invalid`, outdated ones `stale`; neither changes a thing.
    """
    request, run = arrived.request, exchange.active
    refusal = _refusal(exchange, arrived)
    if refusal is not None:
        return refusal
    assert run is not None
    try:
        match arrived.kind:
            case "lease":
                return leases.give(exchange, run, [request])[0]
            case "group":
                return results.take_result(exchange, run, arrived)
            case "lease_return":
                return results.take_back(exchange, run, arrived)
            case "task":
                return scores.give(exchange, run, request)
            case "score":
                return scores.take_result(exchange, run, arrived)
            case "batch":
                return batches.give_part(exchange, run, request, now_s)
            case "receipt":
                return batches.take_receipt(exchange, run, request)
            case _:
                return exchange.refuse(request, "the request has no body that this coordinator knows")
    except WireError as error:
        return exchange.refuse(request, str(error))


def handle_leases(exchange: Exchange, asked: Sequence[Arrived]) -> list[Outcome]:
    """Answers requests for leases by workers that are all different, as `handle` does."""
    refusals = [_refusal(exchange, arrived) for arrived in asked]
    welcome = [arrived.request for arrived, refusal in zip(asked, refusals, strict=True) if refusal is None]
    given = iter(leases.give(exchange, exchange.active, welcome) if exchange.active and welcome else ())
    return [next(given) if refusal is None else refusal for refusal in refusals]


def _refusal(exchange: Exchange, arrived: Arrived) -> Outcome | None:
    """The answer to a request that no handler has to see."""
    request = arrived.request
    if request.protocol != PROTOCOL:
        return exchange.refuse(
            request,
            f"protocol {request.protocol} is not the coordinator's {PROTOCOL}; update the older side",
        )
    if request.term != exchange.ledger.term:
        return exchange.stale(
            request, f"term {request.term} has passed, the coordinator is in {exchange.ledger.term}"
        )
    kind = arrived.kind
    run = exchange.active
    if run is None or request.run_id != run.run_id:
        if kind == "batch":
            return batches.end(exchange, request)
        return exchange.stale(request, f"run {request.run_id!r} is not the current one")
    if kind in ("lease", "task") and request.member_id not in exchange.members:
        return Outcome(exchange.reply(request, pb.REPLY_STATUS_OK), empty=True)
    return None
