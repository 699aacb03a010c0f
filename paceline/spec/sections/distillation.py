"""`distillation`: the student samples, and a teacher gives its log-probability of each sampled token."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from paceline.spec.sections.algorithm import AlgorithmSection
from paceline.spec.sections.base import PositiveFloat
from paceline.spec.sections.grpo import GrpoSection
from paceline.spec.sections.loss import LossSection
from paceline.spec.sections.policy import PolicySection

WHOLE_DISTRIBUTIONS = ("jsd", "gkd", "top_k", "full")


class DistillationSection(AlgorithmSection):
    """On-policy distillation (`algorithm: distillation`). Groups, steps and seed are `grpo`'s, corrections `loss_fn`'s."""

    samples: ClassVar[bool] = True
    has_teacher: ClassVar[bool] = True

    teacher_model_name: str | None = None
    """The teacher, with the student's tokenizer: a local folder, an fsspec URL, a name on the hub, or `run:ID`."""
    teacher_pool: Literal["learner", "reward"] = "learner"
    """Processes that run it: the learner, each rank of which holds a shard; or the reward workers, each of which
    holds all of it and adds its log-probabilities of the sampled tokens to the group's rewards."""
    kl_type: Literal["reverse", "forward", "mixed"] = "reverse"
    """KL(student‖teacher), KL(teacher‖student), or both."""
    mixed_kl_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the forward KL (`mixed`)."""
    max_forward_ratio: PositiveFloat = 10.0
    """Upper bound of the teacher's probability over the student's in the forward KL: it bounds the variance."""

    @field_validator("kl_type", mode="before")
    @classmethod
    def _refuse_whole_distributions(cls, kind: object) -> object:
        if kind in WHOLE_DISTRIBUTIONS:
            raise ValueError(
                f"{kind!r} compares whole distributions at every token, and only the teacher's log-probability of the "
                "sampled token is asked for; use reverse, forward or mixed"
            )
        return kind

    def frozen_policy(self, policy: PolicySection, loss_fn: LossSection) -> PolicySection:
        """Return the teacher."""
        return policy.model_copy(update={"model_name": self.teacher_model_name, "tokenizer_name": None})

    def pool_serves_reference(self, loss_fn: LossSection) -> bool:
        """Return whether the reward pool runs the teacher."""
        return self.teacher_pool == "reward"

    def check_with(self, grpo: GrpoSection, loss_fn: LossSection) -> None:
        """Raise ValueError for settings that contradict the use of a teacher."""
        if self.teacher_model_name is None:
            raise ValueError("distillation.teacher_model_name is not set; name the teacher")
        if loss_fn.reference_policy_kl_penalty > 0:
            raise ValueError(
                f"loss_fn.reference_policy_kl_penalty {loss_fn.reference_policy_kl_penalty} with algorithm "
                "'distillation': the teacher takes the reference's place; set it to 0"
            )
        if grpo.advantage != "trl" or grpo.use_dynamic_sampling:
            raise ValueError(
                f"grpo.advantage {grpo.advantage!r} and use_dynamic_sampling {grpo.use_dynamic_sampling} with "
                "algorithm 'distillation': the teacher gives the advantages, rewards are only shown; leave both out"
            )
