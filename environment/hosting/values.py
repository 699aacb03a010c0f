"""Checks of what user code returned: each is a plain value of its contract, or the fault for people.

Promise: nothing that user code returned gets further than its process unchecked.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any, NamedTuple

MAX_TEXT_CHARS = 4 << 20
"""Longest text that leaves the process; the service cuts it to tokens."""
MAX_STATE_BYTES = 8 << 20


class InvalidValue(Exception):
    """User code returned something else than its contract asks for."""


class Step(NamedTuple):
    """Outcome of one `step`."""

    observation: str
    reward: float | None
    done: bool


def text_of_tool(result: Any) -> str:
    """Return a tool's result as text, as TRL writes it into the conversation: `str(result)`."""
    return str(result)[:MAX_TEXT_CHARS]


def text_of_reset(result: Any) -> str | None:
    """Return the text that `reset` adds to the prompt. gym's `(observation, info)` is taken too."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        result = result[0]
    if result is None:
        return None
    if isinstance(result, list) and all(_is_text_part(part) for part in result):
        result = "".join(part["text"] for part in result)
    if not isinstance(result, str):
        raise InvalidValue(f"reset returned {short(result)}, it has to be text or None")
    return result[:MAX_TEXT_CHARS]


def step_of(result: Any) -> Step:
    """Return the outcome of `step`: (observation, reward, done), gym's five values, or a dict with `observations`, `reward`
    and `done`."""
    if isinstance(result, dict) and {"observations", "reward", "done"} <= result.keys():
        observed = result["observations"]
        if isinstance(observed, list):
            observed = "\n\n".join(
                str(each.get("content", "")) if isinstance(each, dict) else str(each) for each in observed
            )
        result = (observed, result["reward"], result["done"])
    elif isinstance(result, tuple) and len(result) == 5:
        result = (result[0], result[1], bool(result[2]) or bool(result[3]))
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise InvalidValue(f"step returned {short(result)}, it has to be (observation, reward, done)")
    observation, reward, done = result
    if observation is None:
        observation = ""
    if not isinstance(observation, str):
        raise InvalidValue(f"step returned the observation {short(observation)}, it has to be text")
    if not isinstance(_plain(done), bool):
        raise InvalidValue(f"step returned done as {short(done)}, it has to be True or False")
    return Step(observation[:MAX_TEXT_CHARS], reward_of(reward, "step"), bool(done))


def reward_of(value: Any, source: str) -> float | None:
    """Return a reward: a finite number or None. `source` is the function that returned it."""
    value = _plain(value)
    if value is None:
        return None
    if not isinstance(value, bool | int | float):
        raise InvalidValue(f"{source} returned the reward {short(value)}, it has to be a number or None")
    number = float(value)
    if not math.isfinite(number) or abs(number) > 3.4028234663852886e38:
        raise InvalidValue(f"{source} returned the reward {number}, it has to be finite")
    return number


def encode_state(state: Any) -> str:
    """Return the state of `save` as text: bytes, or anything that JSON holds."""
    if isinstance(state, bytes | bytearray):
        text = "b" + base64.b64encode(state).decode()
    else:
        try:
            text = "j" + json.dumps(state)
        except (TypeError, ValueError) as error:
            raise InvalidValue(f"save returned {short(state)}, it has to be bytes or JSON: {error}") from None
    if len(text) > MAX_STATE_BYTES:
        raise InvalidValue(f"save returned {len(text)} bytes, at most {MAX_STATE_BYTES} are kept for a turn")
    return text


def decode_state(text: str) -> Any:
    return base64.b64decode(text[1:]) if text.startswith("b") else json.loads(text[1:])


def short(value: Any) -> str:
    """Return a value for a message: its type and its beginning."""
    return f"{type(value).__name__} {repr(value)[:60]}"


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)  # scalars of NumPy and torch, without importing either
    if item is None:
        return value
    try:
        return item()
    except (TypeError, ValueError, RuntimeError):
        return value
