"""`instructions`: whether a completion follows the verifiable instructions of its prompt, in IFEval's columns."""

from __future__ import annotations

import json
from typing import Any, Literal

from reward.builtin.inputs import answer_text, column_values


def instructions(
    prompts: list[Any],
    completions: list[Any],
    *,
    instructions_column: str = "instruction_id_list",
    arguments_column: str = "kwargs",
    score: Literal["all", "share"] = "all",
    loose: bool = False,
    **columns: Any,
) -> list[float | None]:
    """Return [C] 1.0 where the completion follows all instructions, else 0.0; with score `share` the share that it follows.

    `instructions_column` has the names of a row's instructions, `arguments_column` the arguments of each, as objects or as
    JSON. None for a row without instructions. loose: as IFEval's loose accuracy. Raises ValueError for an unknown instruction
    or `score`, LookupError without the columns.
    """
    from reward.instructions.checks import follows

    if score not in ("all", "share"):
        raise ValueError(f"score is {score!r}, it has to be 'all' or 'share'")
    rewards: list[float | None] = []
    names = column_values(columns, instructions_column)
    arguments = column_values(columns, arguments_column)
    for completion, own_names, own_arguments in zip(completions, names, arguments, strict=True):
        given = json.loads(own_arguments) if isinstance(own_arguments, str) else own_arguments
        text = answer_text(completion)
        found = [follows(text, *pair, loose=loose) for pair in zip(own_names or [], given or [], strict=True)]
        share = sum(found) / len(found) if found else None
        rewards.append(share if share is None or score == "share" else float(share == 1.0))
    return rewards
