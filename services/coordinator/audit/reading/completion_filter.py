"""Filters of ListSamples that concern single completions. Pure."""

from __future__ import annotations

import json
from typing import Any

from paceline.v1 import records_pb2 as pb

OPTIONAL = ("min_reward", "max_reward", "min_tokens", "max_tokens", "min_age", "max_age")


class CompletionFilter:
    """The filters of one request."""

    def __init__(self, request: pb.ListSamplesRequest):
        self._bounds = {name: getattr(request, name) for name in OPTIONAL if request.HasField(name)}  # type: ignore[arg-type]
        self._finish_reason = request.finish_reason
        self._text = request.text.casefold()

    @property
    def is_empty(self) -> bool:
        """Return whether every completion passes."""
        return not (self._bounds or self._finish_reason or self._text)

    def passes(self, completion: dict[str, Any], prompt_json: str, step: int | None) -> bool:
        """Return whether a completion passes; `step` is that of its batch. One without a reward passes no bound of rewards,
        and one without a step no bound of ages."""
        if self.is_empty:
            return True
        oldest = min((span[3] for span in completion["spans"]), default=None)
        age = None if step is None or oldest is None else step - oldest
        return (
            self._is_within("reward", completion["reward"])
            and self._is_within("tokens", total_tokens(completion))
            and self._is_within("age", age)
            and self._finish_reason in ("", completion["finish_reason"])
            and (not self._text or self._has_text(completion, prompt_json))
        )

    def _is_within(self, name: str, value: float | None) -> bool:
        least, greatest = self._bounds.get(f"min_{name}"), self._bounds.get(f"max_{name}")
        if least is None and greatest is None:
            return True
        if value is None:
            return False
        return (least is None or value >= least) and (greatest is None or value <= greatest)

    def _has_text(self, completion: dict[str, Any], prompt_json: str) -> bool:
        if self._text in completion["text"].casefold():
            return True
        prompt = json.loads(prompt_json)
        texts = [prompt] if isinstance(prompt, str) else [str(m.get("content", "")) for m in prompt]
        return any(self._text in text.casefold() for text in texts)


def total_tokens(completion: dict[str, Any]) -> int:
    """Return the number of tokens that the model sampled."""
    return len(completion["token_ids"])
