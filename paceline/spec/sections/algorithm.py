"""Properties of an algorithm, declared by its section, so that no other module depends on its name."""

from __future__ import annotations

from typing import Any, ClassVar

from paceline.spec.sections.base import Section
from paceline.spec.sections.loss import LossSection
from paceline.spec.sections.policy import PolicySection

NO_LIMIT_OF_STEPS = 1_000_000_000
"""max_num_steps until the epochs are resolved."""


def steps_left_to_epochs(values: Any) -> Any:
    """Return a section's keys without a limit of steps, where max_num_epochs is set and max_num_steps is not."""
    if isinstance(values, dict) and values.get("max_num_epochs") is not None:
        return {"max_num_steps": NO_LIMIT_OF_STEPS, **values}
    return values


class AlgorithmSection(Section):
    """The settings of one algorithm. The defaults here are those of an algorithm without a reference."""

    samples: ClassVar[bool]
    """True if it trains on rollouts, false if on a data set's examples."""
    scoring_head: ClassVar[bool] = False
    """True if the model has a scoring head in place of the LM head."""
    compares_policies: ClassVar[bool] = True
    """True if its loss compares the policy with another one, so that both must compute without dropout."""
    uses_policy_loss: ClassVar[bool] = False
    """True if it trains on a data set's examples by the policy loss, whose settings are `loss_fn`'s."""
    has_teacher: ClassVar[bool] = False
    """True if `frozen_policy` is another model than the policy."""

    @property
    def uses_value_model(self) -> bool:
        """Return whether the learner trains a value model beside the policy."""
        return False

    @property
    def precomputes_reference(self) -> bool:
        """Return whether the reference is computed once for the whole data set, before training."""
        return False

    def frozen_policy(self, policy: PolicySection, loss_fn: LossSection) -> PolicySection | None:
        """Return the model that the policy is compared with: a teacher, or the policy before training; None without
        one."""
        return None

    def pool_serves_reference(self, loss_fn: LossSection) -> bool:
        """Return whether the reward pool runs `frozen_policy`, so that the learner gets its log-probabilities with
        the batch."""
        return False
