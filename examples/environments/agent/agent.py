"""An agent that knows nothing about training: it answers questions with a calculator, through any OpenAI-compatible
URL.

OPENAI_BASE_URL=https://… OPENAI_API_KEY=… python agent.py "What is 3*(4+5)?"
"""

import ast
import asyncio
import json
import operator
import os
import sys
from typing import Any

from openai import AsyncOpenAI

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Evaluates an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "for example 3*(4+5)"}},
                "required": ["expression"],
            },
        },
    }
]
MODEL = os.environ.get("OPENAI_MODEL", "policy")
MOST_ROUNDS = 4


async def answer(client: AsyncOpenAI, question: str) -> str:
    """Answer a question, with the tool if the model calls it."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MOST_ROUNDS):
        reply = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = calculate(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def calculate(arguments: dict[str, Any]) -> str:
    """Return the result of a call, or its error."""
    try:
        return str(value(ast.parse(str(arguments["expression"]), mode="eval").body))
    except (KeyError, ValueError, SyntaxError, ZeroDivisionError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"


def value(node: ast.expr) -> float:
    """Return the value of an expression of numbers, + - * / and parentheses."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
    raise ValueError("only numbers, + - * / and parentheses")


async def solve(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Answer a question of the data set at a conversation's URL, and return the reward. Only training needs this
    function."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        text = await answer(client, row["question"])
    return float(text.strip().rstrip(".").endswith(row["answer"]))


async def main(question: str) -> None:
    """Answer one question with the endpoint at OPENAI_BASE_URL."""
    async with AsyncOpenAI() as client:
        print(await answer(client, question))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
