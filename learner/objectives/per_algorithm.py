"""From a micro-batch's tokens to the losses of preference data: which loss, and of which sequences.

`objective_of` gives the function that the trainer calls for a spec. Its formulas are `learner.objectives.preferences`' and
`learner.objectives.policy`'; here token log-probabilities become sums of completions, and sequences become pairs.

Promise: a prompt counts once, however many completions it rejects; all denominators are of the global batch, so that
shares add up however it was split (a prompt's sequences are in one micro-batch).

Suffixes: N trained tokens, S sequences, P pairs of a chosen and a rejected completion of one prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.batch.samples import PackedBatch
from learner.objectives.policy import Denominators, LossResult, TokenArrays, policy_loss, sft_loss
from learner.objectives.preferences import (
    PairLogRatios,
    kto_loss,
    orpo_loss,
    preference_loss,
    reward_model_loss,
)
from paceline.spec import LossSection, RunSpec

Objective = Callable[[TokenArrays, PackedBatch, Denominators], LossResult]


@dataclass(frozen=True)
class Pairs:
    """The pairs of a micro-batch, as indices of its sequences."""

    chosen_P: Tensor
    rejected_P: Tensor
    weights_P: Tensor
    """1 / (prompts of the global batch · rejected completions of the prompt)."""
    margins_P: Tensor


def objective_of(spec: RunSpec) -> Objective:
    """The loss of the spec's algorithm."""
    match spec.algorithm:
        case "grpo":
            return lambda tokens, row, counts: policy_loss(tokens, counts, spec.loss_fn)
        case "distillation":
            return lambda tokens, row, counts: _distillation(tokens, counts, spec)
        case "sft":
            return lambda tokens, row, counts: sft_loss(tokens, counts, LossSection())
        case "dpo":
            return lambda tokens, row, counts: _dpo(tokens, row, counts, spec)
        case "orpo":
            return lambda tokens, row, counts: _orpo(tokens, row, counts, spec)
        case "kto":
            return lambda tokens, row, counts: _kto(tokens, row, counts, spec)
        case "rm":
            return lambda tokens, row, counts: _reward_model(tokens, row, counts, spec)
        case _:
            raise ValueError(f"unknown algorithm {spec.algorithm!r}")


def distillation_advantages(
    current_N: Tensor, teacher_N: Tensor, kind: str, mixed_weight: float, max_ratio: float
) -> Tensor:
    """[N] what a sampled token is worth, detached, so that -A·∇log π estimates the gradient of a KL at its place.

    With Δ = log π_T - log π: `reverse` A = Δ, the gradient of KL(π‖π_T); `forward` A = min(exp(Δ), max_ratio) - 1, that of
    KL(π_T‖π) (E[∇log π] is 0, so the 1 is a baseline that changes nothing in the mean); `mixed` is
    mixed_weight · forward + (1 - mixed_weight) · reverse. Each is exact for the next token after the sampled ones, and
    leaves out that a token also decides what comes after it (Agarwal et al. 2024, arXiv 2306.13649; Lu 2025).
    """
    delta_N = (teacher_N - current_N).detach()
    forward_N = delta_N.exp().clamp(max=max_ratio) - 1
    match kind:
        case "reverse":
            return delta_N
        case "forward":
            return forward_N
        case "mixed":
            return mixed_weight * forward_N + (1 - mixed_weight) * delta_N
        case _:
            raise ValueError(f"unknown KL {kind!r}")


def _distillation(tokens: TokenArrays, counts: Denominators, spec: RunSpec) -> LossResult:
    """The policy loss with the teacher's advantages: the same corrections for the sampler's age."""
    if tokens.reference_N is None:
        raise ValueError("the teacher was not asked for this batch")
    section = spec.distillation
    advantages_N = distillation_advantages(
        tokens.current_N,
        tokens.reference_N,
        section.kl_type,
        section.mixed_kl_weight,
        section.max_forward_ratio,
    )
    judged = replace(tokens, advantages_N=advantages_N, reference_N=None)
    result = policy_loss(judged, counts, spec.loss_fn)
    kl = (tokens.current_N.detach() - tokens.reference_N).sum(dtype=torch.float64)
    return replace(result, sums={**result.sums, "kl_teacher": kl})


