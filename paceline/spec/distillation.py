"""`distillation`: the student samples, a teacher says how likely each sampled token was to it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.spec.section import PositiveFloat, Section


class DistillationSection(Section):
    """On-policy distillation (`algorithm: distillation`). Groups, steps and seed are `grpo`'s, corrections `loss_fn`'s."""

    teacher_model_name: str | None = None
    """The teacher: a local folder or a name on the hub, with the student's tokenizer. Every learner rank holds a shard."""
    kl_type: Literal["reverse", "forward", "mixed"] = "reverse"
    """KL(student‖teacher), KL(teacher‖student), or both."""
    mixed_kl_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the forward KL (`mixed`)."""
    max_forward_ratio: PositiveFloat = 10.0
    """Upper bound of the teacher's probability over the student's in the forward KL: it bounds the variance."""
