"""What an evaluation asks of a model, in this process (`engine_model`) or behind a URL (`url_model`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from paceline.groups import Completion


class ContinuationScore(NamedTuple):
    """Log-probability of a text after a prompt."""

    logprob: float
    """Sum over its tokens, in nats, under the model itself (temperature 1)."""
    is_greedy: bool
    """Whether each of its tokens is the likeliest one at its position."""


class AskedModel(Protocol):
    """A model of which completions or log-probabilities are requested."""

    name: str
    """Name of the model in the result."""
    concurrency: int
    """Completions that it generates at a time; further requests wait."""

    async def sample(
        self, prompt: Any, index: int, seed: int, tools: list[Any] | None = None
    ) -> list[Completion]:
        """Return the completions of problem number `index`, `grpo.val_samples_per_prompt` of them, with their texts. The chat
        template gets `tools`.

        Raises InvalidInput for a prompt that it cannot take, Unavailable where it does not answer.
        """

    async def score(self, prompt: Any, continuations: Sequence[str]) -> list[ContinuationScore]:
        """Return the log-probability of each text after the prompt. Raises as `sample`."""


def split(prompt: str, continuation: str) -> tuple[str, str]:
    """Return prompt and continuation with white space at the prompt's end moved to the continuation, because tokens begin with
    white space. As in lm-eval's `TemplateLM._encode_pair`."""
    kept = prompt.rstrip()
    return kept, prompt[len(kept) :] + continuation