def pairs_of(row: PackedBatch, num_prompts: int) -> Pairs:
    """Each rejected completion with the chosen one of its prompt. ValueError for a prompt that lacks either."""
    chosen: dict[int, int] = {}
    rejected: dict[int, list[int]] = {}
    for place, (prompt, verdict) in enumerate(zip(row.group_ids_S, row.verdicts_S, strict=True)):
        if verdict.good:
            chosen[prompt] = place
        else:
            rejected.setdefault(prompt, []).append(place)
    if chosen.keys() != rejected.keys():
        broken = sorted(chosen.keys() ^ rejected.keys())
        raise ValueError(f"examples {broken} have only chosen or only rejected completions in a micro-batch")
    places = [(prompt, place) for prompt, worse in rejected.items() for place in worse]

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=row.targets_N.device)

    def floats(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=row.targets_N.device)

    return Pairs(
        integers([chosen[prompt] for prompt, _ in places]),
        integers([place for _, place in places]),
        floats([1 / (num_prompts * len(rejected[prompt])) for prompt, _ in places]),
        floats([row.verdicts_S[chosen[prompt]].margin for prompt, _ in places]),
    )


def reference_sums(tokens: TokenArrays, row: PackedBatch) -> Tensor:
    """[S] Σ_t log π_ref of each sequence: precomputed, or from the reference's answer."""
    known = [verdict.reference_logprob for verdict in row.verdicts_S]
    if known and all(value is not None for value in known):
        return torch.tensor(known, dtype=torch.float32, device=row.targets_N.device)
    if tokens.reference_N is None:
        raise ValueError("the loss needs the reference's log-probabilities; it was not asked for this batch")
    return _per_sequence(tokens.reference_N, tokens)


def _dpo(tokens: TokenArrays, row: PackedBatch, counts: Denominators, spec: RunSpec) -> LossResult:
    """preference_loss_weight · preference_loss + sft_loss_weight · mean over prompts of -Σ_t log π(chosen)."""
    section, pairs = spec.dpo, pairs_of(row, counts.prompts)
    current_S, lengths_S = _per_sequence(tokens.current_N, tokens), _lengths(tokens)
    log_ratios_S = current_S - reference_sums(tokens, row)
    given = PairLogRatios(
        log_ratios_S[pairs.chosen_P],
        log_ratios_S[pairs.rejected_P],
        lengths_S[pairs.chosen_P],
        lengths_S[pairs.rejected_P],
        pairs.weights_P,
    )
    preference = preference_loss(
        given,
        section.preference_loss,
        beta=section.reference_policy_kl_penalty,
        label_smoothing=section.label_smoothing,
        average=section.preference_average_log_probs,
    )
    loss = section.preference_loss_weight * preference
    sums = {"preference_loss": preference.detach().double()}
    if section.sft_loss_weight:
        nll_S = -current_S / lengths_S if section.sft_average_log_probs else -current_S
        likelihood = (pairs.weights_P * nll_S[pairs.chosen_P]).sum()
        loss = loss + section.sft_loss_weight * likelihood
        sums["sft_loss"] = likelihood.detach().double()
    rewards_S = section.reference_policy_kl_penalty * log_ratios_S.detach()
    return _result(
        loss, {**sums, **_token_sums(tokens), **_pair_sums(rewards_S, pairs, counts)}, tokens, log_ratios_S
    )


def _orpo(tokens: TokenArrays, row: PackedBatch, counts: Denominators, spec: RunSpec) -> LossResult:
    """Mean over prompts of the chosen completion's mean -log π per token, plus the odds-ratio term."""
    pairs = pairs_of(row, counts.prompts)
    means_S = _per_sequence(tokens.current_N, tokens) / _lengths(tokens)
    likelihood = -(pairs.weights_P * means_S[pairs.chosen_P]).sum()
    odds = orpo_loss(
        means_S[pairs.chosen_P], means_S[pairs.rejected_P], pairs.weights_P, beta=spec.orpo.odds_ratio_weight
    )
    sums = {"sft_loss": likelihood.detach().double(), "preference_loss": odds.detach().double()}
    rewards_S = spec.orpo.odds_ratio_weight * means_S.detach()
    sums |= {**_token_sums(tokens), **_pair_sums(rewards_S, pairs, counts)}
    return _result(likelihood + odds, sums, tokens, means_S)


def _kto(tokens: TokenArrays, row: PackedBatch, counts: Denominators, spec: RunSpec) -> LossResult:
    section = spec.kto
    log_ratios_S = _per_sequence(tokens.current_N, tokens) - reference_sums(tokens, row)
    good_S = torch.tensor([verdict.good for verdict in row.verdicts_S], device=log_ratios_S.device)
    batch_kl = tokens.batch_kl or 0.0
    loss = kto_loss(
        log_ratios_S,
        good_S,
        batch_kl,
        counts.sequences,
        beta=section.reference_policy_kl_penalty,
        desirable_weight=section.desirable_weight,
        undesirable_weight=section.undesirable_weight,
    )
    rewards_S = section.reference_policy_kl_penalty * log_ratios_S.detach().double()
    right_S = (log_ratios_S.detach() > max(batch_kl, 0.0)) == good_S
    sums = {
        **_token_sums(tokens),
        "verdicts": torch.ones_like(rewards_S).sum(),
        "verdicts_right": right_S.double().sum(),
        "good": good_S.double().sum(),
        "good_reward": rewards_S[good_S].sum(),
        "bad_reward": rewards_S[~good_S].sum(),
    }
    return _result(loss, sums, tokens, log_ratios_S)


