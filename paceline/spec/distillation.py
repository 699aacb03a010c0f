"""`distillation`: the student samples, a teacher says how likely each sampled token was to it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from paceline.spec.base import PositiveFloat, Section

WHOLE_DISTRIBUTIONS = ("jsd", "gkd", "top_k", "full")


class DistillationSection(Section):
    """On-policy distillation (`algorithm: distillation`). Groups, steps and seed are `grpo`'s, corrections `loss_fn`'s."""

    teacher_model_name: str | None = None
    """The teacher: a local folder or a name on the hub, with the student's tokenizer."""
    teacher_pool: Literal["learner", "reward"] = "learner"
    """Who asks it: the learner, each rank of which holds a shard; or the reward workers, each of which holds all of it and
    adds its log-probabilities of the sampled tokens to the group's rewards."""
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
