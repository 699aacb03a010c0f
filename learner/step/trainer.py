"""One training step: a batch of sequences becomes one or more optimizer updates.

Promise: loss and gradient are those of the global batch, however it is split over micro-batches and ranks (`bnpo`
excepted); either every rank steps its optimizer or none does. All ranks call `train_step` together, each with its part
of the batch (which may be empty). Inside, they meet in this order: the phases of `paceline.learner.step`; then for each
update every rank runs the same number of forward and backward passes (a rank with fewer micro-batches adds dummies of
zero weight, because under FSDP each pass is a collective), agrees on sums and gradient norm, and steps. Meanwhile
nothing else may use the default group.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.errors import NonFiniteLoss
from paceline.learner.batch.samples import PackedBatch, TrainingSample
from paceline.learner.collectives import sum_over_ranks, union_over_ranks, world_size
from paceline.learner.model.adapter import set_dropout
from paceline.learner.model.determinism import use_deterministic_operations
from paceline.learner.model.mesh import reshard
from paceline.learner.model.policy import compute_dtype, packed_logprobs
from paceline.learner.objectives import objective_of
from paceline.learner.objectives.base import LossResult, TokenArrays
from paceline.learner.step.assign_advantages import with_advantages, with_clipped_advantages
from paceline.learner.step.critic import Critic
from paceline.learner.step.optimizer import (
    clip_gradients,
    gradient_norm,
    lr_factor,
    make_optimizer,
    set_gradient_sync,
    set_learning_rate,
)
from paceline.learner.step.plan import MicroBatch, Update, batch_metrics, plan_updates
from paceline.learner.step.reference import LocalReference, reference_of, with_frozen_logprobs, with_m2_limit
from paceline.learner.step.token_statistics import TokenStatistics
from paceline.models.shape import shape_of
from paceline.spec import RunSpec


class Trainer:
    """Model, optimizer and the step. Each rank makes one, after the process group if there are several ranks.
    Checkpoints, export and publishing read `model` (a transformers model, its parameters DTensors if sharded),
    `optimizer`, PPO's `critic` and `synced_reference` between steps. `objective` makes samples from a run's
    examples; `reference` prepares them."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.world_size = world_size()
        self.objective = objective_of(spec)
        use_deterministic_operations(spec.policy.deterministic)
        self.model: PreTrainedModel = self.objective.load_model(spec.policy, device, spec.seed)
        self._shape = shape_of(self.model.config.to_dict())
        self.reference = reference_of(spec, self.model, device, self.objective.temperature)
        self.optimizer = make_optimizer(self.model, spec.policy.optimizer)
        self._loss_scale = LossScale(self.optimizer, compute_dtype(spec.policy, device))
        self.critic = Critic(spec, device) if spec.uses_value_model else None
        self.skipped: list[NonFiniteLoss] = []
        self.token_statistics: TokenStatistics | None = None
        """Receives the token results of the next steps, if the caller sets it."""

    def train_step(self, batch: Sequence[TrainingSample], step: int) -> dict[str, float]:
        """Train this rank's part of the batch of `step`; return metrics of the global batch, equal on all ranks. Raises
        NonFiniteLoss on every rank if loss or gradient norm is NaN or infinite; that update does not change the
        optimizer, the gradients are cleared, and earlier updates of the same step stay. With
        policy.skip_non_finite_updates the error is added to `skipped` instead of raised, and the step continues."""
        started_s = time.perf_counter()
        watch = Stopwatch(self.device)
        factor = lr_factor(step, self.spec.max_num_steps, self.spec.policy.scheduler)
        lr = self.spec.policy.optimizer.lr * factor
        set_learning_rate(self.optimizer, lr)
        trained = [sample for sample in batch if not sample.is_mismatched]
        num_updates = self.spec.policy.num_updates_per_step
        run = self.spec, self.objective, self.device
        updates = plan_updates(trained, step, *run, num_updates, self._shape)
        with watch.measure("frozen_s"):  # all of it: frozen policies, advantages, value model, limit and KL
            updates = with_frozen_logprobs(updates, self.spec, self._logprobs, self.reference)
            updates = with_advantages(trained, updates, self.spec, self.device, self.critic, step)
            updates, largest = with_clipped_advantages(updates, self.spec, self.device)
            updates = with_m2_limit(updates, self.spec, self.device)
            if self.objective.measures_mismatched:
                updates = self._with_batch_kl(updates, batch)
        sums: dict[str, float] = {}
        grad_norms = []
        self.skipped = []
        for update in updates:
            try:
                update_sums, norm = self._gradients(update, watch)
            except NonFiniteLoss as error:
                if not self.spec.policy.skip_non_finite_updates:
                    raise
                self.skipped.append(error)
                continue
            grad_norms.append(norm)
            with watch.measure("optimizer_s"):
                if self.critic is not None:
                    self.critic.step(factor)
                if self.critic is None or step >= self.spec.value.policy_training_start_step:
                    self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            for name, value in update_sums.items():
                sums[name] = sums.get(name, 0.0) + value
        self._sync_reference(step)
        learnt = {} if not grad_norms else self._metrics(sums, grad_norms, updates)
        return {
            "lr": lr,
            **learnt,
            **largest,
            **({"loss_scale": self._loss_scale.factor} if self._loss_scale.is_dynamic else {}),
            **({"skipped_updates": float(len(self.skipped))} if self.skipped else {}),
            **batch_metrics(trained, updates, step, self.spec, self._shape, self.device),
            **self._mean_over_ranks({**watch.seconds(), "step_s": time.perf_counter() - started_s}),
        }

    @property
    def synced_reference(self) -> PreTrainedModel | None:
        """The reference that the policy is mixed into, which makes it a part of the state; None if it does not
        change."""
        if self.spec.syncs_reference and isinstance(self.reference, LocalReference):
            return self.reference.model
        return None

    def _sync_reference(self, step: int) -> None:
        loss_fn, reference = self.spec.loss_fn, self.reference
        steps = loss_fn.reference_policy_sync_steps
        if steps is None or self.synced_reference is None or (step + 1) % steps:
            return
        assert isinstance(reference, LocalReference)
        reference.mix_in(self.model, loss_fn.reference_policy_sync_mix)

    def _metrics(self, sums: dict[str, float], grad_norms: list[float], updates: Sequence[Update]) -> dict[str, float]:
        """Return the metrics of the updates that were made: means over their tokens, or over the updates."""
        made = len(grad_norms)
        return {
            "loss": sums["loss"] / made,
            "grad_norm": sum(grad_norms) / made,
            **self.objective.metrics({**sums, **self._batch_kl(updates)}, made),
            **({} if self.critic is None else self.critic.metrics(made)),
        }

    @torch.no_grad()
    def evaluate(self, held_out: Sequence[TrainingSample]) -> dict[str, float]:
        """Measure the objective on held-out examples; return the metrics of a step, equal on all ranks. All ranks call
        it together, each with its share of the examples. No state changes, no random number is drawn."""
        measured = [sample for sample in held_out if not sample.is_mismatched]
        updates = plan_updates(measured, 0, self.spec, self.objective, self.device, num_updates=1)
        set_dropout(self.model, active=False)
        updates = with_frozen_logprobs(updates, self.spec, self._logprobs, self.reference)
        updates = with_advantages(measured, updates, self.spec, self.device, None)
        if self.objective.measures_mismatched:
            updates = self._with_batch_kl(updates, held_out)
        (update,) = updates
        results = [self._loss(micro, update) for micro in update.micro_batches]
        self.model.train()
        sums = self._sum_metrics(results)
        reshard(self.model)
        metrics = {"loss": sums["loss"], "sequences": float(update.denominators.sequences)}
        return {**metrics, **self.objective.metrics({**sums, **self._batch_kl(updates)})}

    @torch.no_grad()
    def _with_batch_kl(self, updates: Sequence[Update], batch: Sequence[TrainingSample]) -> list[Update]:
        """Return the updates with the mean Σ_t log π - log π_ref over the mismatched samples of the global batch."""
        measured = [sample for sample in batch if sample.is_mismatched]
        (update,) = plan_updates(measured, 0, self.spec, self.objective, self.device, num_updates=1)
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        for micro in update.micro_batches:
            log_sum = self._logprobs(micro.packed)[0].sum(dtype=torch.float64)
            log_sum = log_sum - self.reference.total(micro.packed)
            if not micro.is_dummy:
                total += log_sum
        kl = sum_over_ranks(total).item() / max(update.denominators.sequences, 1)
        return [replace(update, batch_kl=kl) for update in updates]

    @staticmethod
    def _batch_kl(updates: Sequence[Update]) -> dict[str, float]:
        kl = updates[0].batch_kl
        return {} if kl is None else {"batch_kl": kl}

    def _gradients(self, update: Update, watch: Stopwatch) -> tuple[dict[str, float], float]:
        """Leave the clipped gradients of an update in the models; return its metric sums and the policy's gradient norm
        before clipping. Loss and norms are the same on every rank, so all ranks take the same branch. Raises
        NonFiniteLoss."""
        while True:
            results = self._accumulate_gradients(update, watch)
            sums = self._sum_metrics(results)
            self._loss_scale.divide([self.model] if self.critic is None else [self.model, self.critic.model])
            norm = gradient_norm(self.model)
            value_norm = 0.0 if self.critic is None else self.critic.gradient_norm()
            if all(map(math.isfinite, (sums["loss"], norm, value_norm))):
                self._loss_scale.note_update()
                clip_gradients(self.model, self.spec.policy.max_grad_norm, norm)
                return sums, norm
            self.optimizer.zero_grad(set_to_none=True)
            if self.critic is not None:
                self.critic.discard()
            if not math.isfinite(sums["loss"]) or not self._loss_scale.lower():
                raise self._non_finite(update, results, sums["loss"], norm, value_norm)

    def _accumulate_gradients(self, update: Update, watch: Stopwatch) -> list[LossResult]:
        """Run every micro-batch forward and backward; the gradients are then the global batch's, times the scale."""
        results = []
        # FSDP averages gradients over ranks, the loss is a sum.
        scale = self.world_size * self._loss_scale.factor
        for i, micro in enumerate(update.micro_batches):
            is_last = i == len(update.micro_batches) - 1
            set_gradient_sync(self.model, self.device, is_last)
            with watch.measure("forward_s"):
                result = self._loss(micro, update, self.token_statistics)
            with watch.measure("backward_s"):
                (result.loss * scale).backward()  # type: ignore[no-untyped-call]
            results.append(replace(result, loss=result.loss.detach()))
            if self.critic is not None:
                with watch.measure("value_s"):
                    self.critic.accumulate(update, micro, scale, is_last=is_last)
        return results

    def _loss(self, micro: MicroBatch, update: Update, statistics: TokenStatistics | None = None) -> LossResult:
        logprobs_N, entropy_N = self._logprobs(micro.packed, entropy_gradient=self.objective.with_entropy_gradient)
        if statistics is not None and not micro.is_dummy:
            statistics.note(micro.packed, logprobs_N, entropy_N)
        tokens = TokenArrays(
            current_N=logprobs_N,
            entropy_N=entropy_N,
            lengths_N=micro.packed.lengths_N,
            sample_lengths_N=micro.packed.sample_lengths_N,
            sequence_N=micro.packed.sequence_N,
            num_sequences=len(micro.packed.group_ids_S),
            behaviour_N=micro.packed.behaviour_N,
            proximal_N=micro.frozen.proximal_N,
            reference_N=micro.frozen.reference_N,
            advantages_N=micro.advantages_N,
            ages_N=micro.ages_N,
            m2_limit=update.m2_limit,
            batch_kl=update.batch_kl,
        )
        result = self.objective.loss(tokens, micro.packed, update.denominators)
        if not micro.is_dummy:
            return result
        zeros = {name: torch.zeros_like(value) for name, value in result.sums.items()}
        return replace(result, loss=result.loss * 0.0, sums=zeros)

    def _logprobs(self, packed: PackedBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        return packed_logprobs(
            self.model,
            packed,
            temperature=self.objective.temperature,
            chunk_tokens=self.spec.policy.logprob_chunk_tokens,
            entropy_gradient=entropy_gradient,
        )

    def _sum_metrics(self, results: Sequence[LossResult]) -> dict[str, float]:
        names = list(results[0].sums)
        sums = [torch.stack([result.sums[name].double() for name in names]) for result in results]
        totals = torch.stack(sums).sum(0)
        return dict(zip(names, sum_over_ranks(totals).tolist(), strict=True))

    def _non_finite(
        self, update: Update, results: Sequence[LossResult], loss: float, norm: float, value_norm: float
    ) -> NonFiniteLoss:
        bad_ids: set[int] = set()
        for micro, result in zip(update.micro_batches, results, strict=True):
            bad_N = ~result.token_losses_N.isfinite()
            bad_ids.update(micro.packed.group_ids_S[i] for i in micro.packed.sequence_N[bad_N].tolist())
        group_ids = union_over_ranks([g for g in bad_ids if g >= 0], self.device)
        norms = f"gradient norm {norm}" + ("" if self.critic is None else f", the value model's {value_norm}")
        if group_ids:
            return NonFiniteLoss(f"loss {loss} ({norms}) from groups {group_ids}", tuple(group_ids))
        trained = [m.packed.group_ids_S for m in update.micro_batches if not m.is_dummy]
        group_ids = union_over_ranks([g for ids in trained for g in ids], self.device)
        return NonFiniteLoss(
            f"loss {loss}, {norms}; every token's loss is finite. Groups of the update: {group_ids}", tuple(group_ids)
        )

    def _mean_over_ranks(self, values: dict[str, float]) -> dict[str, float]:
        tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        means = (sum_over_ranks(tensor) / self.world_size).tolist()
        return dict(zip(values, means, strict=True))


FIRST, LARGEST = 2.0**16, 2.0**24
UPDATES_TO_DOUBLE = 1_000
SCALE, UPDATES = "loss_scale", "updates_at_loss_scale"


class LossScale:
    """Scale of an optimizer's loss in float16, where gradients below 6·10⁻⁸ vanish; else 1. All ranks call it alike.

    Dynamic loss scaling (Micikevicius et al. 2018, arXiv 1710.03740): the loss is multiplied by a power of two, and the
    gradients are divided by it. If a gradient overflows, the scale is halved and the update is computed again, so every
    sample is trained. After UPDATES_TO_DOUBLE updates without an overflow the scale is doubled. The scale is an entry
    of the optimizer's first group, so checkpoints have it and a resumed or replayed run continues with it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, dtype: torch.dtype, updates_to_double: int = UPDATES_TO_DOUBLE
    ) -> None:
        self._optimizer, self._updates_to_double = optimizer, updates_to_double
        self.is_dynamic = dtype == torch.float16
        if self.is_dynamic:
            optimizer.param_groups[0] |= {SCALE: FIRST, UPDATES: 0}

    @property
    def factor(self) -> float:
        return float(self._optimizer.param_groups[0][SCALE]) if self.is_dynamic else 1.0

    def divide(self, models: Iterable[nn.Module]) -> None:
        """Divide the gradients by the scale, which is exact for a power of two."""
        if self.factor != 1.0:
            for model in models:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(1.0 / self.factor)

    def lower(self) -> bool:
        """Halve the scale after an overflow. Return False if the scale is 1 and therefore not the cause."""
        if self.factor <= 1.0:
            return False
        self._set(self.factor / 2, 0)
        return True

    def note_update(self) -> None:
        """Count an update without an overflow."""
        if self.is_dynamic:
            updates = int(self._optimizer.param_groups[0][UPDATES]) + 1
            if updates < self._updates_to_double:
                self._set(self.factor, updates)
            else:
                self._set(min(2 * self.factor, LARGEST), 0)

    def _set(self, factor: float, updates: int) -> None:
        self._optimizer.param_groups[0] |= {SCALE: factor, UPDATES: updates}


class Stopwatch:
    """Sums the seconds spent in named phases on one device. On CUDA the seconds come from events that are read at the
    end."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the seconds that the block takes on the device to the sum of `phase`."""
        if self._cuda:
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._events.append((phase, begin, end))
        else:
            start_s = time.perf_counter()
            yield
            self._seconds[phase] += time.perf_counter() - start_s

    def seconds(self) -> dict[str, float]:
        """Wait for the device, and return the seconds that each phase has taken so far."""
        if self._cuda:
            torch.cuda.synchronize()
            for phase, begin, end in self._events:
                self._seconds[phase] += begin.elapsed_time(end) / 1000
            self._events.clear()
        return dict(self._seconds)
