"""What the requests of an agent have said: which earlier request a new one goes on from.

A request goes on from an earlier one when its messages are that one's messages, the answer to it, and something new. Messages are
compared by what they say, because clients write the same answer in several ways: without its reasoning, with `content` null or
empty, with the arguments of calls in another form of the same JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.chat.messages import Json, Message
from paceline.data.messages import read_message
from paceline.environment.notes import digest
from paceline.environment.protocols import SampledTurn
from paceline.environment.rendering.protocol import Conversation
from paceline.errors import InvalidInput
from paceline.groups import IntArray

BEGINNING = "0"


@dataclass
class Asked:
    """One answered request."""

    conversation: Conversation
    """As templates take it; without messages for a request of token ids."""
    prompt_ids: IntArray
    turn: SampledTurn
    answer: Json
    """The assistant's message as templates take it."""
    sent: Sequence[Mapping[str, Any]]
    """The messages as they were sent."""
    trains: bool
    delivered: bool = False
    """The program got the answer."""


class History:
    """The answered requests of a session."""

    def __init__(self) -> None:
        self._by_end: dict[str, list[Asked]] = {}
        """Answered requests by the chain of their messages, the answer among them."""

    def add(self, asked: Asked) -> None:
        if not asked.sent:
            return
        chain = _chains(asked.sent, asked.conversation)[-1]
        end = _link(chain, asked.answer)
        self._by_end.setdefault(end, []).append(asked)

    def parent(
        self, sent: Sequence[Mapping[str, Any]], conversation: Conversation
    ) -> tuple[Asked, int] | None:
        """Return the request that this one goes on from, and the number of messages up to its answer; None where there is
        none, or where several with different tokens could be meant."""
        chains = _chains(sent, conversation)
        for count in range(len(sent) - 1, 0, -1):
            found = self._by_end.get(chains[count])
            if not found:
                continue
            first = found[0]
            if any(not _same_tokens(first, other) for other in found[1:]):
                return None
            return first, count
        return None


def read_messages(sent: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return the messages of a request as templates take them. Raises InvalidInput."""
    messages = []
    for each in sent:
        try:
            message = Message.model_validate(each)
        except ValueError as error:
            raise InvalidInput(f"messages has one that is no message: {error}") from None
        message.check()
        messages.append(message.rendered())
    return messages


def _same_tokens(first: Asked, other: Asked) -> bool:
    return np.array_equal(first.prompt_ids, other.prompt_ids) and np.array_equal(
        first.turn.token_ids, other.turn.token_ids
    )


def _chains(sent: Sequence[Mapping[str, Any]], conversation: Conversation) -> list[str]:
    """Return a digest of each beginning of the messages: `[n]` is that of the first n."""
    chain = digest([BEGINNING, list(conversation.tools), dict(conversation.template_kwargs)])
    chains = [chain]
    for message in sent:
        chain = _link(chain, message)
        chains.append(chain)
    return chains


def _link(chain: str, message: Mapping[str, Any]) -> str:
    read = read_message(message)
    calls = [
        [call.get("id"), call["function"]["name"], call["function"]["arguments"]]
        for call in read.get("tool_calls", ())
    ]
    return digest([chain, [read["role"], read["content"], calls, read.get("tool_call_id")]])
