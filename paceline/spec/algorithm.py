"""What an algorithm's section says about the algorithm, so that nobody else has to know its name."""

from __future__ import annotations

from typing import ClassVar

from paceline.spec.base import Section
from paceline.spec.loss import LossSection
from paceline.spec.policy import PolicySection


class AlgorithmSection(Section):
    """The settings of one algorithm. The defaults here are those of an algorithm without a reference."""

    samples: ClassVar[bool]
    """Whether it trains on rollouts; else on a data set's examples."""
    scoring_head: ClassVar[bool] = False
    """Whether the model has a scoring head in place of the LM head."""
    compares_policies: ClassVar[bool] = True
    """Whether its loss compares the policy with another one, so that both must compute without dropout."""
    has_teacher: ClassVar[bool] = False
    """Whether `frozen_policy` is another model than the policy."""

    @property
    def uses_value_model(self) -> bool:
        """Whether the learner trains a value model beside the policy."""
        return False

    @property
    def precomputes_reference(self) -> bool:
        """Whether the reference is asked once about the whole data set, before training."""
        return False

    def frozen_policy(self, policy: PolicySection, loss_fn: LossSection) -> PolicySection | None:
        """The model that the policy is compared with: a teacher, or the policy as it was; None without one."""
        return None

    def pool_serves_reference(self, loss_fn: LossSection) -> bool:
        """Whether the reward pool asks `frozen_policy`, so that the learner gets its answers with the batch."""
        return False
