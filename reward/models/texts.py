"""Texts for reward models: the tokens of a prompt with its completion, and where the model's outputs count."""

from __future__ import annotations

from typing import Any, NamedTuple

from paceline.chat.completion_texts import message_text
from paceline.data.tokens import encode_continuation, encode_for_scoring, encode_prompt
from paceline.reward.models.settings import ModelSettings, ProcessModelSettings


class Text(NamedTuple):
    """One text to score."""

    ids: list[int]
    places: list[int]
    """Tokens at which the model's outputs count: the ends of steps; none where the model itself finds the last token."""


class TextEncoder:
    """A tokenizer and how it writes the texts of a model."""

    def __init__(self, settings: ModelSettings, tokenizer: Any) -> None:
        self._settings, self.tokenizer = settings, tokenizer

    def encode(self, prompt: Any, completion: Any) -> Text:
        """Return the tokens of a prompt with its completion. Raises InvalidInput where they cannot be written."""
        kwargs = self._settings.chat_template_kwargs or {}
        if isinstance(self._settings, ProcessModelSettings):
            return self._steps(prompt, completion, self._settings.step_separator)
        return Text(encode_for_scoring(self.tokenizer, prompt, completion, "auto", kwargs).tolist(), [])

    def _steps(self, prompt: Any, completion: Any, separator: str) -> Text:
        """Return the prompt and the steps, each followed by the separator, at whose last token the model scores it."""
        text = completion if isinstance(completion, str) else message_text(completion[-1])
        tokenizer = self.tokenizer
        ids = encode_prompt(tokenizer, prompt, "auto", self._settings.chat_template_kwargs or {}).tolist()
        places = []
        for step in steps_of(text, separator):
            for piece in (step, separator):
                ids += encode_continuation(tokenizer, ids, piece).tolist()
            places.append(len(ids) - 1)
        return Text(ids, places)


def steps_of(text: str, separator: str) -> list[str]:
    """Return the steps of a completion, without empty ones; an empty completion is one step."""
    return [step for step in text.split(separator) if step.strip()] or [text]
