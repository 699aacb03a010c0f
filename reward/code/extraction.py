"""The program in a completion. Pure."""

from __future__ import annotations

import re
from typing import Literal

from paceline.chat.completion_texts import answer_of

FENCE = re.compile(
    r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL
)
"""A fenced block; one that nothing closes ends with the text."""


def program_of(text: str, extract: Literal["auto", "block", "none"] = "auto") -> str | None:
    """Return the program that a completion states; None for `block` without a block.

    The last fenced block of the answer counts, because a model may try others before. `auto` takes the whole
    text where there is no block, `none` always.
    """
    if extract == "none":
        return text
    answer = answer_of(text)
    blocks = FENCE.findall(answer)
    if blocks:
        return str(blocks[-1][1])
    return None if extract == "block" else answer


def with_prompt(prompt: str, text: str, program: str, entry_point: str) -> str:
    """Return the program, or the prompt continued by the whole text where the program does not define `entry_point` and the
    prompt does, as HumanEval's prompts do."""
    defines = re.compile(
        rf"^(async )?def {re.escape(entry_point)}\b|^{re.escape(entry_point)}\s*=", re.MULTILINE
    )
    if not defines.search(program) and defines.search(prompt):
        return prompt + answer_of(text)
    return program
