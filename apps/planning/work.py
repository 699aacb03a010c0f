"""The work of one step: how many groups, and how long their prompts and completions are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """The batch of a step, with mean lengths."""

    groups: int
    """B; for a run on examples, the examples of a step."""
    completions: int
    """Completions of a group."""
    prompt_tokens: float
    completion_tokens: float
    micro_batch_tokens: int
    """Tokens of one forward and backward pass of a rank."""
    recomputed: float = 0.0
    """Share of the forward pass that the backward pass computes again."""

    @property
    def sequences(self) -> int:
        """Return the sequences of the batch."""
        return self.groups * self.completions

    @property
    def sampled_tokens(self) -> float:
        """Return the completion tokens of the batch, all of which train."""
        return self.sequences * self.completion_tokens

    @property
    def tokens(self) -> float:
        """Return the tokens that pass through the learner."""
        return self.sequences * (self.prompt_tokens + self.completion_tokens)
