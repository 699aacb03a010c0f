"""Spot check of the samplers: the exchange marks groups that the learner compares, and judges its answers.

Promise: a worker whose log-probabilities are wrong in the mean is named in the run's events. Nothing else
changes: its groups train as before, because a person has to judge whether the worker or the learner is at fault.

A comparison costs no computation, because it is made where the learner computes log-probabilities anyway. So it needs a group
whose tokens all have the version that the step starts from (age 0). A worker that is due is checked at its next such
group. Groups that several workers had in turn are left out, because the ledger does not tell their tokens apart.
State lives in memory, and a coordinator's restart begins the counts anew.
"""

from __future__ import annotations

from paceline.services.coordinator.exchange.drift import TOLERATED, Finding, Observation
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.v1 import exchange_pb2 as pb


def mark(exchange: Exchange, run: ActiveRun, step: int, chain: str, reply: pb.BatchReply) -> None:
    """Mark the groups of a rank's part that the learner has to compare."""
    share = run.spec.logger.verify_share
    if not share or not is_comparable(run):
        return
    chosen = exchange.spot_check.chosen(chain) or exchange.spot_check.choose(
        chain, step, exchange.group_queries.samplers_of_step(run.run_id, step), share
    )
    for group in reply.groups:
        group.verify = group.group_id in chosen


def take(exchange: Exchange, run: ActiveRun, receipt: pb.Receipt) -> None:
    """Judge the comparisons of a receipt. Groups that were not chosen, and a second comparison of one, are ignored."""
    batch = exchange.ledger.batches.get(run.run_id, receipt.step) if receipt.comparisons else None
    if batch is None:
        return
    chosen = exchange.spot_check.chosen(batch["chain"])
    for compared in receipt.comparisons:
        worker = chosen.pop(compared.group_id, "")
        if not worker:
            continue
        observation = Observation(compared.mean, compared.standard_error, compared.tokens)
        finding = exchange.spot_check.observe(worker, observation)
        if finding is not None and finding.times & (finding.times - 1) == 0:  # the first, second, fourth …
            exchange.notice("warning", message=explain(finding), spot_check=worker, nats=finding.mean)


def metrics(exchange: Exchange) -> dict[str, float]:
    """Return the metrics of a step; none before the first comparison."""
    test = exchange.spot_check.test
    if not test.groups:
        return {}
    return {
        "spot_check/groups": float(test.groups),
        "spot_check/largest_difference": test.largest_mean,
        "spot_check/named_workers": float(len(test.named)),
    }


def is_comparable(run: ActiveRun) -> bool:
    """Return whether sampler and learner compute the same distribution, and a group has one sampler."""
    return not run.spec.environment.is_used and not run.spec.policy.generation.allow_biased_sampling


def explain(finding: Finding) -> str:
    """Return the warning: the worker, the figures, and what to do."""
    times = f" ({finding.times} times so far)" if finding.times > 1 else ""
    text = (
        f"log-probabilities of {finding.member_id} are off by {finding.mean:+.4f} nats a token in the mean of its newest "
        f"{finding.groups} compared groups{times}; the learner has computed them with the same weights"
    )
    if finding.others is not None:
        text += f", and for other workers it finds {finding.others:+.4f}"
    if finding.others is not None and abs(finding.others) <= TOLERATED:
        return (
            f"{text}. Its GPU, its kernels or its copy of the model may be broken: drain this worker and start it on "
            "another device (docs/alerts.md)"
        )
    return (
        f"{text}. Perhaps all workers are off: compare the engine's number format, attention kernels and sampling settings "
        "with the learner's (docs/alerts.md)"
    )
