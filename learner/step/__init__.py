"""One training step. Each phase returns new values, and all ranks go through the phases together:

- `plan.plan_updates`: sequences → updates of micro-batches, the same number on each rank
- `reference.with_frozen_logprobs`: + log-probabilities of the policies that do not change (reference, proximal)
- `assign_advantages.with_advantages`: + an advantage for each token (and, for PPO, the critic's states and returns)
- `reference.with_m2_limit`: + M2PO's limit
- `trainer.Trainer.train_step`: each update: losses and gradients of its micro-batches, then the optimizer
"""
