"""Self-play of noughts and crosses: an agent for two players, both of them the policy.

Each player has a separate conversation. Only the moves of X are trained (`train_call`), so the opponent O is always the
newest policy, and the reward is X's.
"""

import re
from typing import Any

from openai import AsyncOpenAI

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
RULES = (
    "You play noughts and crosses as {mark}. The fields are numbered 1 to 9, row by row. Answer with the number of the field "
    "that you take, and nothing else."
)
WIN, DRAW, LOSS, ILLEGAL = 1.0, 0.5, 0.0, -0.5


async def solve(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Play a game; return the result of X."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        players = {mark: [{"role": "system", "content": RULES.format(mark=mark)}] for mark in "XO"}
        board = list(row["board"])
        for number in range(board.count("."), 0, -1):
            mark = "X" if (9 - number) % 2 == 0 else "O"
            field = await move(client, players[mark], board)
            if field is None:
                return ILLEGAL if mark == "X" else WIN
            board[field] = mark
            if any(all(board[place] == mark for place in line) for line in LINES):
                return WIN if mark == "X" else LOSS
        return DRAW


async def move(client: AsyncOpenAI, messages: list[Any], board: list[str]) -> int | None:
    """Return the field that a player takes; None for an illegal move."""
    shown = "\n".join("".join(board[start : start + 3]) for start in (0, 3, 6))
    messages.append({"role": "user", "content": f"The board is\n{shown}\nYour move."})
    answer = await client.chat.completions.create(model="policy", messages=messages)
    text = answer.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    numbers = re.findall(r"\d+", text)
    field = int(numbers[-1]) - 1 if numbers else -1
    return field if 0 <= field < 9 and board[field] == "." else None


def train_call(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> bool:
    """Return whether a call is trained: the moves of X only."""
    return messages[0]["content"] == RULES.format(mark="X")
