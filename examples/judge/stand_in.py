"""A judge without a model, to try judged rewards: an OpenAI-compatible endpoint that scores sums by their right digits.

python stand_in.py --port 8099

It reads the task and the answer from the message of the built-in template, and answers with a judge's JSON object. Sums
are three digits, least significant first, as in examples/arithmetic.
"""

from __future__ import annotations

import argparse
import json
import re

from aiohttp import web

MESSAGE = re.compile(r"<task>\n(\d+)\+(\d+)=\n</task>.*<answer>\n(.*)\n</answer>", re.DOTALL)


def verdict(message: str) -> dict[str, object]:
    """Return the score of an answer, from 1 to 10, and the reason."""
    found = MESSAGE.search(message)
    if found is None:
        return {"reasoning": "there is no sum in the task", "score": 1}
    right, answer = f"{int(found[1]) + int(found[2]):03d}"[::-1], found[3].strip()
    digits = sum(a == b for a, b in zip(answer, right, strict=False)) if len(answer) == len(right) else 0
    return {
        "reasoning": f"{digits} of the digits {right} are right",
        "score": 1 + 9 * digits / len(right),
    }


async def complete(request: web.Request) -> web.Response:
    """Answer POST /v1/chat/completions."""
    body = await request.json()
    message = body["messages"][-1]["content"]
    text = json.dumps(verdict(message))
    usage = {"prompt_tokens": len(message) // 4, "completion_tokens": len(text) // 4}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return web.json_response({"model": body.get("model"), "choices": [choice], "usage": usage})


def main() -> None:
    """Serve on loopback until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8099)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    web.run_app(app, host="127.0.0.1", port=parser.parse_args().port)


if __name__ == "__main__":
    main()
