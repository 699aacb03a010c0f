"""`distillation`: the policy loss on rollouts, with advantages from a teacher's log-probabilities."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from paceline.learner.batch.samples import PackedBatch
from paceline.learner.objectives.base import Denominators, LossResult, TokenArrays, detached_sum
from paceline.learner.objectives.policy import Grpo, policy_loss
from paceline.spec import RunSpec


class Distillation(Grpo):
    """Computes advantages in the loss, because they depend on the current policy; rewards are not used."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self._section = spec.distillation

    def loss(self, tokens: TokenArrays, packed: PackedBatch, counts: Denominators) -> LossResult:
        """Return the policy loss with the teacher's advantages and the usual corrections for the sampler's age."""
        if tokens.reference_N is None:
            raise ValueError("this batch has no log-probabilities of the teacher")
        section = self._section
        advantages_N = distillation_advantages(
            tokens.current_N, tokens.reference_N, section.kl_type, section.mixed_kl_weight, section.max_forward_ratio
        )
        with_advantages = replace(tokens, advantages_N=advantages_N, reference_N=None)
        result = policy_loss(with_advantages, counts, self._loss_fn)
        kl = detached_sum(tokens.current_N - tokens.reference_N)
        return replace(result, sums={**result.sums, "kl_teacher": kl})

    def metrics(self, sums: dict[str, float], num_updates: int = 1) -> dict[str, float]:
        """Return the metrics with `kl_teacher`: mean log π/π_T of the sampled tokens."""
        metrics = super().metrics(sums, num_updates)
        if sums["tokens"]:
            metrics["kl_teacher"] = sums["kl_teacher"] / sums["tokens"]
        return metrics


def distillation_advantages(
    current_N: Tensor, teacher_N: Tensor, kind: str, mixed_weight: float, max_ratio: float
) -> Tensor:
    """Return [N] detached advantages A of the sampled tokens; at each token -A·∇log π estimates a KL's gradient.

    With Δ = log π_T - log π: `reverse` A = Δ, the gradient of KL(π‖π_T); `forward` A = min(exp(Δ), max_ratio) - 1, that
    of KL(π_T‖π) (E[∇log π] is 0, so the 1 is a baseline that changes nothing in the mean); `mixed` is mixed_weight ·
    forward + (1 - mixed_weight) · reverse. Each estimate is exact for the next token after the sampled ones, but
    ignores that a token also influences later tokens (Agarwal et al. 2024, arXiv 2306.13649; Lu 2025).
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
