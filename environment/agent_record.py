"""What a session keeps of its turns: each with the request that asked for it, and which of them are no part of the sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.environment.agent_history import Asked
from paceline.environment.life import Life
from paceline.environment.notes import digest
from paceline.environment.protocols import AgentRequest, SampledTurn
from paceline.environment.rows import RowTokens
from paceline.groups import IntArray
from paceline.v1 import exchange_pb2 as pb


@dataclass(eq=False)
class TakenTurn:
    """A sampled or recorded turn with its request; `asked` is None while no program has asked for a recorded one."""

    asked: Asked | None
    note: pb.TurnNote
    prompt_ids: IntArray
    turn: SampledTurn

    @property
    def counts(self) -> bool:
        """Return whether the turn trains: its program got the answer, and it is none that `train_call` keeps out."""
        return self.asked is not None and self.asked.trains and self.asked.delivered


def recorded_turns(life: Life) -> list[TakenTurn]:
    """Return the recorded turns of a life with their prompts."""
    rows, taken = RowTokens(), []
    for arrays, note in life.turns:
        prompt_ids = rows.prompt_of(arrays)
        rows.add(arrays)
        turn = SampledTurn(arrays.token_ids, arrays.logprobs, arrays.spans, note.finish_reason, note.text)
        taken.append(TakenTurn(None, note, prompt_ids, turn))
    return taken


def left_out_of(taken: Sequence[TakenTurn], rows: Sequence[int]) -> list[int]:
    """Return the turns that are no part of the sample's rows: those that do not count, unless a later turn of their row does,
    because what a model has read is in its row."""
    left_out: list[int] = []
    kept: set[int] = set()
    for index in range(len(taken) - 1, -1, -1):
        if taken[index].counts:
            kept.add(rows[index])
        elif rows[index] not in kept:
            left_out.append(index)
    return sorted(left_out)


def digest_of(request: AgentRequest) -> str:
    """Return the digest by which a recorded turn finds the request that asks for it again."""
    ids = None if request.prompt_ids is None else request.prompt_ids.tolist()
    said: list[Any] = [list(request.messages), list(request.tools), dict(request.template_kwargs), ids]
    stops = [list(request.stop_token_ids)] if request.stop_token_ids else []
    return digest([*said, request.max_new_tokens, *stops])
