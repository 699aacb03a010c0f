"""Recording of answered requests, and feedback on them, for an endpoint that has a recorder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from paceline.chat.messages import Json
from paceline.services.openai.frames import Choice
from paceline.services.openai.requests import ChatAsk, CompletionAsk
from paceline.services.rollout.openai.engine_requests import EngineAsk
from paceline.services.rollout.openai.sampling import Served


class FeedbackAsk(BaseModel):
    """`POST /v1/feedback`."""

    model_config = ConfigDict(extra="forbid")

    completion_id: Annotated[str, Field(min_length=1, max_length=128)]
    """`id` of the answer."""
    index: Annotated[int, Field(ge=0)] = 0
    """Index of the choice in the answer."""
    score: Annotated[float, Field(allow_inf_nan=False)]
    """The completion's reward, such as 1 for good and 0 for bad."""


class Recorder(Protocol):
    """What keeps answered requests."""

    async def record(self, answer_id: str, rows: Sequence[Json]) -> None:
        """Keep the choices of an answer, before it is sent. Raises nothing: an answer is sent all the same."""

    async def rate(self, feedback: FeedbackAsk) -> Json:
        """Keep feedback, and return the answer to it. Raises NotFound, Conflict, Unavailable."""


def rows_of(served: Served, ask: EngineAsk, choices: Sequence[Choice]) -> list[Json]:
    """Return prompt, completion and finish reason of each choice; a prompt of token ids as text."""
    return [
        {
            "prompt": _prompt(served, ask, choice),
            "completion": choice.text,
            "finish_reason": choice.finish_reason,
        }
        for choice in choices
    ]


def _prompt(served: Served, ask: EngineAsk, choice: Choice) -> Any:
    match ask:
        case ChatAsk():
            return ask.rendered()
        case CompletionAsk():
            prompt = ask.prompts()[choice.index // (ask.n or 1)]
            if isinstance(prompt, str):
                return prompt
    return served.tokenizer.decode(choice.prompt_ids.tolist(), skip_special_tokens=False)