def _reward_model(tokens: TokenArrays, row: PackedBatch, counts: Denominators, spec: RunSpec) -> LossResult:
    """Every sequence has one trained place, and the model's answer there is its score."""
    scores_S, pairs = tokens.current_N, pairs_of(row, counts.prompts)
    loss = reward_model_loss(
        scores_S[pairs.chosen_P],
        scores_S[pairs.rejected_P],
        pairs.weights_P,
        margins_P=pairs.margins_P,
        centring=spec.rm.centring,
    )
    sums = {"tokens": torch.ones_like(scores_S).sum(), **_pair_sums(scores_S.detach(), pairs, counts)}
    return _result(loss, sums, tokens, scores_S)


def example_metrics(sums: dict[str, float], num_updates: int = 1) -> dict[str, float]:
    """Metrics of a batch of preferences, from sums over its micro-batches and ranks.

    `accuracy` of pairs whose chosen completion has the higher reward (`kto`: of completions on the right side of z; half
    counts where both are equal), `margin` mean difference of rewards, `chosen_reward`, `rejected_reward` their means.
    `kl_teacher` mean log π/π_T of the sampled tokens (`distillation`).
    The reward is the score (`rm`), β·(log π - log π_ref) (`dpo`, `kto`) or β·mean log π (`orpo`).
    """
    metrics: dict[str, float] = {
        name: sums[name] / num_updates for name in ("preference_loss", "sft_loss") if name in sums
    }
    metrics |= {"batch_kl": sums["batch_kl"]} if "batch_kl" in sums else {}
    if "kl_teacher" in sums and sums["tokens"]:
        metrics["kl_teacher"] = sums["kl_teacher"] / sums["tokens"]
    if sums.get("pairs"):
        metrics |= {
            "accuracy": sums["pairs_won"] / sums["pairs"],
            "margin": (sums["chosen_reward"] - sums["rejected_reward"]) / sums["pairs"],
            "chosen_reward": sums["chosen_reward"] / sums["pairs"],
            "rejected_reward": sums["rejected_reward"] / sums["pairs"],
        }
    if sums.get("verdicts"):
        good, bad = sums["good"], sums["verdicts"] - sums["good"]
        metrics["accuracy"] = sums["verdicts_right"] / sums["verdicts"]
        metrics |= {"chosen_reward": sums["good_reward"] / good} if good else {}
        metrics |= {"rejected_reward": sums["bad_reward"] / bad} if bad else {}
        if good and bad:
            metrics["margin"] = metrics["chosen_reward"] - metrics["rejected_reward"]
    return metrics


def _pair_sums(rewards_S: Tensor, pairs: Pairs, counts: Denominators) -> dict[str, Tensor]:
    """In prompts: pairs of one prompt share one."""
    weights_P = pairs.weights_P.double() * counts.prompts
    chosen_P, rejected_P = rewards_S[pairs.chosen_P].double(), rewards_S[pairs.rejected_P].double()
    won_P = (chosen_P > rejected_P).double() + 0.5 * (chosen_P == rejected_P).double()
    return {
        "pairs": weights_P.sum(),
        "pairs_won": (weights_P * won_P).sum(),
        "chosen_reward": (weights_P * chosen_P).sum(),
        "rejected_reward": (weights_P * rejected_P).sum(),
    }


def _token_sums(tokens: TokenArrays) -> dict[str, Tensor]:
    return {
        "tokens": torch.ones_like(tokens.current_N).sum(),
        "entropy": tokens.entropy_N.detach().sum(dtype=torch.float64),
        "logprob": tokens.current_N.detach().sum(dtype=torch.float64),
    }


def _per_sequence(values_N: Tensor, tokens: TokenArrays) -> Tensor:
    return values_N.new_zeros(tokens.num_sequences).index_add(0, tokens.sequence_N, values_N)


def _lengths(tokens: TokenArrays) -> Tensor:
    return _per_sequence(torch.ones_like(tokens.current_N), tokens)


def _result(loss: Tensor, sums: dict[str, Tensor], tokens: TokenArrays, per_sequence_S: Tensor) -> LossResult:
    """What tells a broken sequence is the number that its loss is made of."""
    suspects_N = per_sequence_S.detach()[tokens.sequence_N]
    return LossResult(loss, {"loss": loss.detach().double(), **sums}, suspects_N)
