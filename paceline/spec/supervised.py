"""`sft`: training on a data set's completions."""

from __future__ import annotations

from paceline.spec.section import NonNegativeInt, PositiveInt, Section


class SftSection(Section):
    """Supervised fine-tuning on the same loop (`algorithm: sft`)."""

    max_num_steps: PositiveInt = 100
    """Steps to train before the run ends."""
    num_examples_per_step: PositiveInt = 32
    """Examples in the batch of one step."""
    seed: NonNegativeInt = 42
    """Seeds the order of the data."""
