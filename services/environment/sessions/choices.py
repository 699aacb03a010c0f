"""A recorded turn as a choice of the API, for the shapes that the public endpoint has too (`paceline/chat`).

A turn is recorded before it is answered, so a stream has the whole answer in few events.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.chat.answer_reader import AnswerPart, TextPart
from paceline.chat.call_formats import ToolCall
from paceline.chat.choices import Choice, Delta
from paceline.chat.frames import Event, Frame
from paceline.environment.protocols import AgentAnswer


def choice_of(answer: AgentAnswer) -> Choice:
    """Return the answer's only choice."""
    turn = answer.turn
    return Choice(
        0,
        answer.prompt_ids,
        _parts(answer.message),
        turn.token_ids.tolist(),
        turn.logprobs.tolist(),
        tuple(turn.spans),
        turn.finish_reason,
        turn.text,
    )


def events_of(frame: Frame, choice: Choice) -> list[Event]:
    """Return the events of a stream of the choice, all at once."""
    whole = Delta(0, choice.parts, list(choice.token_ids), list(choice.logprobs), 0, 0, choice.spans)
    return [*frame.begin(1), *frame.add(whole), *frame.end(choice), *frame.finish([choice])]


def _parts(message: Mapping[str, Any]) -> list[AnswerPart]:
    parts: list[AnswerPart] = []
    if reasoning := message.get("reasoning_content"):
        parts.append(TextPart(reasoning, reasoning=True))
    if content := message.get("content"):
        parts.append(TextPart(content))
    for call in message.get("tool_calls") or ():
        parts.append(ToolCall(call["function"]["name"], call["function"]["arguments"], call["id"]))
    return parts
