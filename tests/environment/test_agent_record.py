"""What a conversation keeps of its turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.environment.agent_conversation import AnsweredRequest, TakenTurn, digest_of, left_out_of
from paceline.environment.life import digest
from paceline.environment.protocols import AgentRequest, SampledTurn
from paceline.environment.rendering.protocol import Conversation
from paceline.v1 import exchange_pb2 as pb

IDS = np.array([1, 2], np.int32)
TURN = SampledTurn(IDS, np.zeros(2, np.float32), (), "stop", "t")


def taken(asked: bool = True, trains: bool = True, delivered: bool = True) -> TakenTurn:
    request = AnsweredRequest(Conversation([]), IDS, TURN, {}, [], trains, delivered) if asked else None
    return TakenTurn(request, pb.TurnNote(), IDS, TURN)


COUNTS, AUXILIARY, LOST, UNASKED = taken(), taken(trains=False), taken(delivered=False), taken(asked=False)


@pytest.mark.parametrize(
    ("turns", "rows", "left_out"),
    [
        ([COUNTS, COUNTS], [0, 0], []),
        ([COUNTS, AUXILIARY], [0, 1], [1]),
        ([LOST, COUNTS], [0, 0], []),  # a later turn of the row has read it
        ([LOST, COUNTS], [0, 1], [0]),
        ([COUNTS, LOST, UNASKED], [0, 0, 1], [1, 2]),
    ],
)
def test_turns_that_do_not_count_are_left_out_unless_a_later_turn_has_read_them(
    turns: list[TakenTurn], rows: list[int], left_out: list[int]
) -> None:
    assert left_out_of(turns, rows) == left_out


def test_a_record_of_before_finds_its_request() -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "1"}], "tools": [], "template_kwargs": {}, "prompt_ids": None,
        "max_new_tokens": 8, "body_digest": "b", "retry_count": 0,
    }  # fmt: skip
    plain = digest_of(AgentRequest(**fields))
    assert plain == digest([fields["messages"], [], {}, None, 8])
    others = [
        {"stop_token_ids": (3,)},
        {"prompt_ids": IDS},
        {"max_new_tokens": 9},
        {"tools": [{"type": "function"}]},
    ]
    assert len({plain, *(digest_of(AgentRequest(**fields | other)) for other in others)}) == 5
    assert plain == digest_of(AgentRequest(**fields | {"body_digest": "c", "retry_count": 1}))
