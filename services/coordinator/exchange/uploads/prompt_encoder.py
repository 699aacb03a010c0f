"""Encodes prompts as rollout workers do, in the child process of `PromptCheck`: one JSON line in, one out.

    {"policy": {...}, "template": "auto", "template_kwargs": {}}
                                             loads a tokenizer; {"ready": true} or {"refused": "why"}
    {"prompt": "..."}                        {"digest": "...", "tokens": 3} or {"refused": "why"}

It is a separate process, because a tokenizer is heavy and its chat template is the user's code.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import xxhash

from paceline.data.tokens import encode_prompt, load_tokenizer
from paceline.errors import InvalidInput
from paceline.groups import IntArray
from paceline.spec import PolicySection

CHANGES_WITH_TIME = "strftime_now"
"""Name in a chat template that makes the same prompt differ from day to day."""


def prompt_digest(prompt_ids: IntArray) -> str:
    """Return XXH3-128 over the token ids as little-endian int32."""
    return xxhash.xxh3_128(prompt_ids.astype("<i4").tobytes()).hexdigest()


def load_encoder(request: dict[str, Any]) -> Callable[[Any, Any], IntArray]:
    """Return the function that encodes a prompt with tools. Raises InvalidInput if the template writes the date."""
    tokenizer: Any = load_tokenizer(PolicySection.model_validate(request["policy"]))
    if CHANGES_WITH_TIME in str(tokenizer.chat_template):
        raise InvalidInput("the chat template writes the date, so a prompt is not the same on two days")
    template, kwargs = request["template"], request.get("template_kwargs", {})
    return lambda prompt, tools: encode_prompt(tokenizer, prompt, template, kwargs, tools)


class WithoutTorch(PathFinder):
    """Module finder that hides torch: tokenizers do not need it, and its import takes longer than all other work."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] == "torch" else super().find_spec(fullname, path, target)


def main() -> None:
    """Answer requests until standard input ends."""
    sys.meta_path[:] = [WithoutTorch if finder is PathFinder else finder for finder in sys.meta_path]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    os.nice(10)  # gives way to services and the engine
    encode: Callable[[Any, Any], IntArray] | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {"ready": True}
        try:
            if encode is None:
                encode = load_encoder(request)
            else:
                ids = encode(request["prompt"], request.get("tools"))
                answer = {"digest": prompt_digest(ids), "tokens": len(ids)}
        except Exception as error:  # a chat template may raise anything
            answer = {"refused": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
